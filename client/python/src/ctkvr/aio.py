# SPDX-License-Identifier: Apache-2.0
"""The client for asyncio: the same calls as ctkvr.client, to be awaited.

    async with await ctkvr.aio.connect("127.0.0.1:7420") as client:
        session = await client.open_session(...)
        answer = await session.retrieve(0, queries)

Arrays are packed and unpacked on the event loop: a few milliseconds for a message of append_bytes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from ctkvr import calls
from ctkvr.calls import ClientCore, Connection, Operation, SessionCore
from ctkvr.channel import METHODS, AioChannel, AioGrpcChannel, Traceparent, token_metadata
from ctkvr.decode import DecodeCore, Step, StepResult, open_stream
from ctkvr.embedded import EMBEDDED, AioEmbeddedChannel, check_credentials, is_embedded
from ctkvr.errors import CtkvrError, from_rpc, make_error
from ctkvr.retry import RetryOptions
from ctkvr.session import SessionHandle

__all__ = ["Client", "DecodeStream", "Session", "connect"]

P = ParamSpec("P")
T = TypeVar("T")


class Runner:
    """Runs operations by awaiting."""

    def __init__(self, channel: AioChannel) -> None:
        self.channel = channel

    async def run(self, operation: Operation[T]) -> T:
        """Drives an operation to its end."""
        try:
            effect = next(operation)
            while True:
                try:
                    result = await self._perform(effect)
                except grpc.RpcError as error:
                    effect = operation.throw(from_rpc(error))
                else:
                    effect = operation.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value
        finally:
            operation.close()

    def _perform(self, effect: calls.Effect) -> Awaitable[Any]:
        if isinstance(effect, calls.Sleep):
            return asyncio.sleep(effect.seconds)
        method = METHODS[effect.method]
        if isinstance(effect, calls.Unary):
            return self.channel.unary(method, effect.request, effect.timeout)
        return self.channel.upload(method, effect.requests, effect.timeout)


def _client_call(
    method: Callable[Concatenate[ClientCore, P], Operation[T]],
) -> Callable[Concatenate[Client, P], Coroutine[Any, Any, T]]:
    @functools.wraps(method)
    async def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.runner.run(method(self.core, *args, **kwargs))

    return call


def _session_maker(
    method: Callable[Concatenate[ClientCore, P], Operation[SessionCore]],
) -> Callable[Concatenate[Client, P], Coroutine[Any, Any, Session]]:
    @functools.wraps(method)
    async def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Session:
        return Session(await self.runner.run(method(self.core, *args, **kwargs)), self.runner)

    return call


def _session_call(
    method: Callable[Concatenate[SessionCore, P], Operation[T]],
) -> Callable[Concatenate[Session, P], Coroutine[Any, Any, T]]:
    @functools.wraps(method)
    async def call(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.runner.run(method(self.core, *args, **kwargs))

    return call


def _stream_maker(
    method: Callable[Concatenate[ClientCore | SessionCore, P], DecodeCore],
) -> Callable[Concatenate[Client | Session, P], DecodeStream]:
    @functools.wraps(method)
    def call(self: Client | Session, /, *args: P.args, **kwargs: P.kwargs) -> DecodeStream:
        return DecodeStream(method(self.core, *args, **kwargs), self.runner)

    return call


async def connect(
    address: str | None = None,
    *,
    timeout: float = 30.0,
    credentials: grpc.ChannelCredentials | None = None,
    token: str | None = None,
    allow_plaintext_token: bool = False,
    retry: RetryOptions | None = None,
    append_bytes: int = 8 << 20,
    traceparent: Traceparent | None = None,
) -> Client:
    """As ctkvr.connect."""
    channel: AioChannel
    if address is None or is_embedded(address):
        check_credentials(credentials, token)
        channel = AioEmbeddedChannel(address or EMBEDDED)
    else:
        proof = token_metadata(address, credentials, token, allow_plaintext_token)
        channel = AioGrpcChannel(address, credentials, traceparent, proof)
    connection = Connection(timeout=timeout, append_bytes=append_bytes, retry=retry or RetryOptions())
    client = Client(ClientCore(connection), Runner(channel))
    try:
        await client.server_info()
    except BaseException:
        await client.close()
        raise
    return client


class Client:
    """A connection to one server, of one event loop. The end of an `async with` closes it, and no session."""

    def __init__(self, core: ClientCore, runner: Runner) -> None:
        """Use connect()."""
        self.core = core
        self.runner = runner

    server_info = _client_call(ClientCore.server_info)
    list_sessions = _client_call(ClientCore.list_sessions)
    open_session = _session_maker(ClientCore.open_session)
    attach_session = _session_maker(ClientCore.attach_session)
    decode = _stream_maker(open_stream)

    async def close(self) -> None:
        """Ends the connection; calls that run are cancelled."""
        await self.runner.channel.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Session(SessionHandle):
    """As ctkvr.Session; the end of an `async with` closes the session."""

    def __init__(self, core: SessionCore, runner: Runner) -> None:
        """Use Client.open_session() or attach_session()."""
        super().__init__(core)
        self.runner = runner

    append = _session_call(SessionCore.append)
    retrieve = _session_call(SessionCore.retrieve)
    truncate = _session_call(SessionCore.truncate)
    maintain = _session_call(SessionCore.maintain)
    info = _session_call(SessionCore.info)
    keep_alive = _session_call(SessionCore.keep_alive)
    close = _session_call(SessionCore.close)
    decode = _stream_maker(open_stream)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.runner.run(self.core.leave())
        except CtkvrError:
            if kind is None:  # else the error that ended the block is the one to tell; the lease ends the session
                raise


class DecodeStream:
    """As ctkvr.DecodeStream. One task may send while another receives."""

    def __init__(self, core: DecodeCore, runner: Runner) -> None:
        """Use decode() of a session or client."""
        self._core = core
        self._runner = runner
        self._stream = runner.channel.stream(METHODS["Decode"], core.timeout)
        self._ended: CtkvrError | None = None

    @property
    def in_flight(self) -> int:
        """Messages sent and not yet received."""
        return self._core.in_flight

    @property
    def unanswered(self) -> list[list[Step]]:
        """The steps in flight, message by message, positions filled in."""
        return self._core.unanswered

    async def send(self, steps: Step | Sequence[Step]) -> None:
        """As ctkvr.DecodeStream.send."""
        if self._ended is not None:
            raise self._ended
        request = await self._runner.run(self._core.prepare([steps] if isinstance(steps, Step) else steps))
        await self._stream.write(request)

    async def receive(self) -> list[StepResult]:
        """As ctkvr.DecodeStream.receive."""
        if self._ended is not None:
            raise self._ended
        self._core.check_receivable()
        try:
            reply = await self._stream.read()
        except grpc.RpcError as error:
            raise self._end(from_rpc(error)) from None
        if reply is None:
            raise self._end(None)
        return self._core.take(reply)

    async def step(self, layer: int, keys: Any = None, values: Any = None, queries: Any = None) -> StepResult:
        """As ctkvr.DecodeStream.step."""
        if self.in_flight:
            raise RuntimeError(f"in_flight is {self.in_flight}; receive first")
        await self.send(Step(layer, keys, values, queries))
        return (await self.receive())[0]

    def _end(self, error: CtkvrError | None) -> CtkvrError:
        self._ended = self._core.end(error)
        return self._ended

    async def close(self) -> None:
        """As ctkvr.DecodeStream.close."""
        if self._ended is not None:
            return
        try:
            await self._stream.done_writing()
            while self.in_flight:
                await self.receive()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """As ctkvr.DecodeStream.cancel."""
        self._stream.cancel()
        if self._ended is None:
            self._end(make_error("CANCELLED", "the stream was closed on this side"))

    async def __aenter__(self) -> DecodeStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
        else:
            self.cancel()
