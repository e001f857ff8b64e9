# SPDX-License-Identifier: Apache-2.0
"""Every error that can be brought about, against the real server: its class, reason and metadata. For both clients."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import ctkvr
import numpy as np
import pytest
from ctkvr import errors
from ctkvr.channel import METHODS
from ctkvr.client import Client
from ctkvr.codec import Chunk, make_chunk
from ctkvr.v1 import cache_pb2, session_pb2

from conftest import GEOMETRY, Tokens
from proxy import Proxy
from server import Server
from twins import Connect

ONCE = ctkvr.RetryOptions(attempts_max=1)


def expect(kind: type[errors.CtkvrError], reason: str, call: Callable[[], object]) -> errors.CtkvrError:
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    assert raised.value.reason == reason
    assert raised.value.hint in str(raised.value)
    return raised.value


def test_positions(session: Any, tokens: Tokens) -> None:
    session.append(0, tokens.keys[:9], tokens.values[:9])
    for first_position in (10, 8):  # a gap, and a chunk that straddles the end
        error = expect(
            errors.WrongPosition,
            "WRONG_POSITION",
            lambda at=first_position: session.append(0, tokens.keys[:3], tokens.values[:3], first_position=at),  # type: ignore[misc]
        )
        assert isinstance(error, errors.WrongPosition)
        assert error.expected_position == 9
        assert error.metadata == {"expected_position": "9"}
    assert session.append(0, tokens.keys[9:], tokens.values[9:]).length == len(tokens.keys)
    expect(
        errors.DifferentBytes,
        "DIFFERENT_BYTES",
        lambda: session.append(0, tokens.keys[1:4], tokens.values[1:4], first_position=0),
    )
    expect(errors.ShorterLayer, "SHORTER_LAYER", lambda: session.truncate(1))  # layer 1 is empty


def test_the_token_limit(client: Any, tokens: Tokens) -> None:
    with client.open_session(**{**GEOMETRY, "token_limit": 10}) as session:
        session.append(0, tokens.keys[:10], tokens.values[:10])
        error = expect(errors.TokenLimit, "TOKEN_LIMIT", lambda: session.append(0, tokens.keys[:1], tokens.values[:1]))
        assert error.metadata == {"token_limit": "10"}


def test_a_checksum_that_differs(session: Any, tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Chunk, "checksum", lambda _: 12345)
        expect(errors.ChecksumMismatch, "", lambda: session.append(0, tokens.keys, tokens.values))
    assert session.append(0, tokens.keys, tokens.values).length == len(tokens.keys)


def test_requests_that_are_wrong_whatever_the_state(client: Any, session: Any, tokens: Tokens) -> None:
    error = expect(errors.InvalidRequest, "", lambda: client.open_session(**{**GEOMETRY, "head_dim": 12}))
    assert "head_dim is 12" in error.message
    session.append(0, tokens.keys, tokens.values)
    expect(errors.InvalidRequest, "", lambda: session.retrieve(0, tokens.queries[:65]))
    expect(errors.InvalidRequest, "", lambda: session.append(0, np.full_like(tokens.keys, np.nan), tokens.values))
    expect(errors.InvalidRequest, "", lambda: session.retrieve(0, tokens.queries[0], k=0))


def test_what_is_not_served(client: Any) -> None:
    options = session_pb2.SessionOptions(admission=session_pb2.ADMISSION_GROW)
    expect(errors.NotServed, "", lambda: client.open_session(**GEOMETRY, options=options))


def test_rows_that_do_not_fit(session: Any, tokens: Tokens) -> None:
    session.append(0, tokens.keys * 1e6, tokens.values)
    ask = tokens.queries[0]
    expect(errors.RowOverflow, "ROW_OVERFLOW", lambda: session.retrieve(0, ask, row_format="f16"))
    assert session.retrieve(0, ask, row_format="bf16").keys.flat.dtype == np.uint16


def test_queries_before_the_index(client: Any, tokens: Tokens) -> None:
    selection = ctkvr.Selection(k=8, source="query_centroids", dense_below_tokens=0)
    with client.open_session(
        **GEOMETRY, selection=selection, centroids=4, list_tokens=64, maintenance="manual"
    ) as session:
        session.append(0, tokens.keys, tokens.values, tokens.queries[-8:])
        (indexed, _) = session.maintain([0])
        error = expect(errors.BeforeIndex, "BEFORE_INDEX", lambda: session.retrieve(0, tokens.queries[0], indexed - 2))
        assert error.metadata == {"indexed_length": str(indexed)}
        assert session.retrieve(0, tokens.queries[0], indexed - 2, source="exact").source == "exact"


def test_ids_epochs_and_fingerprints(client: Any) -> None:
    small = {**GEOMETRY, "token_limit": 64}
    with client.open_session(**small, session_id="taken", fingerprint=b"one") as session:
        expect(errors.SessionExists, "", lambda: client.open_session(**small, session_id="taken"))
        error = expect(
            errors.SessionLost, "EPOCH_MISMATCH", lambda: client.attach_session("taken", epoch=session.epoch + 1)
        )
        assert error.metadata == {"epoch": str(session.epoch)}
        expect(
            errors.FingerprintMismatch,
            "FINGERPRINT_MISMATCH",
            lambda: client.attach_session("taken", fingerprint=b"two"),
        )
        assert client.attach_session("taken", fingerprint=b"one").epoch == session.epoch
        old = client.attach_session("taken")
    expect(errors.SessionLost, "SESSION_CLOSED", old.info)
    with client.open_session(**small, session_id="taken") as newer:
        assert newer.epoch != old.epoch
        # A session of the same name is not taken for the old one.
        expect(errors.SessionLost, "EPOCH_MISMATCH", old.info)
    expect(errors.SessionLost, "SESSION_UNKNOWN", lambda: client.attach_session("never"))
    expect(errors.SessionLost, "SESSION_CLOSED", newer.close)


def test_a_lease_that_ran_out(client: Any) -> None:
    session = client.open_session(**{**GEOMETRY, "token_limit": 64}, lease_seconds=1)
    while session.id in [entry.session_id for entry in client.list_sessions()]:
        pass  # listing names no session, so it renews nothing
    expect(errors.SessionLost, "LEASE_EXPIRED", session.keep_alive)


def test_no_room(connect: Connect) -> None:
    with Server("--sessions_max=1") as server, connect(server.address, retry=ONCE) as client:
        huge = {**GEOMETRY, "token_limit": 4_000_000}
        error = expect(errors.NoRoom, "ARENA_FULL", lambda: client.open_session(**huge))
        assert error.code == "RESOURCE_EXHAUSTED"
        assert error.retry_after == 1.0
        with client.open_session(**GEOMETRY):
            error = expect(errors.NoRoom, "SESSION_LIMIT", lambda: client.open_session(**GEOMETRY))
            assert error.retry_after == 1.0


def test_messages_over_their_limit(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with client.open_session(**{**GEOMETRY, "head_dim": 256, "kv_heads": 4, "token_limit": 64}) as session:
        connection = session.core.connection
        monkeypatch.setattr(connection, "append_bytes", 1 << 30)
        monkeypatch.setattr(connection, "info", cache_pb2.GetServerInfoReply())  # limits unknown
        keys, values = np.zeros((17000, 4, 256), np.float32), np.zeros((17000, 4, 16), np.float32)
        expect(errors.TooLarge, "", lambda: session.append(0, keys, values))


def test_time_outs(connect: Connect, server: Server, tokens: Tokens) -> None:
    with Proxy(server.address) as proxy, connect(proxy.address, timeout=0.1, append_bytes=1 << 16) as client:
        session = client.open_session(**{**GEOMETRY, "token_limit": 64}, timeout=30)
        proxy.stall()
        assert expect(errors.DeadlineExceeded, "", session.keep_alive).attempts == 1
        expect(errors.DeadlineExceeded, "", lambda: session.append(0, tokens.keys[:1], tokens.values[:1]))
        expect(errors.DeadlineExceeded, "", lambda: session.append(0, tokens.keys, tokens.values, timeout=0.1))


def test_nobody_answers(connect: Connect, tmp_path: Any) -> None:
    error = expect(errors.Unavailable, "", lambda: connect(f"unix:{tmp_path}/nobody", retry=ONCE))
    assert error.code == "UNAVAILABLE"


def test_a_server_that_drains(connect: Connect, tokens: Tokens) -> None:
    """An unfinished AppendStream holds the server up, so that what it says while it drains can be heard."""
    with Server() as server, ctkvr.connect(server.address) as holder, connect(server.address, retry=ONCE) as client:
        session = client.open_session(**GEOMETRY)
        requests: queue.SimpleQueue[cache_pb2.AppendRequest | None] = queue.SimpleQueue()
        worker = threading.Thread(target=hold_open, args=(holder, requests))
        worker.start()
        requests.put(first_append(session, tokens))
        while session.info().layers[0].length == 0:
            pass
        stream = session.decode()
        server.drain()
        server.await_event("draining")
        with pytest.raises(errors.Draining) as raised:
            while True:  # the line is logged a moment earlier
                client.open_session(**{**GEOMETRY, "token_limit": 64}).close()
        assert raised.value.reason == "DRAINING"
        with pytest.raises(errors.Unavailable):
            while True:  # what the server had read when it began to drain, it answers
                stream.step(1, tokens.keys[:1], tokens.values[:1])
        requests.put(None)
        worker.join()
        assert server.stop() == 0


def hold_open(client: Client, requests: queue.SimpleQueue[cache_pb2.AppendRequest | None]) -> None:
    method = METHODS["AppendStream"]
    client.runner.channel.upload(method, iter(requests.get, None), None)


def first_append(session: Any, tokens: Tokens) -> cache_pb2.AppendRequest:
    chunk = make_chunk(session.shape(0), 0, tokens.keys, tokens.values)
    return cache_pb2.AppendRequest(session=session.core.ref, chunk=chunk.encode(0))


# ---- Restarts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda s, t: s.append(0, t.keys, t.values),
        lambda s, t: s.append(0, np.concatenate([t.keys] * 5), np.concatenate([t.values] * 5)),
        lambda s, t: s.retrieve(0, t.queries[0]),
        lambda s, t: s.truncate(0),
        lambda s, t: s.maintain(),
        lambda s, t: s.info(),
        lambda s, t: s.keep_alive(),
        lambda s, t: s.close(),
    ],
    ids=["append", "append_stream", "retrieve", "truncate", "maintain", "info", "keep_alive", "close"],
)
def test_a_server_that_was_killed_and_restarted_is_told_apart(connect: Connect, tokens: Tokens, call: Any) -> None:
    first = Server()
    patient = ctkvr.RetryOptions(attempts_max=50, backoff_initial=0.02, backoff_max=0.1)
    with connect(first.address, retry=patient, append_bytes=1 << 18) as client:
        session = client.open_session(**GEOMETRY, session_id="survivor")
        session.append(0, tokens.keys, tokens.values)
        first.kill()
        with Server(address=first.address) as second:
            assert second.address == first.address
            assert client.server_info().header.boot_id != session.boot_id
            # Even under the old name, what is there now is another session.
            with client.open_session(**GEOMETRY, session_id="survivor") as newer:
                error = expect(errors.SessionLost, "SERVER_RESTARTED", lambda: call(session, tokens))
                assert error.metadata["expected_boot_id"] == str(session.boot_id)
                assert newer.append(0, tokens.keys, tokens.values).length == len(tokens.keys)


def test_a_decode_stream_breaks_with_its_server(connect: Connect, tokens: Tokens) -> None:
    server = Server()
    with connect(server.address, retry=ONCE) as client:
        session = client.open_session(**GEOMETRY)
        stream = session.decode()
        assert stream.step(0, tokens.keys[0], tokens.values[0]).length == 1
        server.kill()
        with pytest.raises(errors.Unavailable):
            stream.step(0, tokens.keys[1], tokens.values[1])
        expect(errors.Unavailable, "", session.info)
