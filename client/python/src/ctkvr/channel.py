# SPDX-License-Identifier: Apache-2.0
"""The calls of the service, read from the contract, and the way they travel: what a client asks of a channel.

A channel to a server is gRPC's (here); one to an engine in this process is in ctkvr.embedded. Both raise grpc.RpcError.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.message import Message

from ctkvr import wire
from ctkvr.v1 import cache_pb2

# gRPC's own default of 4 MiB is too small for rows; the server's limit on the rows of a reply is 256 MiB, this leaves
# room beside them.
_RECEIVE_BYTES_MAX = 320 << 20

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", _RECEIVE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),  # the server's limit is the one that counts
    # gRPC waits a second before it dials again, longer than all attempts of a retried call together.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
    ("grpc.use_local_subchannel_pool", 1),  # two clients of one process are two connections
]

CallMetadata = tuple[tuple[str, str], ...]
# The W3C trace context of the call that begins, "00-<trace id>-<span id>-<flags>"; None or "": none.
Traceparent = Callable[[], str | None]

_THIS_MACHINE = re.compile(r"unix:.*|localhost(:\d+)?|127(\.\d+){3}(:\d+)?|\[::1\](:\d+)?")


def token_metadata(
    address: str, credentials: grpc.ChannelCredentials | None, token: str | None, allow_plaintext: bool
) -> CallMetadata:
    """What every call carries to say who calls. ValueError: no token, or it would cross a network in the clear."""
    if token is None:
        return ()
    if re.fullmatch(r"[\x21-\x7e]+", token) is None:
        raise ValueError("what is given is no token: it is empty, or has characters that no token has")
    if credentials is None and not allow_plaintext and _THIS_MACHINE.fullmatch(address) is None:
        raise ValueError(f"{address} would get the token unencrypted; give credentials, or allow_plaintext_token")
    return (("authorization", f"Bearer {token}"),)


_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # not in its stubs


@dataclass(frozen=True)
class Method:
    """One call of the service."""

    name: str
    path: str
    serialize: Callable[[Message], bytes]
    deserialize: Callable[[bytes], Any]  # replies with answers: to wire.Reply


def _reader(message_class: Any) -> Callable[[bytes], Any]:
    items = message_class.DESCRIPTOR.fields_by_name.get("items")
    has_answers = items is not None and "answer" in items.message_type.fields_by_name
    return wire.reader(message_class) if has_answers else message_class.FromString


def _methods() -> dict[str, Method]:
    service = cache_pb2.DESCRIPTOR.services_by_name["Cache"]
    return {
        method.name: Method(
            method.name,
            f"/{service.full_name}/{method.name}",
            lambda message: message.SerializeToString(),
            _reader(message_factory.GetMessageClass(method.output_type)),
        )
        for method in service.methods
    }


METHODS = _methods()


def trace_metadata(traceparent: Traceparent | None) -> CallMetadata:
    """What a call carries of its trace. Texts that are no trace context are left out."""
    text = traceparent() if traceparent else None
    if not text or re.fullmatch(r"[0-9a-zA-Z-]{55,}", text) is None:
        return ()
    return (("traceparent", text),)


class Stream(Protocol):
    """A call of many requests and many replies. One thread may write while another reads."""

    def write(self, request: Message) -> None:
        """Sends a request. Where the stream has ended, read() says how."""

    def done_writing(self) -> None:
        """Says that there are no more."""

    def read(self) -> Any:
        """The next reply; None: the stream has ended well. Raises grpc.RpcError."""

    def cancel(self) -> None:
        """Ends the stream at once."""


class Channel(Protocol):
    """The way to a service, for callers that block. Thread-safe. Timeouts are seconds; None: no limit."""

    def unary(self, method: Method, request: Message, timeout: float | None) -> Any:
        """A call with one reply. Raises grpc.RpcError."""

    def upload(self, method: Method, requests: Iterator[Message], timeout: float | None) -> Any:
        """A call of many requests and one reply. Raises grpc.RpcError."""

    def stream(self, method: Method, timeout: float | None) -> Stream:
        """A call of many requests and many replies."""

    def close(self) -> None:
        """Ends it; calls that run are cancelled."""


class AioStream(Protocol):
    """As Stream, for asyncio."""

    async def write(self, request: Message) -> None:
        """As Stream.write."""

    async def done_writing(self) -> None:
        """As Stream.done_writing."""

    async def read(self) -> Any:
        """As Stream.read."""

    def cancel(self) -> None:
        """As Stream.cancel."""


class AioChannel(Protocol):
    """As Channel, for asyncio."""

    async def unary(self, method: Method, request: Message, timeout: float | None) -> Any:
        """As Channel.unary."""

    async def upload(self, method: Method, requests: Iterator[Message], timeout: float | None) -> Any:
        """As Channel.upload."""

    def stream(self, method: Method, timeout: float | None) -> AioStream:
        """As Channel.stream."""

    async def close(self) -> None:
        """As Channel.close."""


# ---- gRPC ------------------------------------------------------------------------------------------------------------


class GrpcChannel:
    """The Channel to a server."""

    def __init__(
        self,
        address: str,
        credentials: grpc.ChannelCredentials | None,
        traceparent: Traceparent | None = None,
        token: CallMetadata = (),
    ) -> None:
        self._traceparent = traceparent
        self._token = token  # of every call
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)

    def unary(self, method: Method, request: Message, timeout: float | None) -> Any:
        """As Channel.unary."""
        return self._channel.unary_unary(method.path, method.serialize, method.deserialize)(
            request, timeout=timeout, metadata=trace_metadata(self._traceparent) + self._token
        )

    def upload(self, method: Method, requests: Iterator[Message], timeout: float | None) -> Any:
        """As Channel.upload."""
        return self._channel.stream_unary(method.path, method.serialize, method.deserialize)(
            requests, timeout=timeout, metadata=trace_metadata(self._traceparent) + self._token
        )

    def stream(self, method: Method, timeout: float | None) -> GrpcStream:
        """As Channel.stream."""
        call = self._channel.stream_stream(method.path, method.serialize, method.deserialize)
        return GrpcStream(call, timeout, trace_metadata(self._traceparent) + self._token)

    def close(self) -> None:
        """As Channel.close."""
        self._channel.close()


class GrpcStream:
    """The Stream to a server."""

    def __init__(self, open_call: Any, timeout: float | None, metadata: CallMetadata = ()) -> None:
        self._requests: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._call: Any = open_call(iter(self._requests.get, None), timeout=timeout, metadata=metadata)

    def write(self, request: Message) -> None:
        """As Stream.write."""
        self._requests.put(request)

    def done_writing(self) -> None:
        """As Stream.done_writing."""
        self._requests.put(None)

    def read(self) -> Any:
        """As Stream.read."""
        return next(self._call, None)

    def cancel(self) -> None:
        """As Stream.cancel."""
        self._requests.put(None)
        self._call.cancel()


class AioGrpcChannel:
    """The AioChannel to a server."""

    def __init__(
        self,
        address: str,
        credentials: grpc.ChannelCredentials | None,
        traceparent: Traceparent | None = None,
        token: CallMetadata = (),
    ) -> None:
        self._traceparent = traceparent
        self._token = token  # of every call
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)

    async def unary(self, method: Method, request: Message, timeout: float | None) -> Any:
        """As Channel.unary."""
        call = self._channel.unary_unary(method.path, method.serialize, method.deserialize)
        return await call(request, timeout=timeout, metadata=trace_metadata(self._traceparent) + self._token)

    async def upload(self, method: Method, requests: Iterator[Message], timeout: float | None) -> Any:
        """As Channel.upload."""
        call: Any = self._channel.stream_unary(method.path, method.serialize, method.deserialize)
        return await call(requests, timeout=timeout, metadata=trace_metadata(self._traceparent) + self._token)

    def stream(self, method: Method, timeout: float | None) -> AioGrpcStream:
        """As Channel.stream."""
        call = self._channel.stream_stream(method.path, method.serialize, method.deserialize)
        return AioGrpcStream(call, timeout, trace_metadata(self._traceparent) + self._token)

    async def close(self) -> None:
        """As Channel.close."""
        await self._channel.close()


class AioGrpcStream:
    """The AioStream to a server."""

    def __init__(self, open_call: Any, timeout: float | None, metadata: CallMetadata = ()) -> None:
        self._call: Any = open_call(timeout=timeout, metadata=metadata)

    async def write(self, request: Message) -> None:
        """As Stream.write."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.write(request)

    async def done_writing(self) -> None:
        """As Stream.done_writing."""
        await self._call.done_writing()

    async def read(self) -> Any:
        """As Stream.read."""
        try:
            reply = await self._call.read()
        except asyncio.InvalidStateError:  # the end was read by somebody else
            reply = _EOF
        if reply is not _EOF:
            return reply
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return None
        trailing, details = await self._call.trailing_metadata(), await self._call.details()
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)

    def cancel(self) -> None:
        """As Stream.cancel."""
        self._call.cancel()
