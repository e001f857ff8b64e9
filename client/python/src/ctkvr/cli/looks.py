# SPDX-License-Identifier: Apache-2.0
"""What heads look at: tokens chosen at each decoded position, and the attention on each; of a trace or a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import ctkvr
from ctkvr.cli.trace import Trace

_POSITIONS_A_CALL = 32


@dataclass(frozen=True)
class Looks:
    """Of one layer."""

    name: str
    what: str  # the shares' meaning
    positions: list[int]  # decoded
    ids: list[list[npt.NDArray[np.int64]]]  # [positions][q_heads]: cache positions
    shares: list[list[npt.NDArray[np.float64]]]  # [positions][q_heads]: of the head's attention, as ids


def looks_of_trace(trace: Trace, every: int) -> Looks:
    """The chosen tokens where the trace has answers, else all of them; with their share of the exact attention."""
    positions = trace.decoded(every)
    looks = Looks(trace.name, "attention" if not trace.answers else "attention on chosen tokens", positions, [], [])
    for position in positions:
        exact = trace.shares(position)
        ids: list[npt.NDArray[np.int64]] = [np.arange(position + 1)] * len(exact)
        if trace.answers:
            chosen = trace.answers[position].chosen
            ids = [chosen[head * len(chosen) // len(exact)] for head in range(len(exact))]
        looks.ids.append(ids)
        looks.shares.append([shares[own] for shares, own in zip(exact, ids, strict=True)])
    return looks


def looks_of_session(session: ctkvr.Session, layer: int, path: Path, every: int) -> Looks:
    """What the session chooses for the queries in a .npy file, as its own settings have it.

    The file is [positions, q_heads, head_dim] of the last tokens that the layer holds, in the session's dtype; bfloat16
    as bits in uint16. Shares are of the softmax over the chosen tokens.
    """
    queries = np.load(path)
    shape = session.shape(layer)
    if queries.ndim != 3:
        raise ValueError(
            f"{path} has dims {list(queries.shape)}; [positions, {shape.q_heads}, {shape.head_dim}] is expected"
        )
    info = session.info()
    first = info.layers[layer].length - len(queries)
    if first < 0:
        raise ValueError(f"{path} has {len(queries)} positions; layer {layer} holds {info.layers[layer].length}")
    softmax = info.layers[layer].softmax
    scale = softmax.softmax_scale if softmax.HasField("softmax_scale") else shape.head_dim**-0.5
    wanted = list(range(first, first + len(queries)))[::every]
    step = _POSITIONS_A_CALL if every == 1 else 1
    looks = Looks(f"{session.id}, layer {layer}", "attention among chosen tokens", wanted, [], [])
    for begin in range(0, len(wanted), step):
        part = queries[[position - first for position in wanted[begin : begin + step]]]
        answer = session.retrieve(layer, part, wanted[begin], answer="scores")
        for place in range(len(part)):
            own_ids, own_shares = _of_position(answer, place, shape.q_heads, scale)
            looks.ids.append(own_ids)
            looks.shares.append(own_shares)
    return looks


def _of_position(
    answer: ctkvr.Answer, place: int, q_heads: int, scale: float
) -> tuple[list[npt.NDArray[np.int64]], list[npt.NDArray[np.float64]]]:
    """ids and shares of each query head at one position of an answer."""
    assert answer.scores is not None  # noqa: S101 (asked for)
    ids: list[npt.NDArray[np.int64]] = []
    shares: list[npt.NDArray[np.float64]] = []
    for set_ in range(answer.counts.shape[1]):
        logits = answer.scores[place, set_].astype(np.float64) * scale
        weights = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        for row in weights:
            ids.append(answer.ids[place, set_].astype(np.int64))
            shares.append(row / row.sum())
    if len(ids) != q_heads:
        raise ValueError(f"the answer has {len(ids)} query heads; the layer has {q_heads}")
    return ids, shares
