# SPDX-License-Identifier: Apache-2.0
"""A ctkvrd process of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

ENGINE = ("arena_bytes=64MiB", "scratch_bytes=32MiB", "lanes=1")
SMALL = ("--metrics_address=", "--log_format=json", *(f"--{setting}" for setting in ENGINE))
SMALL_ENGINE = f"embedded://small?{'&'.join(ENGINE)}"  # the same, in this process


def program() -> Path:
    """The ctkvrd under test. Without one nothing here can be proved, so that is a failure and no reason to skip."""
    path = os.environ.get("CTKVRD", "")
    if not path or not Path(path).is_file():
        raise FileNotFoundError(f"CTKVRD is {path!r}; it must name the ctkvrd to test against")
    return Path(path)


class Server:
    """Serves from its construction until stop() or kill(). Log lines are JSON on stderr."""

    def __init__(self, *flags: str, address: str = "127.0.0.1:0") -> None:
        command = [str(program()), f"--listen_address={address}", *SMALL, *flags]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._draining = False
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.address: str = self.await_event("serving")["listen_address"]

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        with self._news:
            self._lines.append("")  # the end
            self._news.notify_all()

    def await_event(self, name: str, part: str = "") -> dict[str, Any]:
        """The first log line of that event with `part` in it. RuntimeError: the process ended without."""
        seen = 0
        while True:
            with self._news:
                self._news.wait_for(lambda: len(self._lines) > seen)  # noqa: B023 (called before the next round)
                line = self._lines[seen]
            seen += 1
            if not line:
                raise RuntimeError(f"ctkvrd ended without event {name}: {''.join(self._lines)}")
            if f'"event":"{name}"' in line and part in line:
                found: dict[str, Any] = json.loads(line)
                return found

    def lines(self) -> list[str]:
        """What it has logged so far."""
        with self._news:
            return list(self._lines)

    def kill(self) -> None:
        """As the machine's failure would end it."""
        self._process.kill()
        self._end()

    def drain(self) -> None:
        """Tells it to end."""
        if not self._draining and self._process.poll() is None:
            self._process.terminate()
        self._draining = True

    def stop(self) -> int:
        """Drains it; returns its exit code."""
        self.drain()
        return self._end()

    def _end(self) -> int:
        try:
            code = self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        self._reader.join()
        if self._process.stderr is not None:
            self._process.stderr.close()
        return code

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
