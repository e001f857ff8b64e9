# SPDX-License-Identifier: Apache-2.0
"""MagicPIG (Chen et al., ICLR 2025): tokens sampled by locality-sensitive hashing, weighted by their probability."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .parts import FP16, LINE, Chosen, Floats, Ids, Mask, logits_of, row_bytes

ID_BYTES = 4

Codes = NDArray[np.uint16]


def sampling_probability(cosine: Floats, bits: int, tables: int) -> Floats:
    """The probability that vectors of this cosine collide in at least two of `tables` tables of `bits` sign bits."""
    angle = np.arccos(np.clip(cosine.astype(np.float64), -1.0, 1.0))
    one = (1.0 - angle / np.pi) ** bits
    none = (1.0 - one) ** tables
    once = tables * one * (1.0 - one) ** (tables - 1)
    return np.asarray(1.0 - none - once, dtype=np.float32)


class MagicPig:
    """MagicPIG over one KV head.

    Keys are centred by their mean and hashed into `tables` tables of `bits` random signs; a query head samples the keys
    that share its bucket in at least two tables. A sampled key's logit is lowered by the logarithm of the probability
    of being sampled: self-normalised importance sampling of the softmax. The paper's settings are 10 bits and 150
    tables (about 2 % of the tokens) or 170 (2.5 %); some layers stay dense there (every sixteenth), which is for
    whoever runs a model to do.

    The number sampled follows from the keys, so k is not obeyed but aimed at: tables_for() finds the tables for it.

    Args:
        keys: [N, D].
        scale: of the softmax.
        seed: of the random signs.
        bits: a table.
        tables: hashed into.

    """

    def __init__(self, keys: Floats, scale: float, seed: int, bits: int = 10, tables: int = 150) -> None:
        self._keys = keys
        self._scale = scale
        self._bits = bits
        self._tables = tables
        self._mean: Floats = keys.mean(axis=0)
        centred = keys - self._mean
        self._norms = np.maximum(np.linalg.norm(centred, axis=1), np.float32(1e-20))
        self._directions = np.asarray(centred / self._norms[:, None], dtype=np.float32)
        rng = np.random.default_rng(seed)
        self._signs = rng.standard_normal((keys.shape[1], bits * tables)).astype(np.float32)
        codes = self._codes(centred)
        self._order: Ids = np.argsort(codes, axis=0, kind="stable")
        self._sorted = np.take_along_axis(codes, self._order, axis=0)

    def _codes(self, vectors: Floats) -> Codes:
        """Bucket of each vector [M, D] in each table: [M, L]."""
        signs = (vectors @ self._signs > 0).reshape(len(vectors), self._tables, self._bits)
        return np.asarray(signs @ (1 << np.arange(self._bits)).astype(np.uint16), dtype=np.uint16)

    @property
    def memory_bytes(self) -> int:
        """An id a key and table, bucket borders, the random signs, and a norm a key."""
        borders = self._tables * ((1 << self._bits) + 1) * ID_BYTES
        return self._order.size * ID_BYTES + borders + self._signs.size * FP16 + len(self._keys) * FP16

    def collisions(self, queries: Floats) -> tuple[Codes, Ids]:
        """How many tables each key [M, N] shares with each of M queries, and the bytes of the ids read for it [M]."""
        codes = self._codes(queries)
        counts = np.zeros((len(queries), len(self._keys)), dtype=np.uint16)
        read = np.zeros(len(queries), dtype=np.int64)
        for table in range(self._tables):
            begin = np.searchsorted(self._sorted[:, table], codes[:, table], side="left")
            end = np.searchsorted(self._sorted[:, table], codes[:, table], side="right")
            sizes = end - begin
            rows = np.repeat(np.arange(len(queries)), sizes)
            inside = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            counts[rows, self._order[np.repeat(begin, sizes) + inside, table]] += 1
            first = begin * ID_BYTES // LINE
            last = (end * ID_BYTES - 1) // LINE
            # A table's border, and the ids of its bucket.
            read += LINE + np.where(sizes > 0, (last - first + 1) * LINE, 0)
        return counts, read

    def choose(self, queries: Floats, k: int) -> Chosen:
        """The keys that at least two tables name; each query head has its own sample, rows of the union are read."""
        steps, heads, dim = queries.shape
        flat = queries.reshape(-1, dim)
        counts, read = self.collisions(flat)
        sampled: Mask = (counts >= 2).reshape(steps, heads, -1)
        lengths = np.maximum(np.linalg.norm(flat, axis=1), np.float32(1e-20))
        cosine = logits_of(np.asarray(queries / lengths.reshape(steps, heads, 1)), self._directions, 1.0)
        chance = np.maximum(sampling_probability(cosine, self._bits, self._tables), np.float32(1e-20))
        bias = np.where(sampled, -np.log(chance), np.float32(-np.inf)).astype(np.float32)
        mask = np.asarray(sampled.any(axis=1))
        return Chosen(mask, read.reshape(steps, heads).sum(axis=1) + row_bytes(mask, dim * FP16), bias=bias)

    @staticmethod
    def tables_for(keys: Floats, queries: Floats, k: int, bits: int = 10, most: int = 2000) -> int:
        """The tables with which a query head of queries [S, R, D] samples about k keys on average, by the formula."""
        centred = keys - keys.mean(axis=0)
        directions = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-20)
        unit = queries / np.maximum(np.linalg.norm(queries, axis=-1, keepdims=True), 1e-20)
        cosine = logits_of(np.asarray(unit, dtype=np.float32), np.asarray(directions, dtype=np.float32), 1.0)
        low, high = 2, most
        while low < high:
            middle = (low + high) // 2
            if sampling_probability(cosine, bits, middle).sum(axis=-1).mean() < k:
                low = middle + 1
            else:
                high = middle
        return low
