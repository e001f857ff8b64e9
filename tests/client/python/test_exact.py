# SPDX-License-Identifier: Apache-2.0
"""Answers against brute force in float64, over what the server stores, in every format. For both clients."""

from __future__ import annotations

from typing import Any

import ctkvr
import numpy as np
import pytest

from conftest import GEOMETRY, HEAD_DIM, KV_HEADS, Q_HEADS, VALUE_DIM, Tokens
from oracle import exact

FORMATS = ["f32", "f16", "bf16", "k8v8", "k8v4", "k6v4"]
GROUP = Q_HEADS // KV_HEADS


def stored(session: Any, tokens: Tokens) -> Any:
    """The decoded stored keys [tokens, kv_heads, head_dim], by way of the storage rows."""
    by_kv_head = ctkvr.Selection(reduction="sum_softmax", source="dense")
    rows = session.retrieve(0, tokens.queries[-1], row_format="storage", selection=by_kv_head).keys
    return np.stack([rows[0, head] for head in range(KV_HEADS)], axis=1)


def check_set(answer: ctkvr.Answer, position: int, set_: int, queries: Any, keys: Any, at: int) -> None:
    wanted = exact(queries, keys, at, answer.used)
    ids = answer.ids[position, set_]
    # Rounding may turn two ranks round that lie closer than this; random keys hardly ever do.
    if wanted.margin > 1e-4:
        np.testing.assert_array_equal(ids, wanted.ids)
    assert len(ids) == len(wanted.ids) == answer.counts[position, set_]
    assert answer.scores is not None
    bound = 1e-5 * np.linalg.norm(queries, axis=1).max() * np.linalg.norm(keys, axis=1).max()
    np.testing.assert_allclose(answer.scores[position, set_], wanted.scores[:, ids], rtol=0, atol=bound)


@pytest.mark.parametrize("reduction", ["sum_softmax", "max_softmax", "per_head"])
@pytest.mark.parametrize("format_", FORMATS)
def test_exact_answers_are_brute_force(client: Any, tokens: Tokens, format_: str, reduction: Any) -> None:
    selection = ctkvr.Selection(reduction=reduction, sink_tokens=3, window_tokens=5, dense_below_tokens=0)
    with client.open_session(**GEOMETRY, format=format_, source="exact", selection=selection) as session:
        session.append(0, tokens.keys, tokens.values)
        keys = stored(session, tokens)
        first = len(tokens.keys) - 3
        answer = session.retrieve(0, tokens.queries[-3:], k=40, answer="rows", row_format="f32")
        assert answer.source == "exact"
        assert (answer.used.k, answer.used.source, answer.used.reduction) == (40, "exact", reduction)
        assert answer.length == len(tokens.keys)
        assert answer.bytes_read > 0
        sets = Q_HEADS if reduction == "per_head" else KV_HEADS
        heads = Q_HEADS // sets
        assert answer.counts.shape == answer.ids.shape == (3, sets)
        for position in range(3):
            for set_ in range(sets):
                head = set_ * heads // GROUP
                queries = tokens.queries[first + position, set_ * heads : (set_ + 1) * heads]
                check_set(answer, position, set_, queries, keys[:, head], first + position)
                ids = answer.ids[position, set_]
                assert answer.keys is not None
                assert answer.values is not None
                np.testing.assert_allclose(answer.keys[position, set_], keys[ids, head], rtol=1e-5, atol=1e-5)
                assert answer.values[position, set_].shape == (len(ids), VALUE_DIM)


def test_storage_rows_may_stay_as_they_are_stored(client: Any, tokens: Tokens) -> None:
    for format_ in ("k8v8", "k8v4", "k6v4", "f32", "f16", "bf16"):
        with client.open_session(**GEOMETRY, format=format_) as session:
            session.append(0, tokens.keys, tokens.values)
            decoded = session.retrieve(0, tokens.queries[-1], k=9, row_format="storage")
            assert decoded.decoder is None
            stored = session.retrieve(0, tokens.queries[-1], k=9, row_format="storage", decode_rows=False)
            assert stored.keys.flat.shape == (int(stored.counts.sum()), stored.decoder.key_row_bytes)
            assert stored.keys.flat.dtype == stored.values.flat.dtype == np.uint8
            for kv_head in range(KV_HEADS):
                keys, values = stored.keys[0, kv_head], stored.values[0, kv_head]
                np.testing.assert_array_equal(stored.decoder.keys(keys, kv_head), decoded.keys[0, kv_head])
                np.testing.assert_array_equal(stored.decoder.values(values), decoded.values[0, kv_head])
            with session.decode(k=9, row_format="storage", decode_rows=False) as stream:
                step = stream.step(0, queries=tokens.queries[-1]).answer
                np.testing.assert_array_equal(step.keys.flat, stored.keys.flat)
            with pytest.raises(ValueError, match="needs row_format=\"storage\"; row_format is 'f32'"):
                session.retrieve(0, tokens.queries[-1], row_format="f32", decode_rows=False)


@pytest.mark.parametrize("count", [100, 700])
@pytest.mark.parametrize("format_", FORMATS)
def test_storage_rows_decode_to_the_rows_the_server_decodes(
    client: Any, tokens: Tokens, format_: str, count: int
) -> None:
    """100 tokens of a coded format are raw still, 700 are coded; per-head sets take their KV head's mean."""
    with client.open_session(**GEOMETRY, format=format_) as session:
        session.append(0, tokens.keys[:count], tokens.values[:count])
        for reduction in ("sum_softmax", "per_head"):
            settings = {"k": 30, "selection": ctkvr.Selection(reduction=reduction, dense_below_tokens=0)}
            here = session.retrieve(0, tokens.queries[0], row_format="storage", **settings)
            there = session.retrieve(0, tokens.queries[0], row_format="f32", **settings)
            assert here.code_generation == int(format_.startswith("k") and count == 700)
            assert (here.row_format, there.row_format) == ("storage", "f32")
            for ours, theirs in ((here.keys, there.keys), (here.values, there.values)):
                assert ours.flat.dtype == np.float32
                np.testing.assert_allclose(ours.flat, theirs.flat, rtol=1e-6, atol=1e-6)


def test_a_codec_is_sent_once(session: Any, client: Any, tokens: Tokens) -> None:
    with client.open_session(**GEOMETRY, format="k8v4") as coded:
        coded.append(0, tokens.keys, tokens.values)
        assert coded.core.decoders.known_generation(0) == 0
        first = coded.retrieve(0, tokens.queries[0], row_format="storage")
        assert coded.core.decoders.known_generation(0) == 1
        again = coded.retrieve(0, tokens.queries[0], row_format="storage")
        np.testing.assert_array_equal(first.keys.flat, again.keys.flat)


def test_modes_carry_what_they_say(session: Any, tokens: Tokens) -> None:
    session.append(0, tokens.keys, tokens.values)
    ids = session.retrieve(0, tokens.queries[-1], k=5, answer="ids")
    scores = session.retrieve(0, tokens.queries[-1], k=5, answer="scores")
    rows = session.retrieve(0, tokens.queries[-1], k=5)
    assert ids.scores is ids.keys is ids.values is ids.row_format is None
    assert scores.keys is scores.values is scores.row_format is None
    assert rows.row_format == "f16"
    assert rows.keys.flat.dtype == np.float16
    for answer in (scores, rows):
        np.testing.assert_array_equal(answer.ids.flat, ids.ids.flat)
        assert answer.scores[0, 0].shape == (GROUP, answer.counts[0, 0])


def test_sets_are_views_that_cannot_be_written_to(session: Any, tokens: Tokens) -> None:
    session.append(0, tokens.keys, tokens.values)
    answer = session.retrieve(0, tokens.queries[-2:], k=5)
    assert len(answer.ids) == 2 * KV_HEADS
    np.testing.assert_array_equal(np.concatenate(list(answer.ids)), answer.ids.flat)
    np.testing.assert_array_equal(answer.ids[-1, -1], answer.ids[1, KV_HEADS - 1])
    assert np.shares_memory(answer.keys[1, 1], answer.keys.flat)
    with pytest.raises(ValueError, match="read-only"):
        answer.keys[0, 0][0, 0] = 1
    with pytest.raises(IndexError, match="position is 2; there are 2"):
        answer.ids[2, 0]
    with pytest.raises(IndexError, match="set is -3; there are 2"):
        answer.ids[0, -3]


def test_what_the_caller_attends_is_left_out(session: Any, tokens: Tokens) -> None:
    session.append(0, tokens.keys, tokens.values)
    answer = session.retrieve(0, tokens.queries[-1], source="dense", local_begin=600, local_sinks=4, answer="ids")
    np.testing.assert_array_equal(answer.ids[0, 0], np.arange(4, 600))
    nothing = session.retrieve(0, tokens.queries[-1], local_begin=0)
    assert nothing.counts.tolist() == [[0, 0]]
    assert nothing.ids[0, 1].shape == (0,)
    assert nothing.scores[0, 0].shape == (GROUP, 0)


def test_an_empty_layer_answers_with_nothing(session: Any, tokens: Tokens) -> None:
    answer = session.retrieve(0, tokens.queries[0])
    assert answer.counts.tolist() == [[0, 0]]
    assert (answer.source, answer.length) == ("dense", 0)


def test_a_position_may_be_named(session: Any, tokens: Tokens) -> None:
    session.append(0, tokens.keys, tokens.values)
    answer = session.retrieve(0, tokens.queries[9:11], 9, source="dense", answer="ids")
    np.testing.assert_array_equal(answer.ids[0, 0], np.arange(10))
    np.testing.assert_array_equal(answer.ids[1, 0], np.arange(11))
    assert tokens.queries.shape[2] == HEAD_DIM
