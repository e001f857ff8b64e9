# SPDX-License-Identifier: Apache-2.0
"""A selector of one's own: tests/eval/run --only tests/eval/examples/strided.py:Strided --text code."""

import numpy as np

from ctkvr_eval.attention import Floats
from ctkvr_eval.selectors.base import Choice, TokenSelector


class Strided(TokenSelector):
    """k tokens at equal distances, whatever is asked."""

    name = "strided"

    def __init__(self, k: int) -> None:
        self._k = k

    def choose(self, layer: int, queries: Floats) -> Choice:
        """The same for every position and KV head; no key is read to choose, k are to attend."""
        ids = np.unique(np.linspace(self.task.free_begin, self.task.free_end - 1, self._k).astype(np.int64))
        positions, heads = queries.shape[1], self.task.kv_heads
        read = 2 * len(ids) * heads * self.task.head_dim
        return Choice([[ids] * heads] * positions, np.full(positions, read))
