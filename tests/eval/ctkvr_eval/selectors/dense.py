# SPDX-License-Identifier: Apache-2.0
"""Selectors that search nothing: exact top-K, a sliding window, and SnapKV's choice made once."""

from __future__ import annotations

import numpy as np

from .parts import FP16, Chosen, Floats, group_scores, logits_of, row_bytes, softmax, top_mask


class ExactTopK:
    """The k tokens of the greatest sum of the group's softmaxes, found by scanning all fp16 keys."""

    def __init__(self, keys: Floats, scale: float) -> None:
        self._keys = keys
        self._scale = scale

    @property
    def memory_bytes(self) -> int:
        """Nothing beside keys and values."""
        return 0

    def choose(self, queries: Floats, k: int) -> Chosen:
        """The true best k."""
        mask = top_mask(group_scores(logits_of(queries, self._keys, self._scale)), k)
        return Chosen(mask, np.full(len(queries), self._keys.size * FP16))


class SlidingWindow:
    """StreamingLLM (Xiao et al., ICLR 2024): sinks, which lie outside, and the last k tokens."""

    def __init__(self, keys: Floats) -> None:
        self._tokens, self._dim = keys.shape

    @property
    def memory_bytes(self) -> int:
        """Nothing beside keys and values."""
        return 0

    def choose(self, queries: Floats, k: int) -> Chosen:
        """The last k."""
        mask = np.zeros((len(queries), self._tokens), dtype=np.bool_)
        mask[:, max(0, self._tokens - k) :] = True
        return Chosen(mask, row_bytes(mask, self._dim * FP16))


class SnapKv:
    """SnapKV (Li et al., NeurIPS 2024): the prompt's last queries vote once, smoothed by a moving maximum; it stays so.

    Args:
        keys: [N, D].
        observed: [W, R, D], the queries of the prompt's last positions (the paper's observation window, 32).
        scale: of the softmax.
        width: of the pooling (the paper's 7), odd.

    """

    def __init__(self, keys: Floats, observed: Floats, scale: float, width: int = 7) -> None:
        votes = softmax(logits_of(observed, keys, scale)).sum(axis=(0, 1))
        self._dim = keys.shape[1]
        half = width // 2
        padded = np.pad(votes, half, constant_values=0)
        pooled = np.lib.stride_tricks.sliding_window_view(padded, width).max(axis=-1)
        # Ranks: a maximum makes plateaus, and within one the vote itself decides.
        self._scores = np.empty(len(keys), dtype=np.float32)
        self._scores[np.lexsort((votes, pooled))] = np.arange(len(keys))

    @property
    def memory_bytes(self) -> int:
        """Nothing beside keys and values: tokens not chosen are dropped."""
        return 0

    def choose(self, queries: Floats, k: int) -> Chosen:
        """The same k for every step."""
        mask = np.broadcast_to(top_mask(self._scores[None], k), (len(queries), len(self._scores)))
        return Chosen(mask, row_bytes(mask, self._dim * FP16))
