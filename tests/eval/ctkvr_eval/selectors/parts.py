# SPDX-License-Identifier: Apache-2.0
"""What the comparison systems share: their answer, group scores, top-K and the counting of 64-byte lines.

An index covers N tokens of one KV head and is asked by S steps at once; queries are [S, R, D] for its R query heads.
Sinks, window and tail lie outside: whoever attends adds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]

LINE = 64  # bytes of a cache line
FP16 = 2  # bytes: keys and values of every comparison system are counted as fp16


@dataclass(frozen=True)
class Rest:
    """A partial attention over tokens that were not chosen: log-sum-exp [S, R] and normalised output [S, R, V]."""

    lse: Floats
    output: Floats


@dataclass(frozen=True)
class Chosen:
    """An index's answer to S steps."""

    mask: Mask  # [S, N]: the tokens whose rows are read
    bytes_read: Ids  # [S]: index and keys read, in whole 64-byte lines; values follow from how many are chosen
    bias: Floats | None = None  # [S, R, N], added to logits: weights of a sample, -inf where a query head chose not
    rest: Rest | None = None  # the system's own estimate of what it did not choose


class Index(Protocol):
    """One comparison system over one KV head. Built in its constructor, asked by choose()."""

    @property
    def memory_bytes(self) -> int:
        """Bytes held beside keys and values."""
        ...

    def choose(self, queries: Floats, k: int) -> Chosen:
        """Choose about k tokens for each step of queries [S, R, D]."""
        ...


def logits_of(queries: Floats, keys: Floats, scale: float) -> Floats:
    """Logits [S, R, N] of queries [S, R, D] over keys [N, D]."""
    steps, heads, dim = queries.shape
    flat = queries.reshape(steps * heads, dim) @ keys.T
    return np.asarray(flat * np.float32(scale), dtype=np.float32).reshape(steps, heads, len(keys))


def softmax(logits: Floats) -> Floats:
    """Softmax over the last axis; -inf is no weight, a row of nothing but -inf has none at all."""
    top = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isfinite(top), top, np.float32(0)))
    total = weights.sum(axis=-1, keepdims=True)
    return np.asarray(weights / np.where(total > 0, total, np.float32(1)), dtype=np.float32)


def group_scores(logits: Floats) -> Floats:
    """Sum of the softmaxes of a group's query heads: [S, R, N] to [S, N]."""
    return np.asarray(softmax(logits).sum(axis=1), dtype=np.float32)


def top_mask(scores: Floats, k: int) -> Mask:
    """The k best of the last axis; of equals the lower positions; -inf is never chosen."""
    size = scores.shape[-1]
    allowed = scores > -np.inf
    if k >= size:
        return np.asarray(allowed)
    if k <= 0:
        return np.zeros_like(allowed)
    limit = np.partition(scores, size - k, axis=-1)[..., size - k, None]
    above = scores > limit
    equal = scores == limit
    room = k - above.sum(axis=-1, keepdims=True)
    return np.asarray((above | (equal & (np.cumsum(equal, axis=-1) <= room))) & allowed)


def whole_lines(size: int) -> int:
    """Size in bytes, rounded up to whole lines."""
    return -(-size // LINE) * LINE


def row_bytes(mask: Mask, width: int) -> Ids:
    """Bytes [S] of the distinct lines that chosen rows [S, N] of `width` bytes touch, rows lying one after another."""
    rows = np.arange(mask.shape[1])
    first = rows * width // LINE
    last = ((rows + 1) * width - 1) // LINE
    if width < LINE:
        touched = np.zeros((len(mask), last[-1] + 1), dtype=np.bool_)
        for border in (first, last):
            lines, begin = np.unique(border, return_index=True)
            touched[:, lines] |= np.logical_or.reduceat(mask, begin, axis=1)
        return np.asarray(touched.sum(axis=1) * LINE, dtype=np.int64)
    # Longer rows share a line with the next row at most.
    lines = mask @ (last - first + 1)
    shared = (mask[:, 1:] & mask[:, :-1]) @ (first[1:] == last[:-1]).astype(np.int64)
    return np.asarray((lines - shared) * LINE, dtype=np.int64)
