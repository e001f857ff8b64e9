# SPDX-License-Identifier: Apache-2.0
"""A language model of random weights in numpy: as small as can be, with everything that the harness asks of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ctkvr_eval import attention
from ctkvr_eval.attention import Floats
from ctkvr_eval.capture import Attend, Capture, LayerTail, Shape

LAYERS, Q_HEADS, DIM, VOCABULARY = 2, 4, 32, 64
WIDTH = Q_HEADS * DIM


class Toy:
    """Characters are its tokens. Layers add their attention to what comes in; there is nothing else."""

    name = "toy"

    def __init__(self, folder: Path, seed: int, kv_heads: int = 2) -> None:
        rng = np.random.default_rng(seed)
        self._folder = folder
        self.kv_heads = kv_heads

        def weights(*dims: int) -> Floats:
            return np.asarray(rng.standard_normal(dims) / np.sqrt(dims[0]), np.float32)

        self._embedding = weights(VOCABULARY, WIDTH) * np.float32(8)
        self._place = weights(4096, WIDTH) * np.float32(8)  # keys of like tokens must not tie
        self._query = [weights(WIDTH, Q_HEADS * DIM) * np.float32(2) for _ in range(LAYERS)]
        self._key = [weights(WIDTH, kv_heads * DIM) * np.float32(2) for _ in range(LAYERS)]
        self._value = [weights(WIDTH, kv_heads * DIM) for _ in range(LAYERS)]
        self._out = weights(WIDTH, VOCABULARY)

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """See LanguageModel."""
        return [ord(letter) % VOCABULARY for letter in text], [(at, at + 1) for at in range(len(text))]

    def capture(self, prompt: list[int]) -> Capture:
        """See LanguageModel."""
        held: list[LayerTail] = []

        def full(tail: LayerTail) -> Floats:
            held.append(tail)
            logits = attention.causal(attention.logits_of(tail.queries, tail.keys, DIM**-0.5))
            return attention.attend(logits, tail.values).output

        self.forward(prompt, 0, full)
        shape = Shape(LAYERS, Q_HEADS, self.kv_heads, DIM, DIM, DIM**-0.5, [0] * LAYERS)
        arrays = (np.stack([getattr(tail, name) for tail in held]) for name in ("keys", "values", "queries"))
        return Capture(self._folder, shape, prompt, *arrays)

    def tail_logits(self, capture: Capture, tail: list[int], attend: Attend) -> npt.NDArray[np.float32]:
        """See LanguageModel."""
        return self.forward(tail, len(capture.prompt), attend)

    def forward(self, tokens: list[int], first_position: int, attend: Attend) -> npt.NDArray[np.float32]:
        """Logits behind each token, every layer's attention answered by `attend`."""
        x = self._embedding[tokens] + self._place[first_position : first_position + len(tokens)]

        def heads(weights: Any) -> Floats:
            normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True))
            return np.ascontiguousarray((normed @ weights).reshape(len(x), -1, DIM).transpose(1, 0, 2))

        for layer in range(LAYERS):
            found = attend(LayerTail(layer, *map(heads, (w[layer] for w in (self._query, self._key, self._value)))))
            x = x + found.transpose(1, 0, 2).reshape(len(x), -1)
        return np.asarray(x @ self._out, np.float32)
