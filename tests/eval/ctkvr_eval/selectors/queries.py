# SPDX-License-Identifier: Apache-2.0
"""CTkvr's query-centroid index as the article has it, in numpy: for reference beside the service's own.

A centroid is a query of the prompt (the group's query heads, each normalised, side by side); its list holds the keys
that it scores best. A step probes the most similar centroids and scores the union of their lists exactly.
"""

from __future__ import annotations

import numpy as np

from .parts import FP16, LINE, Chosen, Floats, Ids, Mask, group_scores, logits_of, row_bytes, top_mask, whole_lines

ID_BYTES = 4


def directions_of(queries: Floats) -> Floats:
    """Queries [M, R, D] as vectors [M, R · D] whose dot products are mean cosines over the group."""
    lengths = np.maximum(np.linalg.norm(queries, axis=-1, keepdims=True), np.float32(1e-20))
    flat = (queries / lengths).reshape(len(queries), -1)
    return np.asarray(flat / np.float32(np.sqrt(queries.shape[1])), dtype=np.float32)


class QueryCentroids:
    """CTkvr (Lu et al., 2025), two stages over one KV head.

    Args:
        keys: [N, D].
        prompt_queries: [P, R, D] of the prompt's last positions.
        scale: of the softmax.
        centroids: how many of the last queries are centroids; fewer where there are fewer.
        listed: keys a list.
        probed: lists a step reads.

    """

    def __init__(
        self,
        keys: Floats,
        prompt_queries: Floats,
        scale: float,
        *,
        centroids: int = 1024,
        listed: int = 1024,
        probed: int = 8,
    ) -> None:
        self._keys = keys
        self._scale = scale
        self._probed = probed
        last = prompt_queries[-centroids:]
        self._centroids = directions_of(last)
        # At the prompt's mean norms: the cosine search has forgotten each query's own.
        norms = np.linalg.norm(prompt_queries, axis=-1).mean(axis=0)
        unit = self._centroids.reshape(last.shape) * np.float32(np.sqrt(last.shape[1]))
        level = np.asarray(unit * norms[:, None], dtype=np.float32)
        lists = []
        for begin in range(0, len(last), 128):
            best = top_mask(group_scores(logits_of(level[begin : begin + 128], keys, scale)), listed)
            lists.append(np.nonzero(best)[1].reshape(len(best), -1))
        self._lists: Ids = np.concatenate(lists)

    @property
    def memory_bytes(self) -> int:
        """Lists of ids, and fp16 centroids."""
        return self._lists.size * ID_BYTES + self._centroids.size * FP16

    def candidates(self, queries: Floats) -> tuple[Mask, Floats]:
        """Masks [S, N] of the tokens in the probed lists, and the best centroid's cosine [S]."""
        similar = directions_of(queries) @ self._centroids.T
        probed = np.nonzero(top_mask(similar, self._probed))[1].reshape(len(queries), -1)
        mask = np.zeros((len(queries), len(self._keys)), dtype=np.bool_)
        np.put_along_axis(mask, self._lists[probed].reshape(len(queries), -1), np.True_, axis=1)
        return mask, similar.max(axis=1)

    def choose(self, queries: Floats, k: int) -> Chosen:
        """The k best of the candidates by the sum of the group's softmaxes."""
        mask, _ = self.candidates(queries)
        logits = np.where(mask[:, None], logits_of(queries, self._keys, self._scale), np.float32(-np.inf))
        scores = np.where(mask, group_scores(logits), np.float32(-np.inf))
        read = row_bytes(mask, self._keys.shape[1] * FP16) + whole_lines(self._centroids.size * FP16)
        ids = self._probed * whole_lines(self._lists.shape[1] * ID_BYTES)
        return Chosen(top_mask(scores, k), read + min(ids, self._lists.size * ID_BYTES // LINE * LINE))
