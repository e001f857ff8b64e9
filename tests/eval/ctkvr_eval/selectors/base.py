# SPDX-License-Identifier: Apache-2.0
"""What a selector is. Derive from TokenSelector and write `choose`; everything else is done here, for all alike.

The harness runs the prompt once, hands each layer's keys and values to `prepare`, and then evaluates the scored tail in
blocks: `attend` answers for the queries of P consecutive positions after the prompt. A query sees the prompt and the
tail up to its own position. The first `sinks` tokens, the prompt's last `window` tokens and the tail are always
attended; a selector chooses among the rest of the prompt, [sinks, T - window).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ctkvr_eval import attention
from ctkvr_eval.attention import Floats, Part, Positions

# Positions of a query's chosen tokens, ascending and without repeats: chosen[p][set]. A set is a KV head, or a query
# head where a selector chooses for each by itself.
Chosen = Sequence[Sequence[Positions]]


@dataclass(frozen=True)
class Task:
    """The model and text that a selector works on."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    prompt_tokens: int
    scale: float  # of a logit
    sinks: int = 4
    window: int = 64
    seed: int = 1
    # Attended.chosen is wanted for the first of so many positions, and for none between; 0: for none at all.
    observe_every: int = 1

    @property
    def free_begin(self) -> int:
        """First position that a selector may choose."""
        return min(self.sinks, self.prompt_tokens)

    @property
    def free_end(self) -> int:
        """Behind the last one."""
        return max(self.prompt_tokens - self.window, self.free_begin)


@dataclass(frozen=True)
class Attended:
    """A layer's answer to P positions."""

    output: Floats  # [q_heads, P, V]
    # [P]: bytes of keys and of whatever stands for them that were read, all heads together: to choose, and to attend to
    # keys that were chosen without being read. Values are not counted: they follow from how many tokens are chosen.
    bytes_read: npt.NDArray[np.int64]
    # Of every Task.observe_every-th position, with or without the always-attended; None: not asked for, or not known.
    chosen: Chosen | None = None
    # [P]: the position from which on a query's tokens were always attended; None: Task.free_end, for all.
    always_from: npt.NDArray[np.int64] | None = None
    seconds: float | None = None  # what the answer took, where the harness's clock would say something else


class Selector(Protocol):
    """One method with its settings. Not thread-safe; used for one task at a time, begun anew for each."""

    name: str
    memory_bytes: int  # of keys, values and index held for the prompt, as the method would hold them

    def begin(self, task: Task) -> None:
        """Forgets what was there."""

    def prepare(self, layer: int, keys: Floats, values: Floats, queries: Floats) -> None:
        """Takes the prompt in: keys [kv_heads, T, D] after RoPE, values [kv_heads, T, V], queries [q_heads, Q, D].

        The queries are those of the prompt's last Q positions. Timed: this is the build time.
        """

    def attend(self, layer: int, queries: Floats, keys_new: Floats, values_new: Floats) -> Attended:
        """Answers queries [q_heads, P, D] of the next P positions.

        keys_new, values_new [kv_heads, N, ...]: the whole tail so far; its last P tokens are those of these queries.
        """

    def end(self) -> None:
        """Frees what it holds. Called also after an error."""


@dataclass(frozen=True)
class Choice:
    """What TokenSelector.choose returns."""

    chosen: Chosen
    bytes_read: npt.NDArray[np.int64]  # [P]
    # [p][set] -> [heads of the set, n]: added to the logits of chosen tokens, for methods that weigh samples.
    log_weights: Sequence[Sequence[Floats]] | None = None
    remainder: Part | None = None  # what stands for the free tokens that were not chosen


class TokenSelector(abc.ABC):
    """A selector that chooses tokens of the prompt. Exact attention over them, the always-attended and the tail."""

    name: str
    memory_bytes: int = 0

    def begin(self, task: Task) -> None:
        """Override to take settings over, and call this too."""
        self.task = task
        self.keys: dict[int, Floats] = {}
        self.values: dict[int, Floats] = {}
        self.memory_bytes = 0

    def prepare(self, layer: int, keys: Floats, values: Floats, queries: Floats) -> None:
        """Override to build an index, and call this too: it keeps the arrays, counted as held in 16 bits."""
        self.keys[layer] = keys
        self.values[layer] = values
        self.memory_bytes += 2 * (keys.size + values.size)

    @abc.abstractmethod
    def choose(self, layer: int, queries: Floats) -> Choice:
        """For queries [q_heads, P, D]: positions in [task.free_begin, task.free_end) of self.keys[layer]."""

    def attend(self, layer: int, queries: Floats, keys_new: Floats, values_new: Floats) -> Attended:
        """`choose`, and exact attention."""
        choice = self.choose(layer, queries)
        parts = [
            attend_chosen(self.task, queries, self.keys[layer], self.values[layer], choice),
            always_part(self.task, queries, self.keys[layer], self.values[layer]),
            tail_part(self.task, queries, keys_new, values_new),
        ]
        if choice.remainder is not None:
            parts.append(choice.remainder)
        every = self.task.observe_every
        chosen = [choice.chosen[position] for position in range(0, queries.shape[1], every)] if every else None
        return Attended(attention.merge(parts).output, choice.bytes_read, chosen)

    def end(self) -> None:
        """Override to free an index, and call this too."""
        self.keys.clear()
        self.values.clear()


def tail_part(task: Task, queries: Floats, keys_new: Floats, values_new: Floats) -> Part:
    """Attention of the last P positions of the tail over the tail up to each: arguments as Selector.attend's."""
    positions = queries.shape[1]
    logits = attention.logits_of(queries, keys_new, task.scale)
    attention.causal(logits[:, :, keys_new.shape[1] - positions :])
    return attention.attend(logits, values_new)


def always_part(task: Task, queries: Floats, keys: Floats, values: Floats) -> Part:
    """Attention over sinks and window of the prompt."""
    always = np.concatenate((np.arange(task.free_begin), np.arange(task.free_end, task.prompt_tokens)))
    return attention.attend(attention.logits_of(queries, keys[:, always], task.scale), values[:, always])


def attend_chosen(task: Task, queries: Floats, keys: Floats, values: Floats, choice: Choice) -> Part:
    """Attention over chosen tokens, always-attended ones among them left out."""
    positions = queries.shape[1]
    sets = len(choice.chosen[0])
    heads = task.q_heads // sets
    output = np.zeros((task.q_heads, positions, task.value_dim), np.float32)
    log_sum_exp = np.full((task.q_heads, positions), -np.inf, np.float32)
    scaled = queries * np.float32(task.scale)
    for p in range(positions):
        for set_ in range(sets):
            ids = choice.chosen[p][set_]
            free = (ids >= task.free_begin) & (ids < task.free_end)
            if not free.any():
                continue
            ids = ids[free]
            rows = slice(set_ * heads, (set_ + 1) * heads)
            kv_head = set_ * task.kv_heads // sets
            logits = scaled[rows, p] @ keys[kv_head, ids].T
            if choice.log_weights is not None:
                logits = logits + choice.log_weights[p][set_][:, free]
            top = logits.max(axis=1, keepdims=True)
            shares = np.exp(logits - top)
            total = shares.sum(axis=1)
            output[rows, p] = shares @ values[kv_head, ids] / total[:, None]
            log_sum_exp[rows, p] = top[:, 0] + np.log(total)
    return Part(output, log_sum_exp)
