# SPDX-License-Identifier: Apache-2.0
"""The comparison systems as selectors of the harness: one index a layer and KV head, built from the prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ctkvr_eval.attention import Floats, Part, Positions
from ctkvr_eval.selectors.base import Choice, Task, TokenSelector
from ctkvr_eval.selectors.blocks import InfLlm, Quest
from ctkvr_eval.selectors.clusters import RetroInfer, WithRemainder, cluster_keys
from ctkvr_eval.selectors.dense import ExactTopK, SlidingWindow, SnapKv
from ctkvr_eval.selectors.graphs import FaissGraph, FaissLists, RetrievalAttention
from ctkvr_eval.selectors.magicpig import MagicPig
from ctkvr_eval.selectors.parts import Chosen, Index
from ctkvr_eval.selectors.queries import QueryCentroids

STEPS_AT_ONCE = 128


@dataclass(frozen=True)
class HeadPrompt:
    """What an index of one KV head is built from."""

    keys: Floats  # [N, D] of the free tokens, [task.free_begin, task.free_end)
    values: Floats  # [N, V]
    queries: Floats  # [Q, R, D] of the prompt's last Q positions
    lag: int  # positions from the first free token to the first query; negative where queries begin earlier
    scale: float
    seed: int
    k: int


Builder = Callable[[HeadPrompt], Index]


def _magicpig_for_k(prompt: HeadPrompt) -> Index:
    sample = prompt.queries[:: max(1, len(prompt.queries) // 16)]
    tables = MagicPig.tables_for(prompt.keys, sample, prompt.k)
    return MagicPig(prompt.keys, prompt.scale, prompt.seed, tables=tables)


def _block_of(k: int) -> int:
    """The paper's 128 where the budget holds its 16 blocks; else smaller, so that several fit."""
    return max(16, min(128, k // 16))


# Each name with how its index is built; docs and papers stand at the classes.
BUILDERS: dict[str, Builder] = {
    "exact": lambda p: ExactTopK(p.keys, p.scale),
    "sliding_window": lambda p: SlidingWindow(p.keys),
    "snapkv": lambda p: SnapKv(p.keys, p.queries[-32:], p.scale),
    "quest": lambda p: Quest(p.keys, p.scale),
    "quest_each_head": lambda p: Quest(p.keys, p.scale, each_head=True),
    "infllm": lambda p: InfLlm(p.keys, p.queries, p.lag, p.scale, block=_block_of(p.k)),
    "magicpig": _magicpig_for_k,
    "magicpig_150": lambda p: MagicPig(p.keys, p.scale, p.seed),
    "retrieval_attention": lambda p: RetrievalAttention(p.keys, p.queries[-2048:], p.scale),
    "hnsw": lambda p: FaissGraph(p.keys, p.scale),
    "ivf": lambda p: FaissLists(p.keys, p.scale, p.seed),
    "retroinfer": lambda p: RetroInfer(p.keys, p.values, p.scale),
    "retroinfer_no_estimate": lambda p: RetroInfer(p.keys, p.values, p.scale, estimated=0),
    "ctkvr": lambda p: QueryCentroids(p.keys, p.queries, p.scale),
}


# What a paper's own runs set beside K: the method, and the layers that attend all.
PAPERS: dict[str, tuple[str, tuple[int, ...]]] = {
    "quest_paper": ("quest_each_head", (0, 1)),
    "magicpig_paper": ("magicpig_150", (0, 16)),
}


class ComparisonSelector(TokenSelector):
    """One of BUILDERS in every layer.

    Args:
        method: its name.
        k: tokens a KV head (a query head where the method chooses for each).
        remainder: add what was not chosen, estimated from key clusters of 16. Not for methods with an estimate of
            their own.
        dense_layers: layers that attend all, as some papers' settings have it.

    """

    def __init__(self, method: str, k: int, *, remainder: bool = False, dense_layers: tuple[int, ...] = ()) -> None:
        if method not in BUILDERS:
            raise ValueError(f"method = {method!r}: not one of {', '.join(sorted(BUILDERS))}")
        if remainder and method.startswith(("magicpig", "retroinfer")):
            raise ValueError(f"remainder: {method} estimates what it does not choose by itself")
        self.name = method + ("+remainder" if remainder else "")
        self._build = BUILDERS[method]
        self._k = k
        self._remainder = remainder
        self._dense_layers = dense_layers

    def begin(self, task: Task) -> None:
        """No indexes yet."""
        super().begin(task)
        self._indexes: dict[int, list[Index]] = {}

    def prepare(self, layer: int, keys: Floats, values: Floats, queries: Floats) -> None:
        """Builds an index for each KV head."""
        super().prepare(layer, keys, values, queries)
        if layer in self._dense_layers:
            return
        task = self.task
        group = task.q_heads // task.kv_heads
        free = slice(task.free_begin, task.free_end)
        lag = task.prompt_tokens - queries.shape[1] - task.free_begin
        built: list[Index] = []
        for head in range(task.kv_heads):
            mine = np.ascontiguousarray(queries[head * group : (head + 1) * group].transpose(1, 0, 2))
            prompt = HeadPrompt(keys[head, free], values[head, free], mine, lag, task.scale, task.seed, self._k)
            index = self._build(prompt)
            if self._remainder:
                index = WithRemainder(index, cluster_keys(prompt.keys, prompt.values), task.scale)
            built.append(index)
        self._indexes[layer] = built
        self.memory_bytes += sum(index.memory_bytes for index in built)

    def choose(self, layer: int, queries: Floats) -> Choice:
        """Asks each KV head's index."""
        positions = queries.shape[1]
        if layer in self._dense_layers:
            return self._all(layer, positions)
        group = self.task.q_heads // self.task.kv_heads
        answers: list[list[Chosen]] = []
        for head, index in enumerate(self._indexes[layer]):
            mine = np.ascontiguousarray(queries[head * group : (head + 1) * group].transpose(1, 0, 2))
            blocks = [mine[begin : begin + STEPS_AT_ONCE] for begin in range(0, positions, STEPS_AT_ONCE)]
            answers.append([index.choose(block, self._k) for block in blocks])
        return _joined(answers, self.task.free_begin)

    def _all(self, layer: int, positions: int) -> Choice:
        every = np.arange(self.task.free_begin, self.task.free_end, dtype=np.int64)
        read = 2 * self.keys[layer][:, every].size
        return Choice([[every] * self.task.kv_heads] * positions, np.full(positions, read, dtype=np.int64))

    def end(self) -> None:
        """Frees the indexes."""
        super().end()
        self._indexes.clear()


def _joined(answers: list[list[Chosen]], first: int) -> Choice:
    """Answers [KV head][block of steps] as one Choice; free tokens begin at position `first`."""
    chosen: list[list[Positions]] = []
    weights: list[list[Floats]] = []
    weighed = answers[0][0].bias is not None
    for block in zip(*answers, strict=True):
        for step in range(len(block[0].mask)):
            sets: list[Positions] = []
            logs: list[Floats] = []
            for head in block:
                if head.bias is None:
                    sets.append(np.flatnonzero(head.mask[step]) + first)
                    continue
                for bias in head.bias[step]:
                    ids = np.flatnonzero(bias > -np.inf)
                    sets.append(ids + first)
                    logs.append(bias[None, ids])
            chosen.append(sets)
            weights.append(logs)
    read = np.stack([np.concatenate([block.bytes_read for block in head]) for head in answers])
    return Choice(chosen, np.asarray(read.sum(axis=0)), weights if weighed else None, _remainder_of(answers))


def _remainder_of(answers: list[list[Chosen]]) -> Part | None:
    outputs = []
    sums = []
    for head in answers:
        rests = [block.rest for block in head if block.rest is not None]
        if len(rests) < len(head):
            return None
        outputs.append(np.concatenate([rest.output for rest in rests]).transpose(1, 0, 2))
        sums.append(np.concatenate([rest.lse for rest in rests]).T)
    return Part(np.concatenate(outputs), np.concatenate(sums))
