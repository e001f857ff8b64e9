# SPDX-License-Identifier: Apache-2.0
"""The engine in this process: channels as ctkvr.channel wants them, without a server.

An address "embedded://NAME?setting=value&..." names one engine of the process: the first client makes it, the last one
that is closed ends it with all its sessions. Settings are those of ctkvrd that are the engine's: lanes, arena_bytes,
scratch_bytes, queue_items_max, sessions_max, truth_share, truth_budget, backend.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2

from ctkvr._version import __version__
from ctkvr.channel import Method

if TYPE_CHECKING:
    from ctkvr import _engine

__all__ = ["EMBEDDED", "AioEmbeddedChannel", "EmbeddedChannel", "check_credentials", "is_embedded"]

EMBEDDED = "embedded://"  # the engine without a name

# How long a call waits before it looks for a signal, or whether its channel was closed.
_SLICE_SECONDS = 0.1
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def is_embedded(address: str) -> bool:
    """Whether the address is of an engine in this process."""
    return address.startswith("embedded:")


def check_credentials(credentials: grpc.ChannelCredentials | None, token: str | None) -> None:
    """ValueError: there are some."""
    if credentials is not None or token is not None:
        raise ValueError("credentials and token are for a server; an engine in this process takes none")


class EmbeddedError(grpc.RpcError):
    """How a call failed, told as gRPC tells it."""

    def __init__(self, code: grpc.StatusCode, text: str, details: bytes | None = None) -> None:
        super().__init__(text)
        self._code = code
        self._text = text
        self._details = details

    def code(self) -> grpc.StatusCode:
        """The code."""
        return self._code

    def details(self) -> str:
        """The text."""
        return self._text

    def trailing_metadata(self) -> Any:
        """google.rpc.Status, serialised."""
        return () if self._details is None else (("grpc-status-details-bin", self._details),)


def _deadline_passed() -> EmbeddedError:
    return EmbeddedError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


def _check_time(until: float | None) -> None:
    """A stream ends with its deadline, whatever its messages have come to."""
    if until is not None and time.monotonic() >= until:
        raise _deadline_passed()


def _cancelled(text: str) -> EmbeddedError:
    return EmbeddedError(grpc.StatusCode.CANCELLED, text)


def _take(pending: _engine.Pending) -> bytes | None:
    code, payload = pending.take()
    if code == 0:
        return payload
    text = status_pb2.Status.FromString(payload or b"").message
    raise EmbeddedError(_CODES.get(code, grpc.StatusCode.UNKNOWN), text, payload)


def _reply(payload: bytes | None) -> bytes:
    return b"" if payload is None else payload


# ---- Engines ---------------------------------------------------------------------------------------------------------


def _load() -> Any:
    try:
        return importlib.import_module("ctkvr._engine")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this installation of ctkvr has no engine ({error}); give the address of a server, "
            'ctkvr.connect("host:port"), or install a wheel that was built for this platform without CTKVR_ENGINE=off',
            name="ctkvr._engine",
        ) from error


class _Engines:
    """The engines of this process, by name, with the number of channels that use each. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, tuple[_engine.Engine, dict[str, str]]] = {}
        self._users: dict[str, int] = {}

    def acquire(self, address: str) -> tuple[str, _engine.Engine]:
        """ValueError: a malformed address, a setting that is refused, or other settings than the engine has."""
        parts = urlsplit(address)
        name, pairs = parts.netloc, parse_qsl(parts.query, keep_blank_values=True)
        settings = dict(pairs)
        if parts.path not in ("", "/") or parts.fragment or len(settings) != len(pairs):
            raise ValueError(f"address is {address!r}; embedded://NAME?setting=value&... with each once is expected")
        with self._lock:
            if name not in self._open:
                engine = _load().open(settings, __version__)
                if isinstance(engine, str):
                    raise ValueError(f"address is {address!r}: {engine}")
                self._open[name] = (engine, settings)
            engine, given = self._open[name]
            if settings and settings != given:
                raise ValueError(f"address is {address!r}; the engine {name!r} is open with settings {given}")
            self._users[name] = self._users.get(name, 0) + 1
            return name, engine

    def release(self, name: str) -> None:
        """The last one ends the engine."""
        with self._lock:
            self._users[name] = self._users.get(name, 0) - 1
            if self._users[name] > 0:
                return
            del self._users[name]
            ended = self._open.pop(name, None)
        del ended  # waits for its threads: not under the lock

    def forget(self) -> None:
        """Lets go of all of them."""
        self.__init__()  # type: ignore[misc]


_engines = _Engines()
atexit.register(_engines.forget)
# The engine's threads stay in the parent: a child makes engines of its own.
os.register_at_fork(after_in_child=_engines.forget)


class _Lease:
    """One channel's use of an engine, until close(), or until the channel is no more. Thread-safe."""

    def __init__(self, address: str) -> None:
        name, self._engine = _engines.acquire(address)
        self._process = os.getpid()
        self._end = weakref.finalize(self, _Lease._release, name, self._process)
        self.closed = False

    @staticmethod
    def _release(name: str, process: int) -> None:
        if os.getpid() == process:
            _engines.release(name)

    @property
    def engine(self) -> _engine.Engine:
        """ValueError: closed. RuntimeError: made before a fork."""
        if self.closed:
            raise ValueError("the client is closed")
        if os.getpid() != self._process:
            raise RuntimeError("this client was made before the process forked; call ctkvr.connect() in the child")
        return self._engine

    def close(self) -> None:
        """May be repeated."""
        self.closed = True
        with contextlib.suppress(AttributeError):
            del self._engine
        self._end()


# ---- Blocking --------------------------------------------------------------------------------------------------------


def _until(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


class EmbeddedChannel:
    """The Channel to an engine in this process."""

    def __init__(self, address: str) -> None:
        self._lease = _Lease(address)

    def finish(self, pending: _engine.Pending, until: float | None) -> bytes | None:
        """Waits for a call, in slices so that signals are handled."""
        try:
            while True:
                left = _SLICE_SECONDS if until is None else min(until - time.monotonic(), _SLICE_SECONDS)
                if pending.wait(max(left, 0.0)):
                    return _take(pending)
                if self._lease.closed:
                    raise _cancelled("Channel closed!")
                if until is not None and time.monotonic() >= until:
                    raise _deadline_passed()
        except BaseException:
            pending.cancel()
            raise

    def unary(self, method: Method, request: Message, timeout: float | None) -> Any:
        """As Channel.unary."""
        pending = self._lease.engine.call(method.name, method.serialize(request), timeout, None, 0)
        return method.deserialize(_reply(self.finish(pending, _until(timeout))))

    def upload(self, method: Method, requests: Iterator[Message], timeout: float | None) -> Any:
        """As Channel.upload. A message is packed while the one before it is appended."""
        until = _until(timeout)
        upload = self._lease.engine.open_upload(timeout)
        running: _engine.Pending | None = None
        for request in requests:
            packed = method.serialize(request)
            if running is not None:
                self.finish(running, until)
            running = upload.append(packed, None, 0)
        if running is not None:
            self.finish(running, until)
        return method.deserialize(_reply(self.finish(upload.finish(None, 0), until)))

    def stream(self, method: Method, timeout: float | None) -> EmbeddedStream:
        """As Channel.stream."""
        return EmbeddedStream(self, method, self._lease.engine.open_stream(timeout), _until(timeout))

    def close(self) -> None:
        """As Channel.close."""
        self._lease.close()


class EmbeddedStream:
    """The Stream to an engine in this process."""

    def __init__(self, channel: EmbeddedChannel, method: Method, stream: _engine.Stream, until: float | None) -> None:
        self._channel = channel
        self._method = method
        self._stream = stream
        self._until = until
        self._cancelled = False

    def write(self, request: Message) -> None:
        """As Stream.write."""
        self._stream.write(self._method.serialize(request))

    def done_writing(self) -> None:
        """As Stream.done_writing."""
        self._stream.end_writes()

    def read(self) -> Any:
        """As Stream.read."""
        try:
            _check_time(self._until)
            payload = self._channel.finish(self._stream.read(None, 0), self._until)
            _check_time(self._until)
        except EmbeddedError:
            self._stream.cancel()
            if self._cancelled:
                raise _cancelled("Locally cancelled by application!") from None
            raise
        return None if payload is None else self._method.deserialize(payload)

    def cancel(self) -> None:
        """As Stream.cancel."""
        self._cancelled = True
        self._stream.cancel()


# ---- asyncio ---------------------------------------------------------------------------------------------------------


class AioEmbeddedChannel:
    """The AioChannel to an engine in this process. The engine's threads wake the event loop by a file descriptor."""

    def __init__(self, address: str) -> None:
        """To be called on the event loop."""
        self._lease = _Lease(address)
        self._loop = asyncio.get_running_loop()
        self._notifier: _engine.Notifier = _load().Notifier()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._tokens = itertools.count(1)
        self._loop.add_reader(self._notifier.descriptor, self._wake)

    def _wake(self) -> None:
        for token in self._notifier.take():
            future = self._waiting.pop(token, None)
            if future is not None and not future.done():
                future.set_result(None)

    async def finish(
        self, start: Callable[[_engine.Notifier, int], _engine.Pending], until: float | None
    ) -> bytes | None:
        """Starts a call and waits for it."""
        token = next(self._tokens)
        future = self._waiting[token] = self._loop.create_future()
        pending: _engine.Pending | None = None
        try:
            pending = start(self._notifier, token)
            if not pending.wait(0.0):
                left = None if until is None else max(until - time.monotonic(), 0.0)
                done, _ = await asyncio.wait({future}, timeout=left)
                if not done:
                    raise _deadline_passed()
                future.result()
            return _take(pending)
        except BaseException:
            if pending is not None:
                pending.cancel()
            raise
        finally:
            self._waiting.pop(token, None)

    async def unary(self, method: Method, request: Message, timeout: float | None) -> Any:
        """As Channel.unary."""
        engine, packed = self._lease.engine, method.serialize(request)
        payload = await self.finish(
            lambda notifier, token: engine.call(method.name, packed, timeout, notifier, token), _until(timeout)
        )
        return method.deserialize(_reply(payload))

    async def upload(self, method: Method, requests: Iterator[Message], timeout: float | None) -> Any:
        """As Channel.upload."""
        until = _until(timeout)
        upload = self._lease.engine.open_upload(timeout)
        for request in requests:
            packed = method.serialize(request)
            await self.finish(lambda notifier, token, packed=packed: upload.append(packed, notifier, token), until)  # type: ignore[misc]
        return method.deserialize(_reply(await self.finish(upload.finish, until)))

    def stream(self, method: Method, timeout: float | None) -> AioEmbeddedStream:
        """As Channel.stream."""
        return AioEmbeddedStream(self, method, self._lease.engine.open_stream(timeout), _until(timeout))

    async def close(self) -> None:
        """As Channel.close."""
        if self._lease.closed:
            return
        self._loop.remove_reader(self._notifier.descriptor)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_cancelled("Channel closed!"))
        self._lease.close()


class AioEmbeddedStream:
    """The AioStream to an engine in this process."""

    def __init__(
        self, channel: AioEmbeddedChannel, method: Method, stream: _engine.Stream, until: float | None
    ) -> None:
        self._channel = channel
        self._method = method
        self._stream = stream
        self._until = until
        self._cancelled = False

    async def write(self, request: Message) -> None:
        """As Stream.write."""
        self._stream.write(self._method.serialize(request))

    async def done_writing(self) -> None:
        """As Stream.done_writing."""
        self._stream.end_writes()

    async def read(self) -> Any:
        """As Stream.read."""
        try:
            _check_time(self._until)
            payload = await self._channel.finish(self._stream.read, self._until)
            _check_time(self._until)
        except EmbeddedError:
            self._stream.cancel()
            if self._cancelled:
                raise _cancelled("Locally cancelled by application!") from None
            raise
        return None if payload is None else self._method.deserialize(payload)

    def cancel(self) -> None:
        """As Stream.cancel."""
        self._cancelled = True
        self._stream.cancel()
