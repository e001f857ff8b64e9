# SPDX-License-Identifier: Apache-2.0
"""What the right answer of source "exact" is: brute force in float64, from the comments of the contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Wanted:
    """One set's right answer, or one of them where tokens tie at the border."""

    ids: npt.NDArray[np.int64]
    scores: Floats  # [R, tokens] of all tokens seen
    margin: float  # between the last rank chosen and the first left out, in natural logs; infinite: none left out


def ranks_of(scores: Floats, scale: float, reduction: str) -> Floats:
    """[tokens]: log of the sum, or the largest, of the heads' shares."""
    logits = scores * scale
    logits -= logits.max(axis=1, keepdims=True)
    shares = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    found: Floats = shares.max(axis=0) if reduction == "max_softmax" else np.log(np.exp(shares).sum(axis=0))
    return found


def exact(queries: Any, keys: Any, position: int, used: Any) -> Wanted:
    """queries [R, D] and keys [tokens, D] of one set, settings as `used`; a query sees positions up to its own."""
    seen = min(position + 1, len(keys))
    scores = queries.astype(np.float64) @ keys[:seen].astype(np.float64).T
    ranks = ranks_of(scores, 1 / np.sqrt(keys.shape[1]), used.reduction)
    forced = np.zeros(seen, bool)
    forced[: used.sink_tokens] = True
    forced[max(seen - used.window_tokens, 0) :] = True
    free = np.flatnonzero(~forced)
    order = free[np.argsort(-ranks[free], kind="stable")]
    chosen, left = order[: used.k], order[used.k :]
    margin = float(ranks[chosen[-1]] - ranks[left[0]]) if len(chosen) and len(left) else np.inf
    return Wanted(np.sort(np.concatenate((np.flatnonzero(forced), chosen))), scores, margin)
