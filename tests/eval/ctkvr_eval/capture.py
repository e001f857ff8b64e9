# SPDX-License-Identifier: Apache-2.0
"""What is kept of a prompt, and what a model is to the harness. model.py has the one of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ctkvr_eval.attention import Floats


@dataclass(frozen=True)
class LayerTail:
    """What a layer's attention gets of the tail: [heads, P, dim], after RoPE."""

    layer: int
    queries: Floats
    keys: Floats
    values: Floats


Attend = Callable[[LayerTail], Floats]  # returns [q_heads, P, V]


@dataclass(frozen=True)
class Shape:
    """Of the attention of a model. Query head h reads KV head h // (q_heads // kv_heads)."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    windows: list[int]  # [layers]: tokens a query sees, its own included; 0: all


@dataclass(frozen=True)
class Capture:
    """A prompt's attention, as files mapped into memory."""

    folder: Path
    shape: Shape
    prompt: list[int]  # token ids
    keys: npt.NDArray[np.float32]  # [layers, kv_heads, T, D] after RoPE
    values: npt.NDArray[np.float32]  # [layers, kv_heads, T, V]
    queries: npt.NDArray[np.float32]  # [layers, q_heads, Q, D] of the last Q positions


class LanguageModel(Protocol):
    """A causal language model whose attention can be captured and replaced."""

    name: str

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the characters [begin, end) of each."""

    def capture(self, prompt: list[int]) -> Capture:
        """Runs the prompt, or finds it among those that were run before."""

    def tail_logits(self, capture: Capture, tail: list[int], attend: Attend) -> npt.NDArray[np.float32]:
        """[P, vocabulary]: logits behind each of P tail tokens, every full layer's attention answered by `attend`."""
