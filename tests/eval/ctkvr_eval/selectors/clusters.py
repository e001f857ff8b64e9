# SPDX-License-Identifier: Apache-2.0
"""Clusters of like keys: RetroInfer's wave index, and the remainder of what any index did not choose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .parts import FP16, LINE, Chosen, Floats, Ids, Index, Mask, Rest, group_scores, logits_of, row_bytes, whole_lines

ID_BYTES = 4


@dataclass(frozen=True)
class Clusters:
    """G clusters over N tokens."""

    owner: Ids  # [N], cluster of each token
    counts: Ids  # [G]
    keys: Floats  # [G, D], mean keys
    values: Floats  # [G, V], mean values

    @property
    def memory_bytes(self) -> int:
        """Mean keys and values in fp16, counts and the tokens' ids."""
        return (self.keys.size + self.values.size) * FP16 + (len(self.counts) + len(self.owner)) * ID_BYTES


def _assign(directions: Floats, centres: Floats) -> Ids:
    return np.asarray((directions @ centres.T).argmax(axis=1), dtype=np.int64)


def _sums(rows: Floats, owner: Ids, groups: int) -> Floats:
    """Sum of the rows of each group [G, …]; zero for a group of none."""
    order = np.argsort(owner, kind="stable")
    present, starts = np.unique(owner[order], return_index=True)
    sums = np.zeros((groups, rows.shape[1]), dtype=np.float32)
    sums[present] = np.add.reduceat(rows[order], starts, axis=0)
    return sums


def _unit(rows: Floats) -> Floats:
    return np.asarray(
        rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-20)), dtype=np.float32
    )


def cluster_keys(keys: Floats, values: Floats, size: int = 16, segment: int = 8192, rounds: int = 10) -> Clusters:
    """Segmented spherical k-means as RetroInfer does it (Chen et al., VLDB 2025).

    Keys are centred by their mean; each segment of neighbouring tokens has clusters of its own, about `size` tokens
    each, that begin evenly spread by position; `rounds` of assignment by cosine and update. Clusters left empty are
    dropped at the end.
    """
    centred = np.asarray(keys - keys.mean(axis=0), dtype=np.float32)
    directions = _unit(centred)
    owner = np.zeros(len(keys), dtype=np.int64)
    base = 0
    for begin in range(0, len(keys), segment):
        part = directions[begin : begin + segment]
        groups = max(1, round(len(part) / size))
        centres = part[np.arange(groups) * len(part) // groups]
        for _ in range(rounds):
            named = _assign(part, centres)
            sums = _sums(part, named, groups)
            empty = np.bincount(named, minlength=groups) == 0
            centres = np.where(empty[:, None], centres, _unit(sums))
        owner[begin : begin + segment] = base + _assign(part, centres)
        base += groups
    present, owners = np.unique(owner, return_inverse=True)
    counts = np.bincount(owners, minlength=len(present))
    shares = counts[:, None].astype(np.float32)
    return Clusters(
        owner=np.asarray(owner, dtype=np.int64),
        counts=np.asarray(counts, dtype=np.int64),
        keys=np.asarray(_sums(keys, owner, len(present)) / shares, dtype=np.float32),
        values=np.asarray(_sums(values, owner, len(present)) / shares, dtype=np.float32),
    )


def estimate(queries: Floats, clusters: Clusters, left: Ids, scale: float) -> Rest:
    """Partial attention over what is left of each cluster.

    Each cluster weighs left · exp(q · mean key) with its mean value. By Jensen's inequality that is at most the true
    weight of an untouched cluster.

    Args:
        queries: [S, R, D].
        clusters: G of them.
        left: [S, 1 or R, G], tokens of each that count, for all query heads or for each.
        scale: of the softmax.

    """
    with np.errstate(divide="ignore"):
        logits = logits_of(queries, clusters.keys, scale) + np.log(left.astype(np.float32))
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(top), top, np.float32(0)))
    total = weights.sum(axis=-1)
    output = weights @ clusters.values / np.maximum(total, np.float32(1e-30))[..., None]
    with np.errstate(divide="ignore"):
        lse = np.log(total) + np.where(np.isfinite(top), top, np.float32(0))[..., 0]
    return Rest(np.asarray(lse, dtype=np.float32), np.asarray(output, dtype=np.float32))


class RetroInfer:
    """RetroInfer's wave index (Chen et al., VLDB 2025): whole key clusters exactly, the next best from their means.

    Clusters are ranked by the sum over the group's heads of the softmax over mean keys. The best are read whole
    (1.8 % of the clusters in the paper); the next 23.2 % are estimated by mean key and summed value; all others are
    left out. Sinks and local tokens lie outside.

    Args:
        keys: [N, D].
        values: [N, V].
        scale: of the softmax.
        size: mean tokens a cluster (the paper's 16).
        estimated: share of the clusters in the estimation zone.

    """

    def __init__(self, keys: Floats, values: Floats, scale: float, size: int = 16, estimated: float = 0.232) -> None:
        self._clusters = cluster_keys(keys, values, size)
        self._scale = scale
        self._size = size
        self._estimated = estimated

    @property
    def memory_bytes(self) -> int:
        """Mean keys, summed values, counts and the tokens' ids."""
        return self._clusters.memory_bytes

    def choose(self, queries: Floats, k: int) -> Chosen:
        """The k / 16 best clusters, about k tokens; those after them estimated."""
        clusters = self._clusters
        scores = group_scores(logits_of(queries, clusters.keys, self._scale))
        groups = scores.shape[1]
        rank = np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1, kind="stable")
        probed = min(groups, max(1, round(k / self._size)))
        zone = round(self._estimated * groups)
        opened: Mask = rank < probed
        near: Mask = (rank >= probed) & (rank < probed + zone)
        rest = estimate(queries, clusters, (near * clusters.counts)[:, None], self._scale) if zone else None
        ids = opened @ clusters.counts * ID_BYTES
        read = whole_lines(clusters.keys.size * FP16) + ids // LINE * LINE + probed * LINE
        read += zone * whole_lines(clusters.values.shape[1] * FP16)
        mask = np.asarray(opened[:, clusters.owner])
        # A cluster's rows lie together: whole but for its ends.
        read += row_bytes(mask, clusters.keys.shape[1] * FP16)
        return Chosen(mask, np.asarray(read, dtype=np.int64), rest=rest)


class WithRemainder:
    """Any index, with the partial attention of all that it did not choose, estimated from key clusters."""

    def __init__(self, index: Index, clusters: Clusters, scale: float) -> None:
        self._index = index
        self._clusters = clusters
        self._scale = scale

    @property
    def memory_bytes(self) -> int:
        """The index's and the clusters'."""
        return self._index.memory_bytes + self._clusters.memory_bytes

    def choose(self, queries: Floats, k: int) -> Chosen:
        """The index's choice; clusters count by their tokens that are left, means stay."""
        chosen = self._index.choose(queries, k)
        clusters = self._clusters
        parts = chosen.mask[:, None] if chosen.bias is None else chosen.bias > -np.inf
        taken = np.zeros((*parts.shape[:2], len(clusters.counts)), dtype=np.int64)
        steps, heads, tokens = np.nonzero(parts)
        np.add.at(taken, (steps, heads, clusters.owner[tokens]), 1)
        rest = estimate(queries, clusters, clusters.counts - taken, self._scale)
        means = whole_lines((clusters.keys.size + clusters.values.size) * FP16)
        return Chosen(chosen.mask, chosen.bytes_read + means, bias=chosen.bias, rest=rest)
