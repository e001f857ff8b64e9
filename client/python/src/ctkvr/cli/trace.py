# SPDX-License-Identifier: Apache-2.0
"""Traces on disk: what `ctkvrd --record` writes of a session's layer, and exact attention over it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RecordedAnswer:
    """What a session was answered at one position."""

    k_tokens: int
    sink_tokens: int
    window_tokens: int
    chosen: list[npt.NDArray[np.int64]]  # [sets]: cache positions


@dataclass(frozen=True)
class Trace:
    """One layer. Query head h reads KV head h // group."""

    name: str
    queries: Floats  # [q_heads, positions, head_dim], from first_position on
    keys: Floats  # [kv_heads, tokens, head_dim]
    first_position: int
    prompt_tokens: int  # decoded from there on
    scale: float
    answers: dict[int, RecordedAnswer]  # by position; empty: the trace was not recorded by a server

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return len(self.queries) // len(self.keys)

    def decoded(self, every: int) -> list[int]:
        """The positions to look at: those answered, or without answers those decoded."""
        end = self.first_position + self.queries.shape[1]
        found = sorted(self.answers) or range(max(self.prompt_tokens, self.first_position), end)
        return [position for position in found if self.first_position <= position < end][::every]

    def shares(self, position: int) -> npt.NDArray[np.float64]:
        """[q_heads, position + 1]: the exact attention of the query at `position`, over what it sees."""
        queries = self.queries[:, position - self.first_position].astype(np.float64)
        keys = self.keys[:, : position + 1].astype(np.float64)
        grouped = queries.reshape(len(keys), self.group, -1)
        logits = np.einsum("grd,gtd->grt", grouped, keys).reshape(len(queries), -1) * self.scale
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        found: npt.NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
        return found


def read_trace(folder: Path, layer: int | None) -> Trace:
    """The trace of a layer: `folder`, or in it layerNN. ValueError: none, or several and `layer` is None."""
    if not (folder / "meta.json").exists():
        layers = sorted(path.parent for path in folder.glob("layer*/meta.json"))
        if layer is not None:
            layers = [path for path in layers if int(path.name.removeprefix("layer")) == layer]
        if len(layers) != 1:
            raise ValueError(
                f"{folder} holds {len(layers)} traces{'' if layer is None else f' of layer {layer}'}: --layer"
            )
        folder = layers[0]
    meta = json.loads((folder / "meta.json").read_text())
    queries, keys = (np.load(folder / f"{name}.npy").astype(np.float32) for name in ("q", "k"))
    if queries.ndim != 3 or keys.ndim != 3 or len(queries) % len(keys):
        raise ValueError(f"{folder}: q.npy has dims {list(queries.shape)} and k.npy {list(keys.shape)}")
    answers = folder / "answers.jsonl"
    return Trace(
        name=f"{meta.get('session_id') or meta.get('text') or folder.name}, layer {meta['layer']}",
        queries=queries,
        keys=keys,
        first_position=meta["query_first_position"],
        prompt_tokens=meta["prompt_tokens"],
        scale=meta["scale"],
        answers=dict(_answer(json.loads(line)) for line in answers.open()) if answers.exists() else {},
    )


def _answer(line: dict[str, Any]) -> tuple[int, RecordedAnswer]:
    used = line["used"]
    return line["position"], RecordedAnswer(
        k_tokens=used["k_tokens"],
        sink_tokens=used["sink_tokens"],
        window_tokens=used["window_tokens"],
        chosen=[np.array(ids, np.int64) for ids in line["chosen"]],
    )
