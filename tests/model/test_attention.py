# SPDX-License-Identifier: Apache-2.0
"""Attention with its log-sum-exp, against float64."""

from __future__ import annotations

from typing import Any

import ctkvr
import numpy as np
import pytest
import torch
from ctkvr.torch import attend, attend_rows

from models import SEED

BATCH, Q_HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 6, 3, 24, 16


def tensors(positions: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return (
        2 * torch.randn((BATCH, Q_HEADS, positions, HEAD_DIM), generator=generator),
        torch.randn((BATCH, KV_HEADS, tokens, HEAD_DIM), generator=generator),
        torch.randn((BATCH, KV_HEADS, tokens, VALUE_DIM), generator=generator),
    )


def oracle(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, softcap: float | None, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query at a time, the sums as they are defined."""
    output = torch.zeros((*query.shape[:3], value.shape[3]), dtype=torch.float64)
    total = torch.full(query.shape[:3], -torch.inf, dtype=torch.float64)
    for b, h, p in np.ndindex(*query.shape[:3]):
        seen = mask[b, p].nonzero()[:, 0]
        if not len(seen):
            continue
        head = h * key.shape[1] // query.shape[1]
        logits = scale * (key[b, head, seen].double() @ query[b, h, p].double())
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        weights = torch.exp(logits)
        total[b, h, p] = torch.log(weights.sum())
        output[b, h, p] = (weights[:, None] * value[b, head, seen].double()).sum(0) / weights.sum()
    return output, total


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("positions", "tokens"), [(1, 1), (1, 40), (5, 9), (300, 12)])
def test_attention_is_that_of_float64(positions: int, tokens: int, softcap: float | None) -> None:
    query, key, value = tensors(positions, tokens)
    mask = torch.rand((BATCH, positions, tokens), generator=torch.Generator().manual_seed(SEED)) < 0.7
    mask[0, 0] = False  # a query that sees nothing
    expected = oracle(query, key, value, 0.3, softcap, mask)
    found = attend(query, key, value, scale=0.3, softcap=softcap, mask=mask[:, None])
    torch.testing.assert_close(found[0].double(), expected[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[1].double(), expected[1], atol=1e-5, rtol=1e-4)
    assert not found[0][0, :, 0].any()


def test_without_a_mask_every_token_is_seen() -> None:
    query, key, value = tensors(3, 20)
    everything = torch.ones((BATCH, 1, 3, 20), dtype=torch.bool)
    for one, other in zip(
        attend(query, key, value, scale=0.2), attend(query, key, value, scale=0.2, mask=everything), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_a_number_that_is_none_stays_one() -> None:
    query, key, value = tensors(1, 5)
    key[0, 0, 2, 0] = torch.nan
    assert attend(query, key, value, scale=0.2)[0][0, 0].isnan().all()


def test_rows_of_an_answer_are_attended_as_the_server_does(client: ctkvr.Client) -> None:
    query, key, value = tensors(2, 200)
    sizes: dict[str, Any] = {
        "layers": 1,
        "q_heads": Q_HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "value_dim": VALUE_DIM,
    }
    selection = ctkvr.Selection(source="exact", sink_tokens=2, window_tokens=3, dense_below_tokens=0, k=20)
    with client.open_session(**sizes, dtype="float32", token_limit=512, format="f32", selection=selection) as session:
        keys, values, queries = (tensor[0].transpose(0, 1).contiguous() for tensor in (key, value, query))
        session.append(0, keys, values)
        attended = session.retrieve(0, queries, answer="attention")
        rows = session.retrieve(0, queries, row_format="f32")
        assert attended.output is not None
        assert attended.log_sum_exp is not None
        output, total = attend_rows(queries, rows, scale=HEAD_DIM**-0.5)
        np.testing.assert_allclose(output, attended.output, atol=1e-5)
        np.testing.assert_allclose(total, attended.log_sum_exp, atol=1e-5)
        with pytest.raises(ValueError, match="the answer has no rows"):
            attend_rows(queries, attended, scale=1.0)
