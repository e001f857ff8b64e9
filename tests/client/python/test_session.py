# SPDX-License-Identifier: Apache-2.0
"""Clients and sessions against the real server: what they open, tell, append, cut and close. For both clients."""

from __future__ import annotations

from typing import Any

import ctkvr
import ml_dtypes
import numpy as np
import pytest
from ctkvr import errors
from ctkvr.v1 import session_pb2

from conftest import GEOMETRY, HEAD_DIM, KV_HEADS, LAYERS, Q_HEADS, VALUE_DIM, Tokens
from proxy import Proxy
from server import Server
from twins import Connect


def fill(session: Any, tokens: Tokens, layer: int = 0) -> ctkvr.AppendResult:
    result: ctkvr.AppendResult = session.append(layer, tokens.keys, tokens.values)
    return result


def all_rows(session: Any, tokens: Tokens, layer: int = 0, **settings: Any) -> ctkvr.Answer:
    """Every token the layer holds."""
    query = tokens.queries[:1]
    answer: ctkvr.Answer = session.retrieve(layer, query, source="dense", row_format="f32", **settings)
    return answer


def test_the_server_tells_of_itself(client: Any) -> None:
    info = client.server_info()
    assert info.backend == "cpu"
    assert info.limits.append_tokens_max > 0
    assert info.header.boot_id != 0


def test_a_session_is_what_was_asked_for(client: Any) -> None:
    options = session_pb2.SessionOptions(first_planes=1)
    options.softmax.logit_softcap = 30
    options.layer_overrides.add(layers=[1], head_dim=64, value_dim=0, kv_heads=4)
    with client.open_session(
        **GEOMETRY,
        format="k6v4",
        k=17,
        source="sketch",
        selection=ctkvr.Selection(window_tokens=3, reduction="max_softmax"),
        centroids=8,
        list_tokens=16,
        maintenance="manual",
        lease_seconds=60,
        fingerprint=b"model",
        rotation_seed=9,
        options=options,
        session_id="asked",
    ) as session:
        assert session.id == "asked"
        assert session.epoch != 0
        assert session.boot_id == client.server_info().header.boot_id
        resolved = session.options
        assert resolved.format == 6
        assert (resolved.selection.k_tokens, resolved.selection.source) == (17, session_pb2.SOURCE_SKETCH)
        assert (resolved.selection.window_tokens, resolved.selection.reduction) == (3, 2)
        assert (resolved.query_centroids[0].centroids, resolved.query_centroids[0].list_tokens) == (8, 16)
        assert resolved.maintenance == session_pb2.MAINTENANCE_MANUAL
        assert (resolved.lease_seconds, resolved.rotation_seed, resolved.first_planes) == (60, 9, 1)
        assert resolved.softmax.logit_softcap == 30
        assert session.shape(0) == ctkvr.LayerShape(Q_HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, "float32")
        assert session.shape(1).kv_heads == 4
        assert session.shape(1).head_dim == 64
        assert session.keep_alive() > 30
        with pytest.raises(IndexError, match="layer is 2; the session has 2"):
            session.shape(2)


def test_an_absent_layer_is_told_from_others(client: Any, tokens: Tokens) -> None:
    options = session_pb2.SessionOptions()
    options.layer_overrides.add(layers=[1], absent=True)
    with client.open_session(**GEOMETRY, options=options) as session:
        assert session.shape(1).absent
        with pytest.raises(errors.OutOfRange):
            fill(session, tokens, layer=1)


def test_tags_go_with_their_tokens_into_messages_of_any_size(connect: Connect, address: str, tokens: Tokens) -> None:
    options = session_pb2.SessionOptions(tags=True)
    options.policies.class_quotas.add(token_class=7, tokens=2)
    classes = np.arange(len(tokens.keys)) % 200
    with (
        connect(address, append_bytes=10000) as client,
        client.open_session(**GEOMETRY, options=options) as session,
    ):
        assert session.options.policies.class_quotas[0].tokens == 2
        tags = ctkvr.Tags(weights=classes / 2, classes=classes)
        session.append(0, tokens.keys, tokens.values, tags=tags)
        assert session.append(0, tokens.keys, tokens.values, first_position=0, tags=tags).repeated_chunks > 0
        with pytest.raises(errors.DifferentBytes, match="weight"):
            session.append(0, tokens.keys, tokens.values, first_position=0, tags=ctkvr.Tags(classes=classes))
        with pytest.raises(ValueError, match="classes has dims"):
            session.append(0, tokens.keys, tokens.values, tags=ctkvr.Tags(classes=classes[:-1]))


def test_the_end_of_a_with_closes_the_session(client: Any, tokens: Tokens) -> None:
    with client.open_session(**GEOMETRY) as session:
        fill(session, tokens)
        names = [entry.session_id for entry in client.list_sessions()]
        assert session.id in names
    assert session.id not in [entry.session_id for entry in client.list_sessions()]
    with pytest.raises(errors.SessionLost, match="SESSION_CLOSED"):
        session.info()
    # A session that is closed or lost already ends a block in peace.
    with client.open_session(**GEOMETRY) as session:
        assert session.close() > 0
    with client.open_session(**GEOMETRY) as session, client.attach_session(session.id) as other:
        other.close()


def test_the_error_of_a_block_is_not_hidden_by_its_end(connect: Connect) -> None:
    with Server() as server, connect(server.address, retry=ctkvr.RetryOptions(attempts_max=1)) as client:
        with pytest.raises(ZeroDivisionError), client.open_session(**GEOMETRY):
            server.kill()
            raise ZeroDivisionError
        with pytest.raises(errors.Unavailable):
            client.server_info()


def test_attach_finds_a_session_with_what_it_holds(client: Any, session: Any, tokens: Tokens) -> None:
    fill(session, tokens)
    again = client.attach_session(session.id, epoch=session.epoch)
    assert (again.epoch, again.boot_id) == (session.epoch, session.boot_id)
    assert fill(again, tokens).length == 2 * len(tokens.keys)


def test_sessions_are_listed_page_by_page(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctkvr.calls._LIST_PAGE_SIZE", 2)
    small = {**GEOMETRY, "token_limit": 64}
    opened = [client.open_session(**small, session_id=f"page-{number}") for number in range(5)]
    names = [entry.session_id for entry in client.list_sessions()]
    assert [name for name in names if name.startswith("page-")] == [f"page-{number}" for number in range(5)]
    for session in opened:
        session.close()


def test_info_maintain_and_truncate_move_what_they_say(client: Any, tokens: Tokens) -> None:
    selection = ctkvr.Selection(k=8, source="query_centroids", dense_below_tokens=0)
    with client.open_session(
        **GEOMETRY, selection=selection, centroids=4, list_tokens=64, maintenance="manual"
    ) as session:
        for layer in range(LAYERS):
            session.append(layer, tokens.keys, tokens.values, tokens.queries[-16:])
        info = session.info()
        assert [layer.length for layer in info.layers] == [len(tokens.keys)] * LAYERS
        assert info.memory.held_bytes > 0
        indexed = session.maintain([0])
        assert indexed[0] > 0
        assert indexed[1] == 0
        assert session.maintain()[1] > 0
        answer = session.retrieve(0, tokens.queries[-1])
        assert answer.source == "query_centroids"
        assert answer.indexed_length == indexed[0]
        assert session.truncate(500) == [200] * LAYERS
        assert session.append(0, tokens.keys[:1], tokens.values[:1]).length == 501
        assert session.info().layers[1].length == 500
        assert session.append(1, tokens.keys[:2], tokens.values[:2]).length == 502


# ---- Append ----------------------------------------------------------------------------------------------------------


def test_appends_follow_one_another(session: Any, tokens: Tokens) -> None:
    first = fill(session, tokens)
    assert (first.length, first.chunks, first.repeated_chunks, first.resumed) == (700, 1, 0, 0)
    assert session.append(1, tokens.keys[0], tokens.values[0]).length == 1  # one token without its axis
    assert session.append(0, tokens.keys[:5], tokens.values[:5]).length == 705
    repeated = session.append(0, tokens.keys, tokens.values, first_position=0)
    assert (repeated.length, repeated.repeated_chunks) == (705, 1)
    rows = all_rows(session, tokens)
    wanted = np.concatenate((tokens.keys, tokens.keys[:5]))
    for head in range(KV_HEADS):
        np.testing.assert_array_equal(rows.ids[0, head], np.arange(705))
        np.testing.assert_array_equal(rows.keys[0, head], wanted[:, head])  # type: ignore[index]


def test_a_long_prompt_is_streamed_in_chunks(connect: Connect, address: str, tokens: Tokens) -> None:
    seen: list[tuple[int, int]] = []
    row_bytes = tokens.keys[0].nbytes + tokens.values[0].nbytes + tokens.queries[0].nbytes
    with (
        connect(address, append_bytes=64 * row_bytes) as client,
        client.open_session(**GEOMETRY, format="f32", source="query_centroids", centroids=8, list_tokens=8) as session,
    ):
        result = session.append(
            0,
            tokens.keys,
            tokens.values,
            tokens.queries[-300:],
            progress=lambda done, total: seen.append((done, total)),
        )
        assert (result.length, result.chunks, result.repeated_chunks) == (700, 11, 0)
        assert seen == [(min(64 * n, 700), 700) for n in range(1, 12)]
        again = session.append(0, tokens.keys, tokens.values, tokens.queries[-300:], first_position=0)
        assert (again.chunks, again.repeated_chunks) == (11, 11)
        rows = all_rows(session, tokens)
        assert rows.keys is not None
        assert rows.values is not None
        for head in range(KV_HEADS):
            np.testing.assert_array_equal(rows.keys[0, head], tokens.keys[:, head])
            np.testing.assert_array_equal(rows.values[0, head], tokens.values[:, head])


def test_a_progress_bar_is_shown(session: Any, tokens: Tokens, capsys: pytest.CaptureFixture[str]) -> None:
    session.append(0, tokens.keys, tokens.values, progress=True)
    assert "append" in capsys.readouterr().out


@pytest.mark.parametrize("cuts", [1, 3])
def test_a_stream_that_breaks_is_resumed(connect: Connect, server: Server, tokens: Tokens, cuts: int) -> None:
    """Each connection carries about 5 chunks of 25 before it is cut."""
    keys, values = np.concatenate([tokens.keys] * 4), np.concatenate([tokens.values] * 4)
    chunk_bytes = 112 * (keys[0].nbytes + values[0].nbytes)
    retry = ctkvr.RetryOptions(attempts_max=8)
    with (
        Proxy(server.address, cut_after_bytes=5 * chunk_bytes, cuts=cuts) as proxy,
        connect(proxy.address, append_bytes=chunk_bytes, retry=retry) as client,
        client.open_session(**GEOMETRY, format="f32") as session,
    ):
        result = session.append(0, keys, values)
        assert proxy.cuts_done == cuts
        assert result.length == len(keys)
        assert result.resumed >= 1
        rows = all_rows(session, tokens)
        assert rows.keys is not None
        for head in range(KV_HEADS):
            np.testing.assert_array_equal(rows.keys[0, head], keys[:, head])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_elements_travel_as_they_are(client: Any, tokens: Tokens, dtype: str) -> None:
    kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    keys, values, queries = (array.astype(kind) for array in (tokens.keys, tokens.values, tokens.queries))
    row_format = "f16" if dtype == "float16" else "bf16"
    with client.open_session(**{**GEOMETRY, "dtype": dtype}, format=row_format) as session:
        session.append(0, keys, values)
        answer = session.retrieve(0, queries[-1], source="dense", row_format=row_format)
        assert answer.row_format == row_format
        for head in range(KV_HEADS):
            found = answer.keys[0, head]
            assert found.dtype == (np.float16 if dtype == "float16" else np.uint16)
            np.testing.assert_array_equal(found.view(np.uint16), keys[:, head].view(np.uint16))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda t: (t.keys[:, :1], t.values, None), ValueError, r"keys has dims \[700, 1, 32\]; \[n, 2, 32\]"),
        (lambda t: (t.keys, t.values[:, :, :8], None), ValueError, r"values has dims \[700, 2, 8\]; \[n, 2, 16\]"),
        (lambda t: (t.keys, t.values[1:], None), ValueError, "values has 699 tokens; keys has 700"),
        (lambda t: (t.keys[:0], t.values[:0], None), ValueError, "keys has no token"),
        (lambda t: (t.keys[:2], t.values[:2], t.queries), ValueError, "queries has 700 positions; keys has 2 tokens"),
        (lambda t: (t.keys, t.values, t.queries[:, :1]), ValueError, r"queries has dims \[700, 1, 32\]"),
        (
            lambda t: (t.keys.astype(np.float64), t.values, None),
            TypeError,
            "keys is float64; the session takes float32",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused_before_anything_is_sent(
    session: Any, tokens: Tokens, change: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        session.append(0, *change(tokens))
    assert session.info().layers[0].length == 0
    assert session.append(0, tokens.keys, tokens.values).length == len(tokens.keys)


def test_names_that_are_none_are_refused(client: Any, session: Any, tokens: Tokens) -> None:
    with pytest.raises(ValueError, match="dtype is 'float64'; it is one of float32, float16, bfloat16"):
        client.open_session(**{**GEOMETRY, "dtype": "float64"})
    with pytest.raises(ValueError, match="format is 'k5v5'; it is one of f32, f16, bf16, k8v8, k8v4, k6v4"):
        client.open_session(**GEOMETRY, format="k5v5")
    for name, known in (("source", "exact"), ("row_format", "storage"), ("answer", "rows")):
        with pytest.raises(ValueError, match=rf"{name} is 'none'; it is one of .*{known}"):
            session.retrieve(0, tokens.queries[0], **{name: "none"})
    with pytest.raises(ValueError, match="queries has no position"):
        session.retrieve(0, tokens.queries[:0])


def test_unix_sockets_and_a_second_client(connect: Connect, tmp_path: Any) -> None:
    address = f"unix:{tmp_path}/socket"
    with (
        Server(address=address),
        connect(address) as one,
        connect(address) as other,
        one.open_session(**GEOMETRY) as session,
    ):
        assert other.attach_session(session.id).epoch == session.epoch
