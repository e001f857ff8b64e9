# SPDX-License-Identifier: Apache-2.0
"""The hot path's messages: what a decode step says, what comes back, and what is in flight. Shared by both clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ctkvr import codec, wire
from ctkvr.answer import Answer, AnswerMode, RowFormat, Selection, Source
from ctkvr.calls import ClientCore, Operation, SessionCore
from ctkvr.errors import CtkvrError, ProtocolError, Unavailable, from_item_status, server_restarted
from ctkvr.row_cache import HeldRows, RowCache
from ctkvr.v1 import cache_pb2

if TYPE_CHECKING:
    from ctkvr.session import SessionHandle

__all__ = ["Step", "StepResult"]


@dataclass(frozen=True)
class Step:
    """One session's part of a decode message: an append, a retrieval, or both; the append comes first.

    keys and values are a step's few tokens, never split; arrays and defaults are those of Session.append and
    Session.retrieve. Where the session keeps query centroids, the queries go into its index with the tokens.
    """

    layer: int
    keys: Any = None
    values: Any = None
    queries: Any = None
    first_position: int | None = None  # of the tokens; None: behind what the layer holds
    position: int | None = None  # of the first query; None: the queries are of the last tokens
    session: SessionHandle | None = None  # None: the stream's
    tags: codec.Tags | None = None  # of the tokens
    local_begin: int | None = None  # the caller attends positions from here on itself: they are left out


@dataclass(frozen=True)
class StepResult:
    """What became of a step."""

    layer: int
    length: int  # tokens the layer holds now; 0 where there is an error
    repeated: bool  # the tokens were held already
    error: CtkvrError | None  # of the append, or else of the retrieval
    found: Answer | None

    @property
    def answer(self) -> Answer:
        """The answer. Raises `error` where there is one; ValueError: the step asked nothing."""
        if self.error is not None:
            raise self.error
        if self.found is None:
            raise ValueError("the step had no queries, so there is no answer")
        return self.found


@dataclass(frozen=True)
class _Item:
    step: Step  # positions filled in
    core: SessionCore
    message: cache_pb2.DecodeItem
    held: HeldRows | None  # of an answer with new rows


@dataclass(frozen=True)
class _Checked:
    step: Step
    core: SessionCore
    chunk: codec.Chunk | None
    queries: Any  # [positions, q_heads, head_dim], or None


class DecodeCore:
    """Numbers messages, fills in positions, and matches replies. One thread may send while another receives."""

    def __init__(
        self,
        session: SessionCore | None,
        settings: codec.QuerySettings,
        in_flight_max: int,
        timeout: float | None = None,
    ) -> None:
        self.timeout = timeout
        self._session = session
        self._settings = settings
        self._in_flight_max = in_flight_max
        self._sent = 0
        self._received = 0
        self._pending: deque[list[_Item]] = deque()
        self._boot_id: int | None = None
        # Of answers with new rows, by session and layer. The stream's own: its answers come in their order.
        self._row_caches: dict[tuple[int, int], RowCache] = {}

    @property
    def in_flight(self) -> int:
        """Messages sent and not yet received."""
        return len(self._pending)

    @property
    def unanswered(self) -> list[list[Step]]:
        """The steps of the messages in flight, positions filled in: what to send again on a new stream."""
        return [[item.step for item in items] for items in list(self._pending)]

    def prepare(self, steps: Sequence[Step]) -> Operation[cache_pb2.DecodeRequest]:
        """The next message. ValueError, TypeError: a step that does not fit its layer; RuntimeError: too many."""
        if not steps:
            raise ValueError("a decode message needs at least one step")
        if len(self._pending) >= self._in_flight_max:
            raise RuntimeError(f"in_flight is {len(self._pending)}; the limit is {self._in_flight_max}: receive first")
        checked = [self._check(step) for step in steps]
        boot_ids = {entry.core.boot_id for entry in checked} | ({self._boot_id} if self._boot_id is not None else set())
        if len(boot_ids) > 1:
            raise ValueError("the sessions of a stream must be of one boot of the server")
        items = []
        try:
            for entry in checked:
                items.append((yield from self._resolve(entry)))
        except CtkvrError:
            for entry in checked:
                entry.core.set_length(entry.step.layer, None)
            raise
        (self._boot_id,) = boot_ids
        self._sent += 1
        self._pending.append(items)
        return cache_pb2.DecodeRequest(
            sequence=self._sent,
            items=[item.message for item in items],
            answer=codec.encode_answer_options(self._settings, self._known_generation(items)),
        )

    @staticmethod
    def _known_generation(items: list[_Item]) -> int:
        """One number speaks for all items of a message: what the client has of every one of them."""
        return min(item.core.decoders.known_generation(item.step.layer) for item in items)

    def _check(self, step: Step) -> _Checked:
        core = step.session.core if step.session is not None else self._session
        if core is None:
            raise ValueError("the step names no session, and the stream is not of one")
        if step.keys is None and step.values is None and step.queries is None:
            raise ValueError("the step has neither keys and values nor queries")
        shape = core.shape(step.layer)
        queries = None if step.queries is None else codec.query_array(shape, step.queries)
        chunk = None
        if step.keys is not None or step.values is not None:
            chunk = codec.make_chunk(shape, step.layer, step.keys, step.values, tags=step.tags)
            if queries is not None and core.keeps_queries and step.position is None:
                chunk = replace(chunk, queries=queries[-chunk.tokens :])
        return _Checked(step, core, chunk, queries)

    def _resolve(self, entry: _Checked) -> Operation[_Item]:
        step, core, layer = entry.step, entry.core, entry.step.layer
        message = cache_pb2.DecodeItem(session=core.ref)
        if entry.chunk is not None:
            if step.first_position is None:
                step = replace(step, first_position=(yield from core.next_position(layer)))
            assert step.first_position is not None  # noqa: S101 (for mypy)
            message.chunk.CopyFrom(entry.chunk.encode(step.first_position))
            core.set_length(layer, step.first_position + entry.chunk.tokens)
        held = None
        if entry.queries is not None:
            if step.position is None:
                length = yield from core.next_position(layer)
                step = replace(step, position=max(length - len(entry.queries), 0))
            assert step.position is not None  # noqa: S101 (for mypy)
            shape = core.shape(layer)
            settings = replace(self._settings, local_begin=step.local_begin)
            if settings.answer == "new_rows":
                cache = self._row_caches.setdefault((core.ref.epoch, layer), core.make_row_cache())
                held = HeldRows(cache, cache.version)
            query = codec.encode_query(shape, layer, step.position, entry.queries, settings, held)
            message.query.CopyFrom(query)
        return _Item(step, core, message, held)

    def take(self, reply: wire.Reply) -> list[StepResult]:
        """The results of the oldest message in flight, in the order of its steps."""
        self._received += 1
        items = self._pending.popleft()
        parts = reply.message.items
        if reply.message.sequence != self._received or len(parts) != len(items):
            raise ProtocolError(
                "INTERNAL",
                f"reply {reply.message.sequence} with {len(parts)} items came; "
                f"{self._received} with {len(items)} was expected",
            )
        if reply.header.boot_id != self._boot_id:
            raise server_restarted(self._boot_id or 0, reply.header.boot_id)
        return [self._result(item, parts[number], reply.rows_of(number)) for number, item in enumerate(items)]

    def _result(
        self, item: _Item, reply: cache_pb2.DecodeReplyItem, rows: tuple[bytes | memoryview, bytes | memoryview]
    ) -> StepResult:
        layer = item.step.layer
        status = reply.status  # of the append, where that failed
        if status.code:
            error = from_item_status(status.code, status.message, status.reason, status.metadata)
            # What was counted on when later steps were sent may not have come true.
            item.core.set_length(layer, None)
            return StepResult(layer, reply.length, reply.repeated, error, None)
        found = None
        if item.step.queries is not None:
            place = codec.Place(layer, item.core.shape(layer), item.core.decoders)
            found = codec.decode_answer(reply.answer, rows, place, self._settings.decode_rows, item.held)
        return StepResult(layer, reply.length, reply.repeated, None, found)

    def end(self, error: CtkvrError | None) -> CtkvrError:
        """To be called when the stream has ended: lengths that were counted on are open. Returns how it ended."""
        for items in list(self._pending):
            for item in items:
                item.core.set_length(item.step.layer, None)
        return error or Unavailable("UNAVAILABLE", "the server ended the stream")

    def check_receivable(self) -> None:
        """RuntimeError: nothing is in flight."""
        if not self._pending:
            raise RuntimeError("nothing is in flight; send first")


def open_stream(
    owner: ClientCore | SessionCore,
    *,
    k: int | None = None,
    source: Source | None = None,
    answer: AnswerMode = "rows",
    row_format: RowFormat | None = None,
    decode_rows: bool = True,
    remainder: bool = False,
    selection: Selection | None = None,
    in_flight_max: int = 64,
    timeout: float | None = None,
) -> DecodeCore:
    """A stream for steps: of this session, or of the sessions of this client that each Step names.

    The settings are those of retrieve(), for every step. in_flight_max bounds the messages sent and not received.
    timeout: of the stream's whole life; none by default.
    """
    merged = codec.merge_selection(selection, k, source)
    settings = codec.QuerySettings(merged, answer, row_format, remainder=remainder, decode_rows=decode_rows)
    return DecodeCore(owner if isinstance(owner, SessionCore) else None, settings, in_flight_max, timeout)
