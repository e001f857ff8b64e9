# SPDX-License-Identifier: Apache-2.0
"""The client that blocks. ctkvr.aio is its twin; what calls do stands in ctkvr.calls, once for both."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from ctkvr import calls
from ctkvr.calls import ClientCore, Connection, Operation, SessionCore
from ctkvr.channel import METHODS, Channel, GrpcChannel, Traceparent, token_metadata
from ctkvr.decode import DecodeCore, Step, StepResult, open_stream
from ctkvr.embedded import EMBEDDED, EmbeddedChannel, check_credentials, is_embedded
from ctkvr.errors import CtkvrError, from_rpc, make_error
from ctkvr.retry import RetryOptions
from ctkvr.session import SessionHandle

__all__ = ["Client", "DecodeStream", "Session", "connect"]

P = ParamSpec("P")
T = TypeVar("T")


class Runner:
    """Runs operations by blocking. Thread-safe."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def run(self, operation: Operation[T]) -> T:
        """Drives an operation to its end."""
        try:
            effect = next(operation)
            while True:
                try:
                    result = self._perform(effect)
                except grpc.RpcError as error:
                    effect = operation.throw(from_rpc(error))
                else:
                    effect = operation.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value
        finally:
            operation.close()

    def _perform(self, effect: calls.Effect) -> Any:
        if isinstance(effect, calls.Sleep):
            time.sleep(effect.seconds)
            return None
        method = METHODS[effect.method]
        if isinstance(effect, calls.Unary):
            return self.channel.unary(method, effect.request, effect.timeout)
        return self.channel.upload(method, effect.requests, effect.timeout)


def _client_call(method: Callable[Concatenate[ClientCore, P], Operation[T]]) -> Callable[Concatenate[Client, P], T]:
    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.runner.run(method(self.core, *args, **kwargs))

    return call


def _session_maker(
    method: Callable[Concatenate[ClientCore, P], Operation[SessionCore]],
) -> Callable[Concatenate[Client, P], Session]:
    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Session:
        return Session(self.runner.run(method(self.core, *args, **kwargs)), self.runner)

    return call


def _session_call(method: Callable[Concatenate[SessionCore, P], Operation[T]]) -> Callable[Concatenate[Session, P], T]:
    @functools.wraps(method)
    def call(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.runner.run(method(self.core, *args, **kwargs))

    return call


def _stream_maker(
    method: Callable[Concatenate[ClientCore | SessionCore, P], DecodeCore],
) -> Callable[Concatenate[Client | Session, P], DecodeStream]:
    @functools.wraps(method)
    def call(self: Client | Session, /, *args: P.args, **kwargs: P.kwargs) -> DecodeStream:
        return DecodeStream(method(self.core, *args, **kwargs), self.runner)

    return call


def connect(
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
    """Connects to "host:port" or "unix:/path" and asks for the server's limits; or uses an engine in this process.

    address None is "embedded://": the engine of this process, made by the first client and ended by the last;
    ctkvr.embedded explains names and settings.
    timeout: seconds of a call with all its attempts, unless the call says otherwise. credentials None: no encryption.
    token: proves who calls, to a server with access control; over an unencrypted connection it goes to this machine
    alone, unless allow_plaintext_token. append_bytes: append() splits into messages of about so many. traceparent:
    asked, on the caller's thread, at the start of every call for the W3C trace context it belongs to, which the server
    writes into its log lines. Raises Unavailable: nobody answers; NotAuthenticated: the server wants another token;
    ModuleNotFoundError: this installation has no engine.
    """
    channel: Channel
    if address is None or is_embedded(address):
        check_credentials(credentials, token)
        channel = EmbeddedChannel(address or EMBEDDED)
    else:
        proof = token_metadata(address, credentials, token, allow_plaintext_token)
        channel = GrpcChannel(address, credentials, traceparent, proof)
    connection = Connection(timeout=timeout, append_bytes=append_bytes, retry=retry or RetryOptions())
    client = Client(ClientCore(connection), Runner(channel))
    try:
        client.server_info()
    except BaseException:
        client.close()
        raise
    return client


class Client:
    """A connection to one server. Thread-safe. The end of a `with` closes the connection, and no session."""

    def __init__(self, core: ClientCore, runner: Runner) -> None:
        """Use connect()."""
        self.core = core
        self.runner = runner

    server_info = _client_call(ClientCore.server_info)
    list_sessions = _client_call(ClientCore.list_sessions)
    open_session = _session_maker(ClientCore.open_session)
    attach_session = _session_maker(ClientCore.attach_session)
    decode = _stream_maker(open_stream)

    def close(self) -> None:
        """Ends the connection; calls that run are cancelled."""
        self.runner.channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Session(SessionHandle):
    """A session on the server. Thread-safe; appends that must follow each other need the caller's own order.

    The end of a `with` closes the session. Without one it lives until close(), or until no call has named it for its
    lease, and attach_session finds it again.
    """

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

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.runner.run(self.core.leave())
        except CtkvrError:
            if kind is None:  # else the error that ended the block is the one to tell; the lease ends the session
                raise


class DecodeStream:
    """The hot path: a step's append and retrieval in one message, many in flight, replies in order.

    Not retried: after a failure open another stream and send `unanswered` again; appends are idempotent by position.
    One thread may send while another receives. The end of a `with` waits for what is in flight and drops it.
    """

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

    def send(self, steps: Step | Sequence[Step]) -> None:
        """Sends one message: a step, or the steps of several sessions.

        ValueError, TypeError: a step that does not fit its layer; RuntimeError: in_flight_max messages wait for
        receive(). Nothing is sent then.
        """
        if self._ended is not None:
            raise self._ended
        self._stream.write(self._runner.run(self._core.prepare([steps] if isinstance(steps, Step) else steps)))

    def receive(self) -> list[StepResult]:
        """Waits for the results of the oldest message in flight, in the order of its steps.

        RuntimeError: nothing is in flight. Raises how the stream ended, where it did, now and later.
        """
        if self._ended is not None:
            raise self._ended
        self._core.check_receivable()
        try:
            reply = self._stream.read()
        except grpc.RpcError as error:
            raise self._end(from_rpc(error)) from None
        if reply is None:
            raise self._end(None)
        return self._core.take(reply)

    def step(self, layer: int, keys: Any = None, values: Any = None, queries: Any = None) -> StepResult:
        """Sends one step of the stream's session and waits for it. RuntimeError: others are in flight."""
        if self.in_flight:
            raise RuntimeError(f"in_flight is {self.in_flight}; receive first")
        self.send(Step(layer, keys, values, queries))
        return self.receive()[0]

    def _end(self, error: CtkvrError | None) -> CtkvrError:
        self._stream.done_writing()
        self._ended = self._core.end(error)
        return self._ended

    def close(self) -> None:
        """Says that no more will be sent and waits for what is in flight; its results are dropped."""
        if self._ended is not None:
            return
        self._stream.done_writing()
        try:
            while self.in_flight:
                self.receive()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends the stream at once; appends that the server has done stay done."""
        self._stream.cancel()
        if self._ended is None:
            self._end(make_error("CANCELLED", "the stream was closed on this side"))

    def __enter__(self) -> DecodeStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.cancel()
