# SPDX-License-Identifier: Apache-2.0
"""Answers: which tokens were chosen, at which scores, with which rows, and how. Plain values."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ctkvr.rows import RowDecoder

__all__ = ["Answer", "AnswerMode", "Reduction", "RowFormat", "Selection", "Sets", "Source"]

AnswerMode = Literal["ids", "scores", "rows", "new_rows", "attention"]
Reduction = Literal["sum_softmax", "max_softmax", "per_head"]
RowFormat = Literal["f32", "f16", "bf16", "storage"]
Source = Literal["dense", "exact", "sketch", "query_centroids", "key_centroids", "key_centroids_sketch", "auto"]


@dataclass(frozen=True)
class Selection:
    """What to choose; proto/ctkvr/v1/session.proto explains every setting.

    None takes the layer's, then the session's, then the server's value; the one in Answer.used says what was used.
    """

    k: int | None = None  # tokens a set, beside the always-included ones
    source: Source | None = None
    top_p: float | None = None
    min_share: float | None = None
    min_score: float | None = None
    reduction: Reduction | None = None
    sink_tokens: int | None = None
    window_tokens: int | None = None
    dense_below_tokens: int | None = None
    keep_share: float | None = None
    refine_planes: int | None = None
    candidate_tokens: int | None = None
    probes: int | None = None
    centroid_set: str | None = None
    open_share: float | None = None


class Sets:
    """One array for each (position, set): sets[p, g]. Arrays are views of `flat` and cannot be written to.

    A set is a KV head, or a query head under reduction "per_head".
    """

    def __init__(self, counts: npt.NDArray[np.uint32], flat: npt.NDArray[Any], heads: int | None = None) -> None:
        """counts [P, G]. flat: [N, ...], or with `heads` [N * heads], where a set's array is [heads, n]."""
        self.shape = (int(counts.shape[0]), int(counts.shape[1]))
        self.flat = flat
        self._counts = counts
        self._heads = heads

    @functools.cached_property
    def _begins(self) -> npt.NDArray[np.int64]:
        return np.concatenate(([0], np.cumsum(self._counts.ravel(), dtype=np.int64)))

    def __getitem__(self, index: tuple[int, int]) -> npt.NDArray[Any]:
        position, set_ = index
        for name, value, limit in (("position", position, self.shape[0]), ("set", set_, self.shape[1])):
            if not -limit <= value < limit:
                raise IndexError(f"{name} is {value}; there are {limit}")
        place = position % self.shape[0] * self.shape[1] + set_ % self.shape[1]
        begin, end = int(self._begins[place]), int(self._begins[place + 1])
        if self._heads is None:
            return self.flat[begin:end]
        return self.flat[begin * self._heads : end * self._heads].reshape(self._heads, end - begin)

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return (self[p, g] for p in range(self.shape[0]) for g in range(self.shape[1]))

    def __len__(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Answer:
    """The tokens chosen. P positions asked for, G sets a position (see Sets), n tokens a set, R query heads a set."""

    counts: npt.NDArray[np.uint32]  # [P, G]: n of each set
    ids: Sets  # uint32 [n]: cache positions, ascending; of answer "attention" every set's is empty
    scores: Sets | None  # float32 [R, n]: unscaled inner products with the decoded stored keys
    # [n, head_dim]: float32 for row format "f32" and "storage", float16, or uint16 for "bf16"; with decode_rows=False
    # uint8 [n, key_row_bytes], as stored.
    keys: Sets | None
    values: Sets | None  # [n, value_dim], as keys
    row_format: RowFormat | None  # None: no rows
    used: Selection  # every setting as it was used
    source: Source  # what served: "dense" where every token was chosen
    length: int  # tokens the layer held
    indexed_length: int  # of these, in the index
    bytes_read: int  # to choose and to estimate the remainder, in whole lines of 64
    always_tokens: int  # of the last position: sinks, window and tail, a set
    code_generation: int
    # Answer "attention": over the chosen tokens, and the natural log of their sum of exp(logit); zeros and -infinity
    # where none was chosen. float32, whatever the row format they travelled in. ctkvr.merge_attention takes both.
    output: npt.NDArray[np.float32] | None = None  # [P, q_heads, value_dim]
    log_sum_exp: npt.NDArray[np.float32] | None = None  # [P, q_heads]
    # Where it was asked for: the same over everything neither chosen nor the caller's own, estimated.
    remainder_output: npt.NDArray[np.float32] | None = None
    remainder_log_sum_exp: npt.NDArray[np.float32] | None = None
    decoder: RowDecoder | None = None  # of rows that were left as stored
    # Answer "new_rows": everything above is as of "rows", without scores; of the rows, so many travelled.
    new_rows: int | None = None
