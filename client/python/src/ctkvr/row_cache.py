# SPDX-License-Identifier: Apache-2.0
"""The worker's side of answers with new rows: a cache of rows whose slots the server manages (proto/README.md)."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ctkvr.errors import ProtocolError

__all__ = ["HeldRows", "NewRows", "RowCache", "Rows", "StaleAnswer"]

_EMPTY = -1  # no position


class StaleAnswer(ProtocolError):
    """An answer with new rows that rests on rows which have made way since it was asked for."""

    hint = "ask again; answers of one stream, received in their order, are never stale"


@dataclass(frozen=True)
class NewRows:
    """What an answer with new rows brings. P positions, G sets, N tokens chosen, n rows new."""

    counts: npt.NDArray[np.uint32]  # [P, G]
    slots: npt.NDArray[np.uint16]  # [N]
    new_counts: npt.NDArray[np.uint32]  # [P, G]
    new_slots: npt.NDArray[np.uint16]  # [n]
    ids: npt.NDArray[np.uint32]  # [n]
    keys: npt.NDArray[Any]  # [n, ...]
    values: npt.NDArray[Any]  # [n, ...]
    version: int  # once they are taken in

    @property
    def is_complete(self) -> bool:
        """Whether it brings the row of every chosen token, so that nothing that was held counts."""
        return bool(np.array_equal(self.counts, self.new_counts))


@dataclass(frozen=True)
class Rows:
    """The chosen tokens with their rows, in the order of the answer's counts."""

    ids: npt.NDArray[np.uint32]  # [N]
    keys: npt.NDArray[Any]  # [N, ...]
    values: npt.NDArray[Any]  # [N, ...]


def _sets_of(counts: npt.NDArray[np.uint32]) -> npt.NDArray[np.intp]:
    """The set of each token, in their order."""
    positions, sets = counts.shape
    return np.repeat(np.tile(np.arange(sets), positions), counts.ravel())


class RowCache:
    """The rows of one layer of one session, by slot. Thread-safe.

    An answer rests on the rows that were held when it was asked for: its query carried `version`. Where the cache has
    moved on since, because answers came in another order than they were asked for, the rows that it counts on may have
    made way, and it is refused. An answer that is lost, or fails, needs no care: the server sees an old version, and
    the next answer is complete. Memory: [sets, slots] rows, taken with the first of them.
    """

    def __init__(self, slots: int) -> None:
        """slots: SessionOptions.cache_slots."""
        self._slots = slots
        self._lock = threading.Lock()
        self._version = 0
        self._tokens: npt.NDArray[np.int64] = np.empty(0, np.int64)  # [sets * slots]
        self._keys: npt.NDArray[Any] = np.empty((0, 0))  # [sets * slots, ...]
        self._values: npt.NDArray[Any] = np.empty((0, 0))

    @property
    def version(self) -> int:
        """For Query.cache_version; 0 while nothing is held."""
        return self._version

    def take(self, new: NewRows, asked_version: int) -> Rows:
        """Takes new rows in and returns all that were chosen.

        asked_version: the version its query carried. StaleAnswer: nothing was changed, and the same question at version
        0 is answered whole. ProtocolError: slots that are not there, or were never filled; nothing is held then, and
        the next answer is complete.
        """
        with self._lock:
            if not new.is_complete and asked_version != self._version:
                raise StaleAnswer("INTERNAL", "the answer rests on rows that have made way since it was asked for")
            try:
                return self._take(new)
            except ProtocolError:
                self._version = 0
                self._tokens[:] = _EMPTY
                raise

    def _take(self, new: NewRows) -> Rows:
        if len(new.new_slots):
            self._make_room(new)
        written = self._places(new.new_counts, new.new_slots, "new_slots")
        self._tokens[written] = new.ids
        self._keys[written] = new.keys
        self._values[written] = new.values
        chosen = self._places(new.counts, new.slots, "slots")
        ids = self._tokens[chosen]
        if np.any(ids == _EMPTY):
            raise ProtocolError("INTERNAL", "answer.slots names a slot that was never filled")
        self._version = new.version
        return Rows(ids.astype(np.uint32), self._keys[chosen], self._values[chosen])

    def _places(self, counts: npt.NDArray[np.uint32], slots: npt.NDArray[np.uint16], name: str) -> npt.NDArray[np.intp]:
        if np.any(slots >= self._slots):
            raise ProtocolError("INTERNAL", f"answer.{name} has slot {slots.max()}; the cache has {self._slots}")
        if len(slots) and not len(self._tokens):
            raise ProtocolError("INTERNAL", f"answer.{name} names slots of a cache that holds nothing")
        return _sets_of(counts) * self._slots + slots

    def _make_room(self, new: NewRows) -> None:
        """Rows of another kind than those held push them out: the server counts on none of them."""
        places = new.counts.shape[1] * self._slots
        rows = ((self._keys, new.keys), (self._values, new.values))
        same = all(held.shape[1:] == row.shape[1:] and held.dtype == row.dtype for held, row in rows)
        if same and len(self._tokens) == places:
            return
        self._tokens = np.full(places, _EMPTY, np.int64)
        self._keys = np.empty((places, *new.keys.shape[1:]), new.keys.dtype)
        self._values = np.empty((places, *new.values.shape[1:]), new.values.dtype)


@dataclass(frozen=True)
class HeldRows:
    """A cache, and the version of it that a query carried."""

    cache: RowCache
    version: int
