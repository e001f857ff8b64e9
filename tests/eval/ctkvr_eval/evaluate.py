# SPDX-License-Identifier: Apache-2.0
"""One method on one text: what every layer's attention becomes, and what comes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from ctkvr_eval import attention
from ctkvr_eval.attention import Floats
from ctkvr_eval.capture import Capture, LanguageModel, LayerTail
from ctkvr_eval.metrics import Choices, Scores, compare, score
from ctkvr_eval.selectors.base import Attended, Selector, Task, tail_part
from ctkvr_eval.texts import Text


@dataclass
class Outcome:
    """What one run gave."""

    scores: Scores
    choices: Choices = field(default_factory=Choices)
    bytes_read: float = 0.0  # a step: of all layers and heads together
    bytes_scan: float = 0.0  # the same, had every key been read in 16 bits
    build_seconds: float = 0.0
    memory_bytes: int = 0
    layer_seconds: list[float] = field(default_factory=list)  # of a layer's P positions


class Full:
    """Full attention over the captured keys and values: what the others are measured against."""

    name = "full"
    memory_bytes = 0

    def begin(self, task: Task) -> None:
        """See Selector."""
        self._task = task
        self._held: dict[int, tuple[Floats, Floats]] = {}

    def prepare(self, layer: int, keys: Floats, values: Floats, queries: Floats) -> None:
        """See Selector."""
        self._held[layer] = keys, values
        self.memory_bytes += 2 * (keys.size + values.size)

    def attend(self, layer: int, queries: Floats, keys_new: Floats, values_new: Floats) -> Attended:
        """See Selector."""
        keys, values = self._held[layer]
        parts = [tail_part(self._task, queries, keys_new, values_new)]
        parts.append(attention.attend(attention.logits_of(queries, keys, self._task.scale), values))
        read = np.full(queries.shape[1], 2 * keys.size, np.int64)
        return Attended(attention.merge(parts).output, read)

    def end(self) -> None:
        """See Selector."""
        self._held.clear()


def make_task(capture: Capture, seed: int, observe_every: int = 1) -> Task:
    """What the capture says of model and prompt."""
    shape = capture.shape
    return Task(
        layers=shape.layers,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        prompt_tokens=len(capture.prompt),
        scale=shape.scale,
        seed=seed,
        observe_every=observe_every,
    )


def evaluate(model: LanguageModel, capture: Capture, text: Text, selector: Selector, task: Task, k: int) -> Outcome:
    """The scored tail with every full layer's attention answered by `selector`. k: what recall is taken of."""
    run = _Run(capture, selector, task, k)
    try:
        selector.begin(task)
        run.prepare()
        logits = model.tail_logits(capture, text.tail[:-1], run.attend)
    finally:
        selector.end()
    run.outcome.scores = score(logits, np.array(text.tail[1:]))
    return run.outcome


class _Run:
    def __init__(self, capture: Capture, selector: Selector, task: Task, k: int) -> None:
        self._capture = capture
        self._selector = selector
        self._task = task
        self._k = k
        self.outcome = Outcome(Scores(np.empty(0), np.empty(0, bool)))

    def prepare(self) -> None:
        start = time.perf_counter()
        for layer, window in enumerate(self._capture.shape.windows):
            if not window:
                self._selector.prepare(layer, *(getattr(self._capture, name)[layer] for name in _PROMPT))
        self.outcome.build_seconds = time.perf_counter() - start
        self.outcome.memory_bytes = self._selector.memory_bytes

    def attend(self, tail: LayerTail) -> Floats:
        start = time.perf_counter()
        attended = self._selector.attend(tail.layer, tail.queries, tail.keys, tail.values)
        seconds = time.perf_counter() - start
        self.outcome.layer_seconds.append(seconds if attended.seconds is None else attended.seconds)
        self.outcome.bytes_read += float(attended.bytes_read.mean())
        self.outcome.bytes_scan += 2.0 * self._capture.keys[tail.layer].size
        every = self._task.observe_every
        if every and attended.chosen is not None:
            keys = np.concatenate((self._capture.keys[tail.layer], tail.keys), axis=1)
            always = attended.always_from
            if always is None:
                always = np.full(tail.queries.shape[1], self._task.free_end)
            found = compare(self._task, tail.queries[:, ::every], keys, attended.chosen, self._k, always[::every])
            self.outcome.choices.layers[tail.layer] = found
        return attended.output


_PROMPT = ("keys", "values", "queries")
