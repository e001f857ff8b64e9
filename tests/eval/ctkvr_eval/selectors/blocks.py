# SPDX-License-Identifier: Apache-2.0
"""Systems that choose runs of neighbouring tokens: Quest and InfLLM."""

from __future__ import annotations

import numpy as np

from .parts import FP16, Chosen, Floats, Mask, group_scores, logits_of, row_bytes, top_mask, whole_lines


def _tokens_of(blocks: Mask, size: int, tokens: int) -> Mask:
    """Masks over blocks [..., P] as masks over their tokens [..., N]."""
    return np.asarray(np.repeat(blocks, size, axis=-1)[..., :tokens])


class Quest:
    """Quest (Tang et al., ICML 2024): pages of 16 tokens ranked by the best score that their min and max keys allow.

    The paper ranks pages for each query head. With `each_head` that is kept: k tokens a query head, rows of the union
    read; without, one set a KV head by the sum of the group's softmaxes over page bounds, as other systems here.

    Args:
        keys: [N, D].
        scale: of the softmax.
        page: tokens a page.
        each_head: a set of its own for each query head.

    """

    def __init__(self, keys: Floats, scale: float, page: int = 16, *, each_head: bool = False) -> None:
        self._tokens = len(keys)
        self._page = page
        self._scale = scale
        self._each_head = each_head
        self._width = keys.shape[1] * FP16
        starts = np.arange(0, len(keys), page)
        self._low: Floats = np.minimum.reduceat(keys, starts, axis=0)
        self._high: Floats = np.maximum.reduceat(keys, starts, axis=0)

    @property
    def memory_bytes(self) -> int:
        """Two fp16 keys a page."""
        return 2 * self._low.size * FP16

    def bounds(self, queries: Floats) -> Floats:
        """Upper bounds [S, R, P] of the logits in each page."""
        zero = np.float32(0)
        high = logits_of(np.maximum(queries, zero), self._high, self._scale)
        return np.asarray(high + logits_of(np.minimum(queries, zero), self._low, self._scale), dtype=np.float32)

    def choose(self, queries: Floats, k: int) -> Chosen:
        """The k // page best pages, at least one."""
        pages = max(1, k // self._page)
        bounds = self.bounds(queries)
        digests = whole_lines(self.memory_bytes)
        if not self._each_head:
            mask = _tokens_of(top_mask(group_scores(bounds), pages), self._page, self._tokens)
            return Chosen(mask, digests + row_bytes(mask, self._width))
        parts = _tokens_of(top_mask(bounds, pages), self._page, self._tokens)
        mask = np.asarray(parts.any(axis=1))
        bias = np.where(parts, np.float32(0), np.float32(-np.inf))
        return Chosen(mask, digests + row_bytes(mask, self._width), bias=bias)


class InfLlm:
    """InfLLM (Xiao et al., NeurIPS 2024): blocks of distant tokens, each known by its few representative keys.

    A token's worth is its mean score under the queries that follow it within `local` positions; a block's
    representatives are its best; a block's relevance is the mean score of its representatives, summed over query heads.
    The paper sums over all heads of a layer and shares the blocks among them; here each KV head has its own. The paper
    places all distant tokens at one position; keys here keep their own, as the model was trained.

    Args:
        keys: [N, D], at positions first_key ….
        prompt_queries: [P, R, D] at consecutive positions, the last of them the prompt's last.
        lag: positions from the first key to the first query; negative where queries begin earlier.
        scale: of the softmax.
        block: tokens a block (the paper's 128).
        representatives: keys a block (the paper's 4).
        local: how many following queries judge a token (the paper's 4,096).

    """

    def __init__(
        self,
        keys: Floats,
        prompt_queries: Floats,
        lag: int,
        scale: float,
        *,
        block: int = 128,
        representatives: int = 4,
        local: int = 4096,
    ) -> None:
        self._tokens = len(keys)
        self._block = block
        self._scale = scale
        worth = self.worths(keys, prompt_queries, lag, local)
        blocks = -(-len(keys) // block)
        padded = np.full(blocks * block, -np.inf, dtype=np.float32)
        padded[: len(keys)] = worth
        chosen = top_mask(padded.reshape(blocks, block), representatives)
        members = np.zeros((blocks * block, keys.shape[1]), dtype=np.float32)
        members[: len(keys)] = keys
        picked = members.reshape(blocks, block, -1) * chosen[..., None]
        # One mean key scores as the mean of its representatives' scores does.
        self._means: Floats = np.asarray(picked.sum(axis=1) / chosen.sum(axis=1)[:, None], dtype=np.float32)

    @staticmethod
    def worths(keys: Floats, prompt_queries: Floats, lag: int, local: int) -> Floats:
        """Mean score [N] of each key under the group's queries at the next `local` positions.

        Where no query in reach is known, the nearest known ones judge.
        """
        running = np.cumsum(prompt_queries.sum(axis=1), axis=0, dtype=np.float64)
        total = np.concatenate([np.zeros((1, keys.shape[1])), running])
        count = len(prompt_queries)
        after = np.arange(len(keys)) + 1 - lag
        begin = np.clip(after, 0, max(0, count - 1))
        end = np.clip(after + local, np.minimum(begin + 1, count), count)
        reach = np.maximum(end - begin, 1)[:, None]
        means = (total[end] - total[begin]) / reach
        return np.asarray((means * keys).sum(axis=1), dtype=np.float32)

    @property
    def memory_bytes(self) -> int:
        """One fp16 mean key a block: all that its authors' program keeps of the representatives."""
        return self._means.size * FP16

    def choose(self, queries: Floats, k: int) -> Chosen:
        """The k // block best blocks, at least one."""
        relevance = logits_of(queries, self._means, self._scale).sum(axis=1)
        mask = _tokens_of(top_mask(relevance, max(1, k // self._block)), self._block, self._tokens)
        return Chosen(mask, whole_lines(self.memory_bytes) + row_bytes(mask, self._means.shape[1] * FP16))
