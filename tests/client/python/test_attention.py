# SPDX-License-Identifier: Apache-2.0
"""Answers that attend on the server, against attention in float64 over the stored rows; and how parts merge."""

from __future__ import annotations

import sys
import types
from typing import Any

import ctkvr
import numpy as np
import pytest
from ctkvr import codec, errors
from ctkvr.rows import LayerShape
from ctkvr.v1 import cache_pb2, tensor_pb2

from conftest import GEOMETRY, HEAD_DIM, KV_HEADS, Q_HEADS, VALUE_DIM, Tokens

GROUP = Q_HEADS // KV_HEADS
OUTPUTS = ["f32", "f16", "bf16"]
# What rounding of the output to its format may move it by, relative.
ROUNDING = {"f32": 1e-5, "f16": 1e-3, "bf16": 8e-3, None: 1e-5}


def attend(queries: Any, keys: Any, values: Any, chosen: Any) -> tuple[Any, Any]:
    """In float64, queries [q_heads, head_dim] over chosen[kv_head] of keys and values [tokens, kv_heads, ...]."""
    output = np.zeros((Q_HEADS, VALUE_DIM))
    log_sum_exp = np.full(Q_HEADS, -np.inf)
    for head in range(Q_HEADS):
        ids = chosen[head // GROUP]
        if len(ids) == 0:
            continue
        logits = keys[ids, head // GROUP].astype(np.float64) @ queries[head] / np.sqrt(HEAD_DIM)
        log_sum_exp[head] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
        output[head] = np.exp(logits - log_sum_exp[head]) @ values[ids, head // GROUP]
    return output, log_sum_exp


def stored(session: Any, tokens: Tokens) -> tuple[Any, Any]:
    """The decoded stored keys and values [tokens, kv_heads, ...]."""
    rows = session.retrieve(0, tokens.queries[-1], source="dense", row_format="f32")
    keys, values = ([part[0, head] for head in range(KV_HEADS)] for part in (rows.keys, rows.values))
    return np.stack(keys, axis=1), np.stack(values, axis=1)


@pytest.mark.parametrize("row_format", [None, *OUTPUTS])
@pytest.mark.parametrize("format_", ["f32", "k8v4"])
def test_attention_is_that_over_the_chosen_tokens(client: Any, tokens: Tokens, format_: str, row_format: Any) -> None:
    selection = ctkvr.Selection(sink_tokens=2, window_tokens=3, dense_below_tokens=0)
    with client.open_session(**GEOMETRY, format=format_, source="exact", selection=selection) as session:
        session.append(0, tokens.keys, tokens.values)
        keys, values = stored(session, tokens)
        ids = session.retrieve(0, tokens.queries[-3:], k=30, answer="ids").ids
        answer = session.retrieve(0, tokens.queries[-3:], k=30, answer="attention", row_format=row_format)
        assert answer.output.dtype == answer.log_sum_exp.dtype == np.float32
        assert answer.output.shape == (3, Q_HEADS, VALUE_DIM)
        assert answer.scores is answer.keys is answer.values is answer.remainder_output is None
        assert answer.counts[0, 0] == 35
        assert answer.ids[0, 0].shape == (0,)
        for position in range(3):
            chosen = [ids[position, head] for head in range(KV_HEADS)]
            output, log_sum_exp = attend(tokens.queries[position - 3], keys, values, chosen)
            bound = ROUNDING[row_format] * np.abs(values).max()
            np.testing.assert_allclose(answer.output[position], output, rtol=0, atol=bound)
            np.testing.assert_allclose(answer.log_sum_exp[position], log_sum_exp, rtol=1e-5, atol=1e-5)


def test_rows_and_remainder_of_few_distinct_tokens_are_full_attention(client: Any, rng: Any) -> None:
    """Clusters of equal tokens have nothing to estimate: their means are the tokens."""
    kinds = Tokens(rng, 8)
    which = rng.integers(0, 8, 1024)
    keys, values = kinds.keys[which] * 4, kinds.values[which]
    selection = ctkvr.Selection(sink_tokens=0, window_tokens=0, dense_below_tokens=0)
    with client.open_session(**GEOMETRY, format="f32", tokens_per_cluster=16, selection=selection) as session:
        session.append(0, keys, values)
        session.maintain()
        answer = session.retrieve(0, kinds.queries[0], k=20, answer="attention", remainder=True, local_begin=1000)
        everything = [np.arange(1000)] * KV_HEADS
        output, log_sum_exp = attend(kinds.queries[0], keys, values, everything)
        parts = [(answer.output, answer.log_sum_exp), (answer.remainder_output, answer.remainder_log_sum_exp)]
        merged = ctkvr.merge_attention(parts)
        # Means are kept in 8 bits.
        np.testing.assert_allclose(merged[0][0], output, rtol=0, atol=0.05)
        np.testing.assert_allclose(merged[1][0], log_sum_exp, rtol=0, atol=0.1)
        assert np.abs(answer.output[0] - output).max() > 0.2  # the remainder was needed


def test_nothing_left_is_an_empty_remainder(client: Any, tokens: Tokens) -> None:
    with client.open_session(**GEOMETRY, format="f32", tokens_per_cluster=16) as session:
        session.append(0, tokens.keys, tokens.values)
        session.maintain()
        for mode in ("ids", "scores", "rows", "attention"):
            answer = session.retrieve(0, tokens.queries[-1], source="dense", answer=mode, remainder=True)
            assert np.all(np.isneginf(answer.remainder_log_sum_exp))
            assert not answer.remainder_output.any()
            assert (answer.output is not None) == (mode == "attention")


def test_a_decode_step_attends(client: Any, tokens: Tokens) -> None:
    with client.open_session(**GEOMETRY, format="f32", tokens_per_cluster=16) as session:
        session.append(0, tokens.keys[:-1], tokens.values[:-1])
        session.maintain()
        with session.decode(k=9, answer="attention", remainder=True) as stream:
            answer = stream.step(0, tokens.keys[-1], tokens.values[-1], tokens.queries[-1]).answer
        again = session.retrieve(0, tokens.queries[-1], k=9, answer="attention", remainder=True)
        np.testing.assert_array_equal(answer.output, again.output)
        np.testing.assert_array_equal(answer.remainder_output, again.remainder_output)


def test_a_remainder_needs_clusters(session: Any, tokens: Tokens) -> None:
    session.append(0, tokens.keys, tokens.values)
    with pytest.raises(errors.InvalidRequest, match="key clusters"):
        session.retrieve(0, tokens.queries[-1], k=5, remainder=True)


def test_an_output_of_other_dims_is_no_answer() -> None:
    shape = LayerShape(Q_HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, "float32")
    message = cache_pb2.Answer(counts=[1] * KV_HEADS)
    message.output.CopyFrom(tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_F32, dims=[1, Q_HEADS, VALUE_DIM + 1]))
    with pytest.raises(errors.ProtocolError, match=r"answer\.output has dims"):
        codec.decode_answer(message, (b"", b""), codec.Place(0, shape, codec.Decoders()))


def test_parts_merge_to_the_whole(rng: Any, tokens: Tokens) -> None:
    """Split at random into three, one of them empty; with sinks in the denominator."""
    cut = int(rng.integers(1, 699))
    spans = [np.arange(cut), np.arange(cut, 700), np.arange(0)]
    parts = [attend(tokens.queries[0], tokens.keys, tokens.values, [span] * KV_HEADS) for span in spans]
    parts[2] = (np.full((Q_HEADS, VALUE_DIM), np.nan), parts[2][1])  # what an empty part says is not read
    whole = attend(tokens.queries[0], tokens.keys, tokens.values, [np.arange(700)] * KV_HEADS)
    output, log_sum_exp = ctkvr.merge_attention(parts)
    np.testing.assert_allclose(output, whole[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(log_sum_exp, whole[1], rtol=1e-6)
    sinks = rng.standard_normal(Q_HEADS) + 5
    output, log_sum_exp = ctkvr.merge_attention(parts, sinks)
    shrunk = np.exp(whole[1]) / (np.exp(whole[1]) + np.exp(sinks))
    np.testing.assert_allclose(output, whole[0] * shrunk[:, None], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(log_sum_exp, np.log(np.exp(whole[1]) + np.exp(sinks)), rtol=1e-6)


def test_parts_that_cannot_be_merged() -> None:
    part = np.zeros((2, 4, 8)), np.zeros((2, 4))
    empty = part[0], np.full((2, 4), -np.inf)
    output, log_sum_exp = ctkvr.merge_attention([empty, empty])
    assert not output.any()
    assert np.all(np.isneginf(log_sum_exp))
    with pytest.raises(ValueError, match="parts is empty"):
        ctkvr.merge_attention([])
    with pytest.raises(ValueError, match=r"parts\[1\] has an output of dims \[2, 4, 7\]"):
        ctkvr.merge_attention([part, (np.zeros((2, 4, 7)), part[1])])
    with pytest.raises(ValueError, match=r"sink_logits has dims \[3\]; \[4\] is expected"):
        ctkvr.merge_attention([part], np.zeros(3))
    for wrong in (np.nan, np.inf):
        with pytest.raises(ValueError, match=r"parts\[0\] has a NaN"):
            ctkvr.merge_attention([(part[0], np.full((2, 4), wrong))])


class Tensor(np.ndarray[Any, Any]):
    """A stand-in for torch's."""


def test_torch_tensors_merge_as_torch_does_it(monkeypatch: pytest.MonkeyPatch, rng: Any) -> None:
    """With as much of torch as merge_attention may use; a part that is no tensor becomes one."""
    torch = types.ModuleType("torch")
    for name in ("any", "exp", "float32", "isinf", "isnan", "log", "maximum", "ones_like", "where", "zeros_like"):
        setattr(torch, name, getattr(np, name))
    torch.Tensor = Tensor  # type: ignore[attr-defined]

    def as_tensor(array: Any, dtype: Any, device: str) -> Any:
        assert device == "cpu"
        return np.asarray(array, dtype).view(Tensor)

    torch.as_tensor = as_tensor  # type: ignore[attr-defined]
    parts = [(rng.standard_normal((2, 4, 8)), rng.standard_normal((2, 4))) for _ in range(2)]
    sinks = rng.standard_normal(4)
    wanted = ctkvr.merge_attention(parts, sinks)
    monkeypatch.setitem(sys.modules, "torch", torch)
    own = (as_tensor(parts[0][0], np.float32, "cpu"), as_tensor(parts[0][1], np.float32, "cpu"))
    for found, right in zip(ctkvr.merge_attention([own, parts[1]], sinks), wanted, strict=True):
        assert isinstance(found, Tensor)
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)
    assert not isinstance(ctkvr.merge_attention(parts)[0], Tensor)
