# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy on loopback that breaks or stalls connections as told."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Forwards to `upstream`; cuts a connection when it has carried so many bytes to the server, the first `cuts` of
    them. Both ends see a closed connection. 0: none is cut."""

    def __init__(self, upstream: str, cut_after_bytes: int = 0, cuts: int = 1) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = (host, int(port))
        self._cut_after_bytes = cut_after_bytes
        self._cuts_left = cuts if cut_after_bytes > 0 else 0
        self._stalled = False
        self.cuts_done = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._upstream)
                limit = None
                if self._cuts_left > 0:
                    self._cuts_left -= 1
                    limit = self._cut_after_bytes
                threading.Thread(target=self._pump, args=(client, server, limit), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, None), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        carried = 0
        with contextlib.suppress(OSError):  # the other pump ended it
            while data := source.recv(65536):
                if not self._stalled:
                    sink.sendall(data)
                carried += len(data)
                if limit is not None and carried > limit:
                    self.cuts_done += 1
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def stall(self) -> None:
        """From now on nothing comes through, and nobody is told."""
        self._stalled = True

    def close(self) -> None:
        self._listener.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
