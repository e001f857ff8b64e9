# SPDX-License-Identifier: Apache-2.0
"""What is measured: loss against full attention, and which of the tokens that matter were chosen."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ctkvr_eval import attention
from ctkvr_eval.attention import Floats
from ctkvr_eval.selectors.base import Chosen, Task

NEEDLE_SHARE = 0.1  # of the attention: a free token above this is a needle
WORST_HEAD_NEEDLES = 20  # heads with fewer say too little
_BLOCK = 16  # consecutive tokens that the bootstrap draws together: losses of neighbours are alike


# ---- Loss ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """Of each scored token."""

    nll: npt.NDArray[np.float64]  # [P]
    correct: npt.NDArray[np.bool_]  # [P]: the target is the likeliest token


def score(logits: Floats, targets: npt.NDArray[np.int64]) -> Scores:
    """logits [P, vocabulary], targets [P]."""
    top = logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits - top).sum(axis=1, dtype=np.float64)) + top[:, 0]
    nll = total - logits[np.arange(len(targets)), targets]
    return Scores(np.asarray(nll, np.float64), logits.argmax(axis=1) == targets)


@dataclass(frozen=True)
class Rise:
    """A mean difference with its 95 % interval; a tie where that holds 0."""

    mean: float
    low: float
    high: float

    @property
    def tie(self) -> bool:
        """Whether the difference may be none."""
        return self.low <= 0 <= self.high


def rise(nll: npt.NDArray[np.float64], base: npt.NDArray[np.float64], seed: int, draws: int = 2000) -> Rise:
    """Of nll over base, token by token: a paired bootstrap over blocks of neighbours. No token: NaN."""
    difference = nll - base
    if len(difference) == 0:
        return Rise(float("nan"), float("nan"), float("nan"))
    blocks = np.array_split(difference, max(len(difference) // _BLOCK, 1))
    sums = np.array([block.sum() for block in blocks])
    sizes = np.array([len(block) for block in blocks])
    picks = np.random.default_rng(seed).integers(0, len(blocks), (draws, len(blocks)))
    means = sums[picks].sum(axis=1) / sizes[picks].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Rise(float(difference.mean()), float(low), float(high))


# ---- Choice ----------------------------------------------------------------------------------------------------------


@dataclass
class HeadCounts:
    """What one layer's query heads saw, summed over positions; [q_heads], and [P] over all heads for the curve."""

    needles: npt.NDArray[np.int64]
    found: npt.NDArray[np.int64]
    mass: npt.NDArray[np.float64]  # share of the attention on tokens chosen or always attended, mean over positions
    recall: npt.NDArray[np.float64]  # share of the exact best k that was chosen, mean over positions
    mass_at: npt.NDArray[np.float64]  # [P]
    recall_at: npt.NDArray[np.float64]  # [P]


def compare(
    task: Task, queries: Floats, keys: Floats, chosen: Chosen, k: int, always_from: npt.NDArray[np.int64]
) -> HeadCounts:
    """What was chosen against exact full attention of the same queries.

    queries [q_heads, P, D]: of every task.observe_every-th position behind the prompt. keys [kv_heads, T + N, D] of
    prompt and tail. always_from [P]: the position from which on a query's tokens are always attended.
    """
    heads, positions = queries.shape[:2]
    group = heads // task.kv_heads
    counts = HeadCounts(
        needles=np.zeros(heads, np.int64),
        found=np.zeros(heads, np.int64),
        mass=np.zeros(heads),
        recall=np.zeros(heads),
        mass_at=np.zeros(positions),
        recall_at=np.zeros(positions),
    )
    ids = np.arange(keys.shape[1])
    seen = ids[None] <= task.prompt_tokens + task.observe_every * np.arange(positions)[:, None]
    free = (ids[None] >= task.free_begin) & (ids[None] < always_from[:, None])
    sets = len(chosen[0])
    for head in range(task.kv_heads):
        rows = slice(head * group, (head + 1) * group)
        logits = attention.logits_of(queries[rows], keys[head : head + 1], task.scale)
        logits[:, ~seen] = -np.inf
        logits -= logits.max(axis=2, keepdims=True)
        shares = np.exp(logits, out=logits)
        shares /= shares.sum(axis=2, keepdims=True)
        taken = _mask(chosen, head * sets // task.kv_heads, sets // task.kv_heads, free)
        needles = (shares > NEEDLE_SHARE) & free
        counts.needles[rows] = needles.sum(axis=(1, 2))
        counts.found[rows] = (needles & taken).sum(axis=(1, 2))
        mass = np.where(taken | ~free, shares, 0).sum(axis=2, dtype=np.float64)
        counts.mass[rows] = mass.mean(axis=1)
        counts.mass_at += mass.mean(axis=0) / task.kv_heads
        recall = _recall(shares, taken, free, k)
        counts.recall[rows] = recall.mean()
        counts.recall_at += recall / task.kv_heads
    return counts


def _mask(chosen: Chosen, first_set: int, sets: int, free: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """[1 or group, P, T]: what the KV head's query heads were given, of the free tokens."""
    taken = np.zeros((sets, *free.shape), bool)
    for position, of_sets in enumerate(chosen):
        for set_ in range(sets):
            ids = of_sets[first_set + set_]
            taken[set_, position, ids[ids < free.shape[1]]] = True
    return taken & free


def _recall(shares: Floats, taken: npt.NDArray[np.bool_], free: npt.NDArray[np.bool_], k: int) -> Floats:
    """[P]: of the k free tokens with the highest summed share, how much was taken, by any head."""
    if k == 0:
        return np.zeros(len(free), np.float32)
    ranks = np.where(free, shares.sum(axis=0), np.float32(-1))
    border = -np.partition(-ranks, k - 1, axis=1)[:, k - 1 : k] if k < ranks.shape[1] else np.zeros((len(ranks), 1))
    wanted = (ranks >= border) & free
    return np.asarray((wanted & taken.any(axis=0)).sum(axis=1) / np.maximum(wanted.sum(axis=1), 1), np.float32)


@dataclass
class Choices:
    """HeadCounts of all layers that were compared."""

    layers: dict[int, HeadCounts] = field(default_factory=dict)

    def needle(self) -> float:
        """Share of needles that were chosen. NaN: there was none."""
        needles = sum(int(counts.needles.sum()) for counts in self.layers.values())
        found = sum(int(counts.found.sum()) for counts in self.layers.values())
        return found / needles if needles else float("nan")

    def worst_head(self) -> float:
        """The same of the worst head with at least WORST_HEAD_NEEDLES."""
        shares = [
            found / needles
            for counts in self.layers.values()
            for needles, found in zip(counts.needles.tolist(), counts.found.tolist(), strict=True)
            if needles >= WORST_HEAD_NEEDLES
        ]
        return min(shares, default=float("nan"))

    def mean(self, name: str) -> float:
        """Of "mass" or "recall", over layers and heads."""
        return (
            float(np.mean([getattr(counts, name) for counts in self.layers.values()])) if self.layers else float("nan")
        )

    def curve(self, name: str) -> npt.NDArray[np.float64]:
        """[P]: of "mass_at" or "recall_at", over layers and heads."""
        return np.asarray(np.mean([getattr(counts, name) for counts in self.layers.values()], axis=0))
