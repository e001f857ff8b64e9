# SPDX-License-Identifier: Apache-2.0
"""Attention in numpy, float32: over all tokens, over chosen ones, and the parts it is merged from.

Arrays are head-major: queries [q_heads, P, D], keys [kv_heads, T, D], values [kv_heads, T, V]. Query head h reads KV
head h // group, where group = q_heads // kv_heads. A logit is softmax_scale * query @ key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Attention over some of the tokens. Parts over disjoint tokens merge to attention over all of them."""

    output: Floats  # [q_heads, P, V]: values weighted by the softmax over these tokens alone; 0 where there are none
    log_sum_exp: Floats  # [q_heads, P]: of the logits; -infinity where there are none


def merge(parts: Sequence[Part]) -> Part:
    """Attention over the tokens of all parts."""
    top = np.maximum.reduce([part.log_sum_exp for part in parts])
    safe = np.where(np.isneginf(top), np.float32(0), top)
    weights = [np.exp(part.log_sum_exp - safe) for part in parts]
    total = np.asarray(sum(weights), np.float32)
    output = sum(weight[..., None] * part.output for weight, part in zip(weights, parts, strict=True))
    divisor = np.where(total > 0, total, np.float32(1))
    with np.errstate(divide="ignore"):
        return Part(np.asarray(output / divisor[..., None], np.float32), safe + np.log(total))


def attend(logits: Floats, values: Floats) -> Part:
    """logits [q_heads, P, n], -infinity where a token is left out; values [kv_heads, n, V]."""
    heads, positions, tokens = logits.shape
    if tokens == 0:
        empty = np.full((heads, positions), -np.inf, np.float32)
        return Part(np.zeros((heads, positions, values.shape[2]), np.float32), empty)
    top = logits.max(axis=2, keepdims=True)
    top = np.where(np.isneginf(top), np.float32(0), top)
    shares = np.exp(logits - top)
    total = shares.sum(axis=2, dtype=np.float32)
    output = by_kv_head(shares, len(values)) @ values
    output = output.reshape(heads, positions, -1) / np.where(total > 0, total, np.float32(1))[..., None]
    with np.errstate(divide="ignore"):
        return Part(output, top[..., 0] + np.log(total))


def by_kv_head(array: Any, kv_heads: int) -> Any:
    """[q_heads, P, ...] as [kv_heads, group * P, ...]: what one matrix product a KV head takes."""
    heads, positions = array.shape[:2]
    return array.reshape(kv_heads, heads // kv_heads * positions, *array.shape[2:])


def logits_of(queries: Floats, keys: Floats, scale: float) -> Floats:
    """[q_heads, P, T] of queries [q_heads, P, D] and keys [kv_heads, T, D]."""
    found = by_kv_head(queries * np.float32(scale), len(keys)) @ keys.transpose(0, 2, 1)
    return np.asarray(found.reshape(*queries.shape[:2], keys.shape[1]), np.float32)


def causal(logits: Floats) -> Floats:
    """Logits [q_heads, P, P] of tokens among themselves, -infinity where one lies after the query. In place."""
    after = np.triu(np.ones(logits.shape[1:], bool), 1)
    logits[:, after] = -np.inf
    return logits


def group_ranks(logits: Floats, kv_heads: int, log_sum_exp: Floats | None = None) -> Floats:
    """[kv_heads, P, T]: the sum over a group's query heads of their softmax shares, the ranking of the service.

    log_sum_exp [q_heads, P]: of all the logits that shares are of; None: of these.
    """
    heads, positions, tokens = logits.shape
    if log_sum_exp is None:
        top = logits.max(axis=2)
        log_sum_exp = top + np.log(np.exp(logits - top[..., None]).sum(axis=2, dtype=np.float32))
    shares = np.exp(logits - log_sum_exp[..., None])
    found = shares.reshape(kv_heads, heads // kv_heads, positions, tokens).sum(axis=1, dtype=np.float32)
    return np.asarray(found, np.float32)


def best(ranks: Floats, k: int) -> Positions:
    """[..., min(k, T)]: positions of the k highest of ranks [..., T], ascending. Equal ranks: any of them."""
    tokens = ranks.shape[-1]
    if k >= tokens:
        return np.broadcast_to(np.arange(tokens), ranks.shape).astype(np.int64)
    chosen = np.argpartition(-ranks, k - 1, axis=-1)[..., :k]
    return np.sort(chosen, axis=-1).astype(np.int64)
