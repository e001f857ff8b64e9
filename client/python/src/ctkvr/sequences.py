# SPDX-License-Identifier: Apache-2.0
"""The sequences of a batch on a server, one session each, as a model writes and asks them; they survive a restart.

Tensors are torch's, on any device. What was appended is kept in main memory as well where `keep` says so: a session
that is lost is opened again and filled, and the question is asked again. Every answer comes from a session that holds
exactly the tokens written, so a lost one is an error or a repair, and never a wrong answer.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from ctkvr.answer import Answer
from ctkvr.client import Client, DecodeStream, Session
from ctkvr.decode import Step, StepResult
from ctkvr.errors import CtkvrError, ProtocolError, SessionLost, Unavailable

__all__ = ["Question", "Recovery", "Sequences", "Traffic"]

_LOG = logging.getLogger("ctkvr")
T = TypeVar("T")

# Seconds between two looks at a server that does not answer.
_PAUSE_SECONDS = 0.2
# Messages of one question that are on their way at once.
_IN_FLIGHT = 8
# A call is repaired or, where the server refused it with a delay, repeated so often.
_REPAIRS_MAX = 5


@dataclass
class Traffic:
    """What went over the wire and through the server's memory, in bytes; and how long answers were waited for."""

    appended_bytes: int = 0  # keys, values and queries for centroids
    asked_bytes: int = 0  # queries
    answered_bytes: int = 0  # outputs, sums and rows
    read_bytes: int = 0  # Answer.bytes_read: what the server read to choose and estimate
    answers: int = 0
    wait_seconds: float = 0.0


@dataclass(frozen=True)
class Recovery:
    """A session that was lost, and what it took to go on."""

    reason: str
    tokens: int  # (layer, token) pairs appended again, of all sequences
    seconds: float


@dataclass(frozen=True)
class Question:
    """New tokens of one sequence and layer, and their queries. All [tokens, heads, dim] of as many tokens."""

    row: int
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    local_begin: int  # positions from here on are attended by the caller


@dataclass
class _Kept:
    """What is kept of one layer of one sequence from `begin` on: chunks of keys, values and, for centroids, queries."""

    begin: int = 0
    length: int = 0  # tokens written, kept or not
    chunks: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # [tokens, heads, dim] each, on the CPU

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for chunk in self.chunks for tensor in chunk)

    def add(self, chunk: tuple[torch.Tensor, ...]) -> None:
        self.chunks.append(chunk)
        self.length += len(chunk[0])

    def drop(self) -> None:
        self.begin, self.chunks = self.length, []

    def cut(self, length: int) -> None:
        """Forgets tokens at and after `length`."""
        self.chunks = self.part(self.begin, length)
        self.begin, self.length = min(self.begin, length), min(self.length, length)

    def part(self, begin: int, end: int) -> list[tuple[torch.Tensor, ...]]:
        """The chunks of positions [begin, end), none of them before self.begin."""
        position, found = self.begin, []
        for chunk in self.chunks:
            tokens = len(chunk[0])
            first, last = max(begin - position, 0), min(end - position, tokens)
            if first < last:
                found.append(tuple(tensor[first:last] for tensor in chunk))
            position += tokens
        return found


class Sequences:
    """Not thread-safe; appends of a prompt run on a thread of its own while the model computes the next layer."""

    def __init__(
        self,
        client: Client,
        open_session: Callable[[], Session],
        rows: int,
        layers: Sequence[int],
        *,
        keep: bool = True,
        patience: float = 60.0,
        on_recovery: Callable[[Recovery], object] | None = None,
        **settings: Any,
    ) -> None:
        """Opens `rows` sessions, each by open_session(), for `layers`.

        settings: of Client.decode(), for every question. patience: seconds to wait for a server that does not answer.
        Raises what open_session() raises.
        """
        self.traffic = Traffic()
        self.recoveries: list[Recovery] = []
        self.sessions: list[Session] = []
        self._client = client
        self._open_session = open_session
        self._layers = list(layers)
        self._keep = keep
        self._patience = patience
        self._on_recovery = on_recovery
        self._settings = settings
        self._kept = [{layer: _Kept() for layer in self._layers} for _ in range(rows)]
        # Lengths at which each sequence's tokens were indexed: a session opened again takes the same steps.
        self._maintained: list[list[int]] = [[] for _ in range(rows)]
        self._stream: DecodeStream | None = None
        self._uploads: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ctkvr-append")
        try:
            for _ in range(rows):
                self.sessions.append(open_session())
        except BaseException:
            self.close()
            raise

    # ---- Writing -----------------------------------------------------------------------------------------------------

    def length(self, row: int, layer: int) -> int:
        """Tokens written to a layer of a sequence."""
        return self._kept[row][layer].length

    @property
    def kept_bytes(self) -> int:
        """Of the keys and values kept here, for a session that is lost."""
        return sum(kept.nbytes for layers in self._kept for kept in layers.values())

    def append(
        self, row: int, layer: int, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor | None = None
    ) -> None:
        """Writes tokens [tokens, heads, dim]; returns at once, and flush() says whether it went well.

        queries: material for query centroids, of the tokens; sent where the session keeps some.
        """
        first_position = self.length(row, layer)
        chunk = self._chunk(row, keys, values, queries)
        self._kept[row][layer].add(chunk)
        self.traffic.appended_bytes += sum(tensor.nbytes for tensor in chunk)
        failed = self._uploads[-1] if self._uploads else None

        def upload() -> None:
            if failed is not None and failed.exception() is not None:
                failed.result()
            self.sessions[row].append(layer, *_three(chunk), first_position=first_position)

        self._uploads.append(self._pool.submit(upload))

    def _chunk(
        self, row: int, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        if queries is None or not self.sessions[row].core.keeps_queries:
            return keys.cpu(), values.cpu()
        return keys.cpu(), values.cpu(), queries.cpu()

    def flush(self) -> None:
        """Waits until everything appended is on the server, through a restart of it where tokens are kept."""
        if not self._uploads:
            return
        uploads, self._uploads = self._uploads, []

        def wait() -> None:
            wait_for(uploads)
            for upload in uploads:
                upload.result()

        self._through_restarts(wait, again=lambda: None)
        self._acknowledge()

    def maintain(self) -> None:
        """Takes everything appended into index and key clusters, so that what follows searches through them."""
        self.flush()
        for row in range(len(self.sessions)):
            self._maintained[row].append(self.length(row, self._layers[-1]))
        missing = list(range(len(self.sessions)))

        def maintain() -> None:
            while missing:
                self.sessions[missing[-1]].maintain()
                missing.pop()

        self._through_restarts(maintain)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forgets positions at and after lengths[row] in every layer of each sequence."""
        self.flush()
        for row, length in enumerate(lengths):
            for kept in self._kept[row].values():
                kept.cut(length)
            self._maintained[row] = sorted({min(point, length) for point in self._maintained[row] if point and length})

        def truncate() -> None:
            for session, length in zip(self.sessions, lengths, strict=True):
                session.truncate(length)

        self._through_restarts(truncate, again=lambda: None)  # what is opened again is filled to the new lengths

    # ---- Asking ------------------------------------------------------------------------------------------------------

    def ask(
        self, layer: int, questions: Sequence[Question], positions_max: int, meanwhile: Callable[[], T]
    ) -> tuple[list[list[Answer]], T]:
        """Appends the new tokens of each question and asks for them; the answers of each, in the order of its tokens.

        Queries go in messages of at most positions_max a sequence. meanwhile() runs while the server works. Raises
        SessionLost where the sequence cannot be filled again, and every error that waiting does not cure.
        """
        self.flush()
        blocks = range(0, max(len(question.queries) for question in questions), positions_max)
        asked = [[question for question in questions if begin < len(question.queries)] for begin in blocks]
        messages = [
            [self._step(layer, question, begin, begin + positions_max) for question in block]
            for begin, block in zip(blocks, asked, strict=True)
        ]
        for question in questions:
            chunk = self._chunk(question.row, question.keys, question.values, question.queries)
            self._kept[question.row][layer].add(chunk)
            self.traffic.appended_bytes += question.keys.nbytes + question.values.nbytes
            self.traffic.asked_bytes += question.queries.nbytes
        side: list[T] = []

        def once() -> None:
            if not side:
                side.append(meanwhile())

        def attempt() -> list[list[StepResult]]:
            return self._exchange(messages, once)

        def again() -> list[list[StepResult]]:
            # What was repaired has the tokens already, and may be another session.
            for steps, block in zip(messages, asked, strict=True):
                steps[:] = [
                    replace(step, keys=None, values=None, session=self.sessions[question.row])
                    for step, question in zip(steps, block, strict=True)
                ]
            return attempt()

        results = self._through_restarts(attempt, again)
        self._acknowledge()
        answers: dict[int, list[Answer]] = {question.row: [] for question in questions}
        for steps, found, block in zip(messages, results, asked, strict=True):
            for step, result, question in zip(steps, found, block, strict=True):
                self._check(step, result, self.length(question.row, layer))
                answers[question.row].append(result.answer)
        return [answers[question.row] for question in questions], side[0]

    @staticmethod
    def _check(step: Step, result: StepResult, length: int) -> None:
        if step.keys is not None:
            length = (step.first_position or 0) + len(step.keys)
        if result.answer.length != length:
            raise ProtocolError(
                "INTERNAL", f"layer {step.layer} was answered for with {result.answer.length} tokens; it has {length}"
            )

    def _step(self, layer: int, question: Question, begin: int, end: int) -> Step:
        position = self.length(question.row, layer) + begin
        return Step(
            layer,
            question.keys[begin:end],
            question.values[begin:end],
            question.queries[begin:end],
            first_position=position,
            position=position,
            session=self.sessions[question.row],
            local_begin=question.local_begin,
        )

    def _exchange(self, messages: list[list[Step]], meanwhile: Callable[[], object]) -> list[list[StepResult]]:
        """Sends all and receives all. Raises the first error of any step."""
        if self._stream is None:
            self._stream = self._client.decode(**self._settings)
        stream, results = self._stream, []
        for number, steps in enumerate(messages):
            stream.send(steps)
            if number + 1 >= min(_IN_FLIGHT, len(messages)):
                meanwhile()
                results.append(self._receive(stream))
        while stream.in_flight:
            results.append(self._receive(stream))
        return results

    def _receive(self, stream: DecodeStream) -> list[StepResult]:
        start = time.perf_counter()
        results = stream.receive()
        self.traffic.wait_seconds += time.perf_counter() - start
        for result in results:
            answer = result.answer
            arrays = (answer.output, answer.log_sum_exp, answer.remainder_output, answer.remainder_log_sum_exp)
            rows = (answer.ids, answer.keys, answer.values)
            self.traffic.answered_bytes += sum(array.nbytes for array in arrays if array is not None)
            self.traffic.answered_bytes += sum(sets.flat.nbytes for sets in rows if sets is not None)
            self.traffic.read_bytes += answer.bytes_read
            self.traffic.answers += 1
        return results

    def _acknowledge(self) -> None:
        if not self._keep:
            for layers in self._kept:
                for kept in layers.values():
                    kept.drop()

    # ---- Restarts ----------------------------------------------------------------------------------------------------

    def _through_restarts(self, attempt: Callable[[], T], again: Callable[[], T] | None = None) -> T:
        """attempt(), and again() (else attempt()) once what it failed by is repaired."""
        action = attempt
        for repairs in itertools.count():
            try:
                return action()
            except CtkvrError as error:
                self._drop_stream()
                curable = error.retry_after is not None or isinstance(error, SessionLost | Unavailable)
                if not curable or repairs == _REPAIRS_MAX:
                    raise
                time.sleep(error.retry_after or 0.0)
                self._recover(error)
                action = again or attempt
            except BaseException:
                self._drop_stream()
                raise
        raise AssertionError("the loop ends by return or raise")

    def _recover(self, cause: CtkvrError) -> None:
        """Makes every session hold what was written. Raises SessionLost, or the last error once patience is over."""
        start = time.monotonic()
        _LOG.warning("ctkvr: %s", cause)
        reopened = appended = 0
        while True:
            try:
                for row in range(len(self.sessions)):
                    was_lost, tokens = self._restore(row)
                    reopened += was_lost
                    appended += tokens
                break
            except (Unavailable, SessionLost) as error:
                unrepairable = isinstance(error, SessionLost) and not self._keep
                if unrepairable or time.monotonic() - start + _PAUSE_SECONDS > self._patience:
                    raise
            time.sleep(_PAUSE_SECONDS)
        recovery = Recovery(str(cause), appended, time.monotonic() - start)
        _LOG.warning(
            "ctkvr: going on after %.1f s: %d sessions opened again, %d tokens of layers appended again",
            recovery.seconds,
            reopened,
            appended,
        )
        self.recoveries.append(recovery)
        if self._on_recovery is not None:
            self._on_recovery(recovery)

    def _restore(self, row: int) -> tuple[int, int]:
        """(1 where the session was opened again, tokens appended)."""
        kept, session = self._kept[row], self.sessions[row]
        try:
            held = session.info().layers
        except SessionLost:
            if any(part.begin for part in kept.values()):
                raise
            self.sessions[row] = session = self._open_session()
            appended = 0
            for point in [p for p in self._maintained[row] if p <= min(part.length for part in kept.values())]:
                appended += self._fill(row, dict.fromkeys(self._layers, point))
                session.maintain()
            return 1, appended + self._fill(row, {layer: part.length for layer, part in kept.items()})
        if any(held[layer].length > part.length for layer, part in kept.items()):
            session.truncate(min(part.length for part in kept.values()))
        return 0, self._fill(row, {layer: part.length for layer, part in kept.items()})

    def _fill(self, row: int, lengths: dict[int, int]) -> int:
        """Appends what the session lacks up to lengths[layer]; returns how many tokens."""
        appended = 0
        info = self.sessions[row].info()
        for layer, length in lengths.items():
            held, kept = info.layers[layer].length, self._kept[row][layer]
            if held < min(kept.begin, length):
                raise SessionLost(
                    "NOT_FOUND", f"layer {layer} holds {held} tokens; those up to {kept.begin} are not kept here"
                )
            missing = kept.part(held, length)
            if missing:
                joined = tuple(torch.cat(tensors) for tensors in zip(*missing, strict=True))
                self.sessions[row].append(layer, *_three(joined), first_position=held)
                appended += length - held
        return appended

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        self._stream = None

    def close(self) -> None:
        """Ends the sessions on the server; those that are lost already, or out of reach until their lease ends, too."""
        self._pool.shutdown(wait=True)
        self._drop_stream()
        for session in self.sessions:
            try:
                session.close()
            except (SessionLost, Unavailable):
                _LOG.info("ctkvr: %r could not be closed", session)


def _three(chunk: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys, values, and queries where there are some."""
    return chunk[0], chunk[1], chunk[2] if len(chunk) > 2 else None
