# SPDX-License-Identifier: Apache-2.0
"""Nearest-neighbour indexes over keys: RetrievalAttention's attention-aware graph, and plain HNSW and IVF by faiss.

Each query head searches for itself; the group's candidates are united, scored exactly (the search has read their keys
already) and the k best by the sum of softmaxes are chosen, so that all systems choose sets of one kind.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .parts import FP16, LINE, Chosen, Floats, Ids, Mask, group_scores, logits_of, row_bytes, top_mask, whole_lines

if TYPE_CHECKING:
    from collections.abc import Callable

ID_BYTES = 4


def _choose_among(found: Ids, queries: Floats, keys: Floats, scale: float, k: int) -> Mask:
    """The k best [S, N] of the tokens found by any head of a step: [S, R, n], -1 for none."""
    steps = len(queries)
    candidates = np.zeros((steps, len(keys) + 1), dtype=np.bool_)
    np.put_along_axis(candidates, found.reshape(steps, -1), np.True_, axis=1)
    logits = logits_of(queries, keys, scale)
    logits = np.where(candidates[:, None, :-1], logits, np.float32(-np.inf))
    scores = np.where(candidates[:, :-1], group_scores(logits), np.float32(-np.inf))
    return top_mask(scores, k)


def _best_keys(queries: Floats, keys: Floats, count: int) -> Ids:
    """The count keys of greatest inner product for each query [M, D], best first."""
    count = min(count, len(keys))
    best = []
    for begin in range(0, len(queries), 1024):
        scores = queries[begin : begin + 1024] @ keys.T
        part = np.argpartition(-scores, count - 1, axis=1)[:, :count]
        order = np.argsort(-np.take_along_axis(scores, part, axis=1), axis=1, kind="stable")
        best.append(np.take_along_axis(part, order, axis=1))
    return np.asarray(np.concatenate(best), dtype=np.int64)


def attention_graph(keys: Floats, queries: Floats, degree: int = 64, listed: int = 64) -> Ids:
    """A graph over keys whose edges follow queries, after RetrievalAttention (Liu et al., NeurIPS 2025).

    The paper links each prompt query to its exact nearest keys and projects that bipartite graph onto the keys, as
    RoarGraph (Chen et al., VLDB 2024) does; then a search never has to leave the keys for the queries' distribution.
    Here: two keys are linked when lists of `listed` best keys of the same queries hold both, most frequent first, and
    half of each key's `degree` links are kept for its nearest keys, which join parts that no query touched. Not the
    paper's: RoarGraph prunes by occlusion and joins parts by searches; here counts and exact neighbours do.

    Args:
        keys: [N, D].
        queries: [M, D] of the prompt.
        degree: links a key.
        listed: keys a query names.

    Returns:
        Neighbours [N, degree] of each key, filled with the key itself.

    """
    tokens = len(keys)
    named = _best_keys(queries, keys, listed)
    half = degree // 2
    linked = _most_shared(named, tokens, half)
    norms = (keys * keys).sum(axis=1)
    near = np.empty((tokens, degree - half), dtype=np.int64)
    for begin in range(0, tokens, 2048):
        distance = norms[None] - 2 * keys[begin : begin + 2048] @ keys.T
        rows = np.arange(len(distance))
        distance[rows, begin + rows] = np.inf
        near[begin : begin + 2048] = np.argpartition(distance, degree - half - 1, axis=1)[:, : degree - half]
    return np.asarray(np.concatenate([linked, near], axis=1), dtype=np.int64)


def _most_shared(named: Ids, tokens: int, count: int, hubs: int = 4) -> Ids:
    """The `count` keys that each key is most often named with [N, count]; itself where there are fewer.

    A query's first `hubs` keys are each linked with all that it names, in both directions.
    """
    pairs = []
    for hub in range(min(hubs, named.shape[1])):
        one = np.repeat(named[:, hub], named.shape[1])
        pairs += [one * tokens + named.reshape(-1), named.reshape(-1) * tokens + one]
    pair, times = np.unique(np.concatenate(pairs), return_counts=True)
    source, target = np.divmod(pair, tokens)
    real = source != target
    source, target, times = source[real], target[real], times[real]
    order = np.lexsort((target, -times, source))
    source, target = source[order], target[order]
    rank = np.arange(len(source)) - np.searchsorted(source, source)
    kept = rank < count
    result = np.repeat(np.arange(tokens)[:, None], count, axis=1)
    result[source[kept], rank[kept]] = target[kept]
    return np.asarray(result, dtype=np.int64)


class RetrievalAttention:
    """RetrievalAttention's graph search over one KV head.

    A best-first search from the keys that most prompt queries name first, with a list of `width` open keys.

    Args:
        keys: [N, D].
        prompt_queries: [P, R, D].
        scale: of the softmax.
        width: keys kept open a query head; 0: half as many again as k, at least 192.
        entries: keys where every search begins.
        at_once: keys opened in one step of the search, which here is a step of many searches together.

    """

    def __init__(
        self,
        keys: Floats,
        prompt_queries: Floats,
        scale: float,
        *,
        width: int = 0,
        entries: int = 8,
        at_once: int = 8,
    ) -> None:
        self._at_once = at_once
        self._keys = keys
        self._scale = scale
        self._width = width
        flat = prompt_queries.reshape(-1, keys.shape[1])
        self._graph = attention_graph(keys, flat)
        first = np.bincount(_best_keys(flat, keys, 1)[:, 0], minlength=len(keys))
        self._entries: Ids = np.argsort(-first, kind="stable")[: min(entries, len(keys))]

    @property
    def memory_bytes(self) -> int:
        """The links."""
        return self._graph.size * ID_BYTES

    def search(self, queries: Floats, width: int) -> tuple[Ids, Mask, Mask]:
        """The `width` best keys met by each query [M, D], -1 for none; and the keys scored and those opened [M, N]."""
        count, keys = len(queries), self._keys
        scored = np.zeros((count, len(keys)), dtype=np.bool_)
        opened = np.zeros((count, len(keys)), dtype=np.bool_)
        ids = np.full((count, width), -1, dtype=np.int64)
        scores = np.full((count, width), -np.inf, dtype=np.float32)
        begin = min(width, len(self._entries))
        scored[:, self._entries[:begin]] = True
        ids[:, :begin] = self._entries[:begin]
        scores[:, :begin] = queries @ keys[self._entries[:begin]].T
        active: Ids = np.arange(count)
        while True:
            waiting = np.where(opened[active[:, None], ids[active]], np.float32(-np.inf), scores[active])
            at_once = min(self._at_once, width)
            best = np.argpartition(-waiting, at_once - 1, axis=1)[:, :at_once]
            real = np.take_along_axis(waiting, best, axis=1) > -np.inf
            going = real.any(axis=1)
            active, best, real = active[going], best[going], real[going]
            if not len(active):
                break
            rows, columns = np.nonzero(real)
            opened[active[rows], ids[active[rows], best[rows, columns]]] = True
            heads = np.where(real, np.take_along_axis(ids[active], best, axis=1), -1)
            links = np.where(real[..., None], self._graph[heads], -1).reshape(len(active), -1)
            fresh = (links >= 0) & ~scored[active[:, None], links] & _first_of_row(links)
            rows, columns = np.nonzero(fresh)
            found = links[rows, columns]
            scored[active[rows], found] = True
            value = np.full(links.shape, -np.inf, dtype=np.float32)
            value[rows, columns] = (queries[active[rows]] * keys[found]).sum(axis=1)
            every = np.concatenate([scores[active], value], axis=1)
            kept = np.argpartition(-every, width - 1, axis=1)[:, :width]
            scores[active] = np.take_along_axis(every, kept, axis=1)
            ids[active] = np.take_along_axis(np.concatenate([ids[active], links], axis=1), kept, axis=1)
        return np.where(np.isfinite(scores), ids, -1), scored, opened

    def choose(self, queries: Floats, k: int) -> Chosen:
        """The k best of what the group's searches met."""
        steps, heads, dim = queries.shape
        width = min(len(self._keys), self._width or max(192, k + k // 2))
        found, scored, opened = self.search(queries.reshape(-1, dim), width)
        mask = _choose_among(found.reshape(steps, heads, -1), queries, self._keys, self._scale, k)
        read = row_bytes(np.asarray(scored.reshape(steps, heads, -1).any(axis=1)), dim * FP16)
        links = row_bytes(np.asarray(opened.reshape(steps, heads, -1).any(axis=1)), self._graph.shape[1] * ID_BYTES)
        return Chosen(mask, read + links)


def _first_of_row(rows: Ids) -> Mask:
    """True where a value is the first of its like in its row."""
    order = np.argsort(rows, axis=1, kind="stable")
    ordered = np.take_along_axis(rows, order, axis=1)
    fresh = np.ones(rows.shape, dtype=np.bool_)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    result = np.empty(rows.shape, dtype=np.bool_)
    np.put_along_axis(result, order, fresh, axis=1)
    return result


class FaissGraph:
    """HNSW (Malkov and Yashunin, 2018) over keys by inner product, as faiss builds it: what RetrievalAttention betters.

    Args:
        keys: [N, D].
        scale: of the softmax.
        links: a node (M).
        build_width: keys kept open while building.
        width: keys kept open by a search; 0: twice k.

    """

    def __init__(self, keys: Floats, scale: float, links: int = 32, build_width: int = 200, width: int = 0) -> None:
        faiss = _faiss()
        self._keys: Floats = np.ascontiguousarray(keys)
        self._scale = scale
        self._links = links
        self._width = width
        self._index: Any = faiss.IndexHNSWFlat(keys.shape[1], links, faiss.METRIC_INNER_PRODUCT)
        self._index.hnsw.efConstruction = build_width
        self._index.add(self._keys)

    @property
    def memory_bytes(self) -> int:
        """The links: twice as many on the lowest level."""
        return len(self._keys) * 2 * self._links * ID_BYTES

    def choose(self, queries: Floats, k: int) -> Chosen:
        """The k best of what the group's searches met."""
        faiss = _faiss()
        width = min(len(self._keys), self._width or 2 * k)
        self._index.hnsw.efSearch = width
        stats = faiss.cvar.hnsw_stats

        def search(rows: Floats) -> tuple[Ids, int]:
            stats.reset()
            return self._index.search(rows, width)[1], int(stats.ndis) * whole_lines(rows.shape[1] * FP16)

        return _searched(search, queries, self._keys, self._scale, k)


class FaissLists:
    """Inverted lists (IVF) over keys by inner product, as faiss builds them: RetrievalAttention's other baseline.

    Args:
        keys: [N, D].
        scale: of the softmax.
        seed: of the training.
        lists: 0: four times the root of N.
        probed: lists read a query head.

    """

    def __init__(self, keys: Floats, scale: float, seed: int, lists: int = 0, probed: int = 32) -> None:
        faiss = _faiss()
        self._keys: Floats = np.ascontiguousarray(keys)
        self._scale = scale
        lists = min(len(keys), lists or 4 * math.isqrt(len(keys)))
        coarse = faiss.IndexFlatIP(keys.shape[1])
        self._coarse = coarse  # faiss does not keep it alive
        self._lists: int = lists
        index: Any = faiss.IndexIVFFlat(coarse, keys.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
        index.cp.seed = seed
        index.cp.min_points_per_centroid = 1
        index.train(self._keys)
        index.add(self._keys)
        index.nprobe = min(lists, probed)
        self._index = index

    @property
    def memory_bytes(self) -> int:
        """Centroids and ids; the keys lie in list order."""
        return int(self._lists * self._keys.shape[1] * FP16 + len(self._keys) * ID_BYTES)

    def choose(self, queries: Floats, k: int) -> Chosen:
        """The k best of the lists that the group's heads probe."""
        faiss = _faiss()
        stats = faiss.cvar.indexIVF_stats
        dim = queries.shape[-1]

        def search(rows: Floats) -> tuple[Ids, int]:
            stats.reset()
            found = self._index.search(rows, min(len(self._keys), 2 * k))[1]
            return found, int(stats.ndis) * (whole_lines(dim * FP16) + ID_BYTES)

        chosen = _searched(search, queries, self._keys, self._scale, k)
        read = chosen.bytes_read + queries.shape[1] * whole_lines(self._lists * dim * FP16)
        return Chosen(chosen.mask, np.asarray(read // LINE * LINE, dtype=np.int64))


def _searched(
    search: Callable[[Floats], tuple[Ids, int]], queries: Floats, keys: Floats, scale: float, k: int
) -> Chosen:
    """Search step by step, for the library counts its work over all queries of a call.

    It does not say which keys it read: heads that read the same ones are counted twice, but no step for more than all.
    """
    steps, heads = queries.shape[:2]
    found = []
    read = np.zeros(steps, dtype=np.int64)
    for step, rows in enumerate(queries):
        ids, read[step] = search(np.ascontiguousarray(rows))
        found.append(ids)
    mask = _choose_among(np.asarray(found, dtype=np.int64).reshape(steps, heads, -1), queries, keys, scale, k)
    return Chosen(mask, np.minimum(read, keys.size * FP16))


def _faiss() -> Any:
    import faiss

    faiss.omp_set_num_threads(1)
    return faiss
