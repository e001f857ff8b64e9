# SPDX-License-Identifier: Apache-2.0
"""Attention in torch that tells its log-sum-exp, so that it merges with what a server answers. Needs ctkvr[torch]."""

from __future__ import annotations

from typing import Any

import torch

from ctkvr.answer import Answer
from ctkvr.arrays import to_torch

__all__ = ["attend", "attend_rows"]

# Logits are held for so many query positions at a time.
_BLOCK_POSITIONS = 256


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the given tokens alone: (output [batch, q_heads, positions, value_dim], log_sum_exp without V).

    query [batch, q_heads, positions, head_dim]; key [batch, kv_heads, tokens, head_dim] and value, query head h reading
    KV head h / (q_heads / kv_heads). mask, bool, True where a query sees a token: broadcast to [batch, 1, positions,
    tokens]. Logits are scale * q.k, then softcap * tanh(logit / softcap). All in float32. Zeros and -infinity where a
    query sees nothing.
    """
    batch, q_heads, positions, _ = query.shape
    if positions > _BLOCK_POSITIONS:
        parts = []
        for begin in range(0, positions, _BLOCK_POSITIONS):
            block = slice(begin, begin + _BLOCK_POSITIONS)
            seen = mask if mask is None or mask.shape[-2] == 1 else mask[..., block, :]
            parts.append(attend(query[:, :, block], key, value, scale=scale, softcap=softcap, mask=seen))
        return torch.cat([part[0] for part in parts], dim=2), torch.cat([part[1] for part in parts], dim=2)
    kv_heads, tokens = key.shape[1], key.shape[2]
    grouped = query.float().reshape(batch, kv_heads, -1, query.shape[-1])  # [.., group * positions, head_dim]
    logits = torch.matmul(grouped, key.float().transpose(2, 3)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.reshape(batch, q_heads, positions, tokens)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    log_sum_exp = torch.logsumexp(logits, dim=-1)
    # Where a query sees nothing, -infinity less itself would not be a number.
    finite = log_sum_exp.masked_fill(log_sum_exp == float("-inf"), 0.0)
    weights = torch.exp(logits - finite.unsqueeze(-1)).reshape(batch, kv_heads, -1, tokens)
    output = torch.matmul(weights, value.float()).reshape(batch, q_heads, positions, value.shape[-1])
    return output, log_sum_exp


def attend_rows(
    query: torch.Tensor, answer: Answer, *, scale: float, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the rows of an answer: (output [positions, q_heads, value_dim], log_sum_exp), on query's device.

    query [positions, q_heads, head_dim], those that the answer is to. ValueError: the answer has no rows.
    """
    if answer.keys is None or answer.values is None:
        raise ValueError('the answer has no rows; ask with answer="rows"')
    positions, sets = answer.counts.shape
    group = query.shape[1] // sets
    outputs: list[Any] = []
    sums: list[Any] = []
    for position in range(positions):
        for set_ in range(sets):
            heads = query[position, set_ * group : (set_ + 1) * group]
            rows = (part[position, set_] for part in (answer.keys, answer.values))
            key, value = (to_torch(array, share=True).to(query.device) for array in rows)  # only read
            output, log_sum_exp = attend(
                heads[None, :, None], key[None, None], value[None, None], scale=scale, softcap=softcap
            )
            outputs.append(output[0, :, 0])
            sums.append(log_sum_exp[0, :, 0])
    shape = (positions, query.shape[1])
    return torch.stack(outputs).reshape(*shape, -1), torch.stack(sums).reshape(shape)
