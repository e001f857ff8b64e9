# SPDX-License-Identifier: Apache-2.0
"""What the clients do, once for both: every call is a generator that yields what to wait for and returns its result.

`ctkvr.client` runs such an operation by blocking, `ctkvr.aio` by awaiting; neither knows more of it. An operation
yields Unary, Upload or Sleep, gets the reply sent in, or a CtkvrError thrown in.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from google.protobuf.message import Message

from ctkvr import codec
from ctkvr.answer import Answer, AnswerMode, RowFormat, Selection, Source
from ctkvr.arrays import DTypeName
from ctkvr.codec import Tags
from ctkvr.errors import (
    REASON_EPOCH_MISMATCH,
    CtkvrError,
    ProtocolError,
    SessionExists,
    SessionLost,
    from_item_status,
    make_error,
    server_restarted,
)
from ctkvr.progress import Progress, open_progress
from ctkvr.retry import RetryOptions
from ctkvr.row_cache import HeldRows, RowCache, StaleAnswer
from ctkvr.rows import LayerShape
from ctkvr.v1 import cache_pb2, session_pb2, tensor_pb2

_LIST_PAGE_SIZE = 1000


@dataclass(frozen=True)
class Unary:
    """A call with one reply."""

    method: str
    request: Message
    timeout: float | None  # seconds; None: no limit


@dataclass(frozen=True)
class Upload:
    """A call of many requests and one reply. Requests are drawn while they are sent."""

    method: str
    requests: Iterator[Message]
    timeout: float | None


@dataclass(frozen=True)
class Sleep:
    """A pause before another attempt."""

    seconds: float


Effect = Unary | Upload | Sleep
T = TypeVar("T")
Operation = Generator[Effect, Any, T]


@dataclass
class Connection:
    """What a client, its sessions and its streams share."""

    timeout: float = 30.0  # of a call with all its attempts, unless the call says otherwise
    maintain_timeout: float = 600.0
    append_bytes: int = 8 << 20  # about so many a message
    retry: RetryOptions = field(default_factory=RetryOptions)
    info: cache_pb2.GetServerInfoReply = field(default_factory=cache_pb2.GetServerInfoReply)  # as last heard

    def call(self, method: str, request: Message, timeout: float | None, repeatable: bool = True) -> Operation[Any]:
        """A unary call with the retries of RetryOptions. Its error says how many attempts there were."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        attempts = 0
        while True:
            attempts += 1
            try:
                return (yield Unary(method, request, _left(deadline)))
            except CtkvrError as error:
                error.attempts = attempts
                delay = self.retry.delay(error, attempts, repeatable)
                if delay is None or time.monotonic() + delay >= deadline:
                    raise
            yield Sleep(delay)

    def fetch_info(self, timeout: float | None = None) -> Operation[cache_pb2.GetServerInfoReply]:
        """Asks the server and remembers the answer."""
        self.info = yield from self.call("GetServerInfo", cache_pb2.GetServerInfoRequest(), timeout)
        return self.info


@dataclass(frozen=True)
class AppendResult:
    """What became of an append."""

    length: int  # tokens the layer holds now
    chunks: int  # messages sent, after splitting; of a stream that was taken up again, since then
    repeated_chunks: int  # of these, held already with equal contents
    resumed: int = 0  # how often a broken stream was taken up again


class ClientCore:
    """The calls of a client, as operations."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def server_info(self, *, timeout: float | None = None) -> Operation[cache_pb2.GetServerInfoReply]:
        """Version, boot id, device, limits, memory: as of now."""
        return self.connection.fetch_info(timeout)

    def list_sessions(self, *, timeout: float | None = None) -> Operation[list[cache_pb2.ListSessionsReply.Entry]]:
        """Every session, by id, read page by page: those opened or closed meanwhile may be missing or gone."""
        entries: list[cache_pb2.ListSessionsReply.Entry] = []
        token = ""
        while True:
            request = cache_pb2.ListSessionsRequest(page_size=_LIST_PAGE_SIZE, page_token=token)
            reply = yield from self.connection.call("ListSessions", request, timeout)
            entries += reply.sessions
            if reply.next_page_token in ("", token):
                return entries
            token = reply.next_page_token

    def open_session(
        self,
        *,
        layers: int | None = None,
        q_heads: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        dtype: DTypeName | None = None,
        token_limit: int | None = None,
        format: str | None = None,  # noqa: A002 (the contract's word)
        k: int | None = None,
        source: Source | None = None,
        selection: Selection | None = None,
        centroids: int | None = None,
        list_tokens: int | None = None,
        tokens_per_cluster: int | None = None,
        cache_slots: int | None = None,
        maintenance: Literal["auto", "manual"] | None = None,
        lease_seconds: int | None = None,
        fingerprint: bytes = b"",
        rotation_seed: int | None = None,
        options: session_pb2.SessionOptions | None = None,
        session_id: str = "",
        timeout: float | None = None,
    ) -> Operation[SessionCore]:
        """Admits the memory of the whole token limit, or refuses.

        layers to token_limit are the model's and must be given, here or in `options`, a message that everything else
        is laid over; it has the settings that have no argument here. None leaves the server's default. format is
        "k8v4", "k8v8", "k6v4", "f32", "f16" or "bf16"; centroids and list_tokens size the index of source
        "query_centroids", tokens_per_cluster (0: none) the key clusters that sources search and a remainder is
        estimated from, cache_slots (0: none) a layer's row cache on this side for answer "new_rows". Raises NoRoom,
        InvalidRequest, SessionExists, NotServed.
        """
        message = session_pb2.SessionOptions()
        if options is not None:
            message.CopyFrom(options)
        sizes = {"layers": layers, "q_heads": q_heads, "kv_heads": kv_heads}
        codec.set_geometry(message, dtype, {**sizes, "head_dim": head_dim, "value_dim": value_dim})
        for name, value in (
            ("token_limit", token_limit),
            ("cache_slots", cache_slots),
            ("lease_seconds", lease_seconds),
            ("rotation_seed", rotation_seed),
        ):
            if value is not None:
                setattr(message, name, value)
        if format is not None:
            message.format = codec.enum_value(tensor_pb2.Format, "FORMAT_", format, "format")
        if maintenance is not None:
            message.maintenance = codec.enum_value(session_pb2.Maintenance, "MAINTENANCE_", maintenance, "maintenance")
        message.selection.MergeFrom(codec.encode_selection(codec.merge_selection(selection, k, source)))
        if centroids is not None or list_tokens is not None:
            message.query_centroids.add(centroids=centroids or 0, list_tokens=list_tokens or 0)
        if tokens_per_cluster is not None:
            message.key_clusters.tokens_per_cluster = tokens_per_cluster
        message.fingerprint = fingerprint or message.fingerprint
        return self._open(message, session_id, timeout)

    def _open(
        self, options: session_pb2.SessionOptions, session_id: str, timeout: float | None
    ) -> Operation[SessionCore]:
        # Drawn before the first attempt, so that a retry cannot open twice.
        drawn = session_id or f"client-{secrets.token_hex(16)}"
        request = cache_pb2.OpenSessionRequest(session_id=drawn, options=options)
        try:
            reply = yield from self.connection.call("OpenSession", request, timeout)
        except SessionExists as error:
            opened_by_lost_attempt = not session_id and error.attempts > 1
            if not opened_by_lost_attempt:
                raise
            return (yield from self.attach_session(drawn, fingerprint=options.fingerprint, timeout=timeout))
        # The server may be another than the one whose limits are known.
        if reply.header.boot_id != self.connection.info.header.boot_id:
            yield from self.connection.fetch_info(timeout)
        return SessionCore(self.connection, reply, options.fingerprint)

    def attach_session(
        self, session_id: str, *, epoch: int = 0, fingerprint: bytes = b"", timeout: float | None = None
    ) -> Operation[SessionCore]:
        """A handle to a session that is open. epoch and fingerprint are compared unless 0 and empty.

        Raises SessionLost, FingerprintMismatch.
        """
        ref = session_pb2.SessionRef(session_id=session_id, epoch=epoch, fingerprint=fingerprint)
        reply = yield from self.connection.call("GetSession", cache_pb2.GetSessionRequest(session=ref), timeout)
        return SessionCore(self.connection, reply, fingerprint)


class SessionCore:
    """The calls of a session, as operations; and what is known of it."""

    def __init__(
        self, connection: Connection, reply: cache_pb2.OpenSessionReply | cache_pb2.GetSessionReply, fingerprint: bytes
    ) -> None:
        self.connection = connection
        self.boot_id = reply.header.boot_id
        self.options = reply.session.options
        self.ref = session_pb2.SessionRef(
            session_id=reply.session.session_id, epoch=reply.session.epoch, fingerprint=fingerprint
        )
        self.decoders = codec.Decoders()
        self._row_caches: dict[tuple[int, bool], RowCache] = {}  # of retrieve(), by layer and decode_rows
        # Tokens a layer holds; without an entry where an error left that open.
        self._lengths = {layer.layer: layer.length for layer in reply.session.layers}
        self._shapes: dict[int, LayerShape] = {}
        sets = [*self.options.query_centroids, *(c for o in self.options.layer_overrides for c in o.query_centroids)]
        self.keeps_queries = any(centroid_set.centroids for centroid_set in sets)
        self.closed = False

    def shape(self, layer: int) -> LayerShape:
        """The layer's sizes. IndexError: a layer that is not there."""
        if layer not in self._shapes:
            self._shapes[layer] = codec.shape_of_layer(self.options, layer)
        return self._shapes[layer]

    # ---- Identity ----------------------------------------------------------------------------------------------------

    def check_header(self, header: cache_pb2.ReplyHeader) -> None:
        """Raises SessionLost where a reply is of another boot or session than this one."""
        if header.boot_id != self.boot_id:
            raise server_restarted(self.boot_id, header.boot_id)
        if header.session_epoch not in (0, self.ref.epoch):
            raise make_error(
                "FAILED_PRECONDITION",
                f"epoch {header.session_epoch} answers; the session has {self.ref.epoch}",
                REASON_EPOCH_MISMATCH,
                {"epoch": str(header.session_epoch)},
            )

    def explained(self, operation: Operation[T]) -> Operation[T]:
        """`operation`, with an error that a restart of the server explains turned into that."""
        try:
            return (yield from operation)
        except SessionLost as error:
            if error.code not in ("NOT_FOUND", "FAILED_PRECONDITION"):
                raise
            try:
                info = yield from self.connection.fetch_info()
            except CtkvrError:
                raise error from None
            if info.header.boot_id == self.boot_id:
                raise
            raise server_restarted(self.boot_id, info.header.boot_id) from error

    def _call(self, method: str, request: Message, timeout: float | None, repeatable: bool = True) -> Operation[Any]:
        reply = yield from self.explained(self.connection.call(method, request, timeout, repeatable))
        self.check_header(reply.header)
        return reply

    # ---- Lengths -----------------------------------------------------------------------------------------------------

    def next_position(self, layer: int) -> Operation[int]:
        """Tokens the layer holds: as known, or else as the server says."""
        if layer not in self._lengths:
            self._lengths[layer] = (yield from self.info()).layers[layer].length
        return self._lengths[layer]

    def set_length(self, layer: int, length: int | None) -> None:
        """None: not known any more."""
        if length is None:
            self._lengths.pop(layer, None)
        else:
            self._lengths[layer] = length

    # ---- Append ------------------------------------------------------------------------------------------------------

    def append(
        self,
        layer: int,
        keys: Any,
        values: Any,
        queries: Any = None,
        first_position: int | None = None,
        *,
        tags: Tags | None = None,
        progress: Progress = None,
        timeout: float | None = None,
    ) -> Operation[AppendResult]:
        """Adds tokens to one layer, in as many messages as the server's limits ask for, each with its checksum.

        keys [tokens, kv_heads, head_dim] post-RoPE, values [tokens, kv_heads, value_dim], queries (optional)
        [positions, q_heads, head_dim] of the last `positions` tokens; of the session's dtype. first_position None:
        behind what the layer holds. Each message is atomic. More than one travel as a stream; where it breaks, the
        session's length says where another goes on. After an error the whole append may be repeated at the same
        first_position: what is held is acknowledged, not repeated.

        tags: weights and classes of the tokens, where the session takes them (SessionOptions.tags).
        progress: True shows a bar (needs ctkvr[progress]); or called with (tokens sent, tokens in all).
        timeout: of the whole append; a stream has none by default.
        Raises WrongPosition, DifferentBytes, TokenLimit, ChecksumMismatch, SessionLost; ValueError and TypeError for
        arrays that do not fit the layer, before anything is sent.
        """
        chunk = codec.make_chunk(self.shape(layer), layer, keys, values, queries, tags)
        return self._append(chunk, first_position, progress, timeout)

    def _append(
        self, chunk: codec.Chunk, first_position: int | None, progress: Progress, timeout: float | None
    ) -> Operation[AppendResult]:
        if first_position is None:
            first_position = yield from self.next_position(chunk.layer)
        step = codec.tokens_per_message(chunk, self.connection.info.limits, self.connection.append_bytes)
        self.set_length(chunk.layer, None)  # until the reply says otherwise
        with open_progress(progress, chunk.tokens) as report:
            if chunk.tokens <= step:
                request = self._append_request(chunk, first_position)
                reply = yield from self._call("Append", request, timeout)
                report(chunk.tokens)
                result = AppendResult(reply.length, 1, int(reply.repeated))
            else:
                result = yield from self._upload(chunk, first_position, step, report, timeout)
        self.set_length(chunk.layer, result.length)
        return result

    def _append_request(self, chunk: codec.Chunk, first_position: int) -> cache_pb2.AppendRequest:
        message = chunk.encode(first_position)
        return cache_pb2.AppendRequest(session=self.ref, chunk=message, checksum=chunk.checksum())

    def _upload(
        self,
        chunk: codec.Chunk,
        first_position: int,
        step: int,
        report: Callable[[int], None],
        timeout: float | None,
    ) -> Operation[AppendResult]:
        deadline = None if timeout is None else time.monotonic() + timeout
        begin = attempts = resumed = 0
        while True:
            attempts += 1
            requests = self._append_requests(chunk, first_position, begin, step, report)
            left = None if deadline is None else _left(deadline)
            try:
                reply = yield from self.explained(_upload("AppendStream", requests, left))
                self.check_header(reply.header)
                return AppendResult(reply.lengths[chunk.layer], reply.chunks, reply.repeated_chunks, resumed)
            except CtkvrError as error:
                error.attempts = attempts
                delay = self.connection.retry.delay(error, attempts, repeatable=True)
                if delay is None or (deadline is not None and time.monotonic() + delay >= deadline):
                    raise
            yield Sleep(delay)
            held = (yield from self.info()).layers[chunk.layer].length - first_position
            # Where all is held, the last message is repeated: its acknowledgement proves whose tokens they are.
            held = min(max(held, 0), (chunk.tokens - 1) // step * step)
            attempts = 0 if held > begin else attempts
            begin = held
            resumed += 1

    def _append_requests(
        self, chunk: codec.Chunk, first_position: int, begin: int, step: int, report: Callable[[int], None]
    ) -> Iterator[Message]:
        for offset, part in codec.parts_of(chunk, begin, step):
            yield self._append_request(part, first_position + offset)
            report(offset + part.tokens)

    # ---- Retrieve ----------------------------------------------------------------------------------------------------

    def retrieve(
        self,
        layer: int,
        queries: Any,
        position: int | None = None,
        *,
        k: int | None = None,
        source: Source | None = None,
        answer: AnswerMode = "rows",
        row_format: RowFormat | None = None,
        decode_rows: bool = True,
        remainder: bool = False,
        selection: Selection | None = None,
        local_begin: int | None = None,
        local_sinks: int = 0,
        timeout: float | None = None,
    ) -> Operation[Answer]:
        """Which tokens matter to these queries.

        queries [positions, q_heads, head_dim], or [q_heads, head_dim] for one position, post-RoPE, of the session's
        dtype; `position` is that of the first. None: they are of the last tokens the layer holds. A query at position
        p sees positions up to p. answer: "ids", "scores" (and ids), "rows" (keys and values too), "new_rows" (the
        same without scores, but only rows that this session object does not hold travel), or "attention" over the
        chosen tokens in place of all of them. row_format: what rows (default "f16") or attention ("f32") travel in;
        "storage" sends a quarter of the bytes, and the rows are decoded here, unless decode_rows is False: then
        Answer.decoder does it, where and when the caller likes, on a GPU say. remainder: estimate the attention over
        everything else too; the session keeps key clusters for it (tokens_per_cluster). local_begin and local_sinks:
        tokens at and after, and the first so many, are attended by the caller and left out.
        Raises SessionLost, OutOfRange, BeforeIndex, RowOverflow, CacheTooSmall, TooLarge, InvalidRequest.
        """
        shape = self.shape(layer)
        array = codec.query_array(shape, queries)
        merged = codec.merge_selection(selection, k, source)
        settings = codec.QuerySettings(merged, answer, row_format, local_begin, local_sinks, remainder, decode_rows)
        return self._retrieve(layer, shape, array, position, settings, timeout)

    def _retrieve(
        self,
        layer: int,
        shape: LayerShape,
        queries: Any,
        position: int | None,
        settings: codec.QuerySettings,
        timeout: float | None,
    ) -> Operation[Answer]:
        if position is None:
            position = max((yield from self.next_position(layer)) - len(queries), 0)
        held = None
        if settings.answer == "new_rows":
            cache = self._row_caches.setdefault((layer, settings.decode_rows), self.make_row_cache())
            held = HeldRows(cache, cache.version)
        try:
            return (yield from self._ask(layer, shape, position, queries, settings, held, timeout))
        except StaleAnswer:  # another thread's answer has come in between
            assert held is not None  # noqa: S101 (for mypy)
            held = HeldRows(held.cache, 0)
            return (yield from self._ask(layer, shape, position, queries, settings, held, timeout))

    def make_row_cache(self) -> RowCache:
        """An empty cache for one layer's rows."""
        return RowCache(self.options.cache_slots)

    def _ask(
        self,
        layer: int,
        shape: LayerShape,
        position: int,
        queries: Any,
        settings: codec.QuerySettings,
        held: HeldRows | None,
        timeout: float | None,
    ) -> Operation[Answer]:
        query = codec.encode_query(shape, layer, position, queries, settings, held)
        request = cache_pb2.RetrieveRequest(
            items=[cache_pb2.RetrieveItem(session=self.ref, query=query)],
            answer=codec.encode_answer_options(settings, self.decoders.known_generation(layer)),
        )
        reply = yield from self._call("Retrieve", request, timeout)
        items = reply.message.items
        if len(items) != 1:
            raise ProtocolError("INTERNAL", f"the reply has {len(items)} items; 1 was asked for")
        status = items[0].status
        if status.code != 0:
            raise from_item_status(status.code, status.message, status.reason, status.metadata)
        place = codec.Place(layer, shape, self.decoders)
        return codec.decode_answer(items[0].answer, reply.rows_of(0), place, settings.decode_rows, held)

    # ---- The rest ----------------------------------------------------------------------------------------------------

    def truncate(self, length: int, *, timeout: float | None = None) -> Operation[list[int]]:
        """Forgets positions at and after `length` in every layer; returns how many tokens each lost.

        Not repeated when the connection breaks: see info(). Raises ShorterLayer, SessionLost.
        """
        self._lengths.clear()
        request = cache_pb2.TruncateSessionRequest(session=self.ref, length=length)
        reply = yield from self._call("TruncateSession", request, timeout, repeatable=False)
        return list(reply.removed_tokens)

    def maintain(self, layers: Iterable[int] = (), *, timeout: float | None = None) -> Operation[list[int]]:
        """Takes the tail into the index now and waits for it; no layers: all. Returns each layer's indexed length."""
        request = cache_pb2.MaintainSessionRequest(session=self.ref, layers=layers)
        limit = self.connection.maintain_timeout if timeout is None else timeout
        reply = yield from self._call("MaintainSession", request, limit)
        return list(reply.indexed_length)

    def info(self, *, timeout: float | None = None) -> Operation[session_pb2.SessionInfo]:
        """Options as resolved, lengths and memory: as of now."""
        reply = yield from self._call("GetSession", cache_pb2.GetSessionRequest(session=self.ref), timeout)
        session: session_pb2.SessionInfo = reply.session
        return session

    def keep_alive(self, *, timeout: float | None = None) -> Operation[int]:
        """Renews the lease, as every call does; returns the seconds it has left."""
        reply = yield from self._call("KeepAlive", cache_pb2.KeepAliveRequest(session=self.ref), timeout)
        return int(reply.lease_remaining_seconds)

    def close(self, *, timeout: float | None = None) -> Operation[int]:
        """Frees everything on the server; returns the bytes freed, 0 where a repeated attempt finds it closed."""
        request = cache_pb2.CloseSessionRequest(session=self.ref)
        try:
            reply = yield from self._call("CloseSession", request, timeout)
        except SessionLost as error:
            done_by_lost_attempt = error.code == "NOT_FOUND" and error.attempts > 1
            if not done_by_lost_attempt:
                raise
            self.closed = True
            return 0
        self.closed = True
        return int(reply.freed_bytes)

    def leave(self) -> Operation[None]:
        """What the end of a `with` does: closes the session, unless it is closed or lost."""
        if self.closed:
            return
        try:
            yield from self.close()
        except SessionLost:
            self.closed = True


def _left(deadline: float) -> float:
    """Seconds; gRPC takes 0 for no limit."""
    return max(deadline - time.monotonic(), 1e-6)


def _upload(method: str, requests: Iterator[Message], timeout: float | None) -> Operation[Any]:
    return (yield Upload(method, requests, timeout))
