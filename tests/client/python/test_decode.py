# SPDX-License-Identifier: Apache-2.0
"""Decode streams: steps in flight, their order, their errors, and how they end. For both clients."""

from __future__ import annotations

from typing import Any

import ctkvr
import numpy as np
import pytest
from ctkvr import Step, errors

from conftest import GEOMETRY, KV_HEADS, LAYERS, Tokens
from proxy import Proxy
from server import Server
from twins import Connect


def step_of(tokens: Tokens, number: int, layer: int = 0, **more: Any) -> Step:
    one = slice(number, number + 1)
    return Step(layer, tokens.keys[one], tokens.values[one], tokens.queries[number], **more)


def test_a_step_appends_and_asks(session: Any, tokens: Tokens) -> None:
    session.append(0, tokens.keys[:600], tokens.values[:600])
    with session.decode(k=20, row_format="f32") as stream:
        for number in range(600, 640):
            result = stream.step(0, tokens.keys[number], tokens.values[number], tokens.queries[number])
            assert (result.layer, result.length, result.repeated, result.error) == (0, number + 1, False, None)
            # The same question, by a call of its own, finds the same.
            wanted = session.retrieve(0, tokens.queries[number], number, k=20, row_format="f32")
            np.testing.assert_array_equal(result.answer.ids.flat, wanted.ids.flat)
            np.testing.assert_array_equal(result.answer.keys.flat, wanted.keys.flat)
            assert result.answer.ids[0, 0][-1] == number
    with pytest.raises(errors.Cancelled, match="closed on this side"):
        stream.step(0, tokens.keys[0], tokens.values[0])
    stream.close()  # once more does no harm
    assert session.append(0, tokens.keys[:1], tokens.values[:1]).length == 641


def test_a_step_leaves_positions_to_the_caller(session: Any, tokens: Tokens) -> None:
    session.append(0, tokens.keys[:600], tokens.values[:600])
    with session.decode(source="dense", answer="ids") as stream:
        stream.send([step_of(tokens, 600, local_begin=590)])
        stream.send([step_of(tokens, 601)])  # and the next one does not
        (left,), (whole,) = stream.receive(), stream.receive()
    assert left.answer.ids[0, 0].tolist() == list(range(590))
    assert whole.answer.ids[0, 0].tolist() == list(range(602))


def test_many_steps_are_in_flight_and_come_back_in_order(session: Any, tokens: Tokens) -> None:
    with session.decode(k=4, answer="ids") as stream:
        for number in range(20):
            for layer in range(LAYERS):
                stream.send(step_of(tokens, number, layer))
        assert stream.in_flight == 20 * LAYERS
        # A look at the session does not disturb the count of what is on its way.
        session.info()
        stream.send(step_of(tokens, 20))
        assert len(stream.unanswered) == 20 * LAYERS + 1
        for number in range(20):
            for layer in range(LAYERS):
                (result,) = stream.receive()
                assert (result.layer, result.length) == (layer, number + 1)
                assert result.answer.ids[0, 1][-1] == number
        assert stream.receive()[0].length == 21
        assert stream.in_flight == 0


def test_steps_may_only_append_or_only_ask(session: Any, tokens: Tokens) -> None:
    with session.decode(k=4) as stream:
        appended = stream.step(0, tokens.keys[:8], tokens.values[:8])
        assert appended.length == 8
        with pytest.raises(ValueError, match="the step had no queries"):
            _ = appended.answer
        asked = stream.step(0, queries=tokens.queries[:2])
        assert asked.length == 8
        assert asked.answer.counts.shape == (2, KV_HEADS)
        assert asked.answer.ids[0, 0][-1] == 6
        assert asked.answer.ids[1, 0][-1] == 7


def test_a_message_carries_steps_of_several_sessions(client: Any, tokens: Tokens) -> None:
    small = {**GEOMETRY, "token_limit": 256}
    sessions = [client.open_session(**small, format=format_) for format_ in ("f32", "k8v4", "f16")]
    with client.decode(k=4, row_format="storage") as stream:
        for number in range(3):
            stream.send([step_of(tokens, number, session=session) for session in sessions])
        for number in range(3):
            results = stream.receive()
            assert [result.length for result in results] == [number + 1] * 3
            for result in results:
                np.testing.assert_allclose(result.answer.keys[0, 0][-1], tokens.keys[number, 0], rtol=0, atol=2e-3)
        with pytest.raises(ValueError, match="the step names no session"):
            stream.send(step_of(tokens, 3))
    for session in sessions:
        session.close()


def test_one_failing_step_leaves_the_others_alone(client: Any, session: Any, tokens: Tokens) -> None:
    with client.open_session(**{**GEOMETRY, "token_limit": 2}) as short:
        with client.decode(answer="ids") as stream:
            for number in range(4):
                stream.send([step_of(tokens, number, session=short), step_of(tokens, number, session=session)])
            results = [stream.receive() for _ in range(4)]
        # What the later steps had counted on did not come true: the server is asked for the position.
        with pytest.raises(errors.TokenLimit):
            short.append(0, tokens.keys[:1], tokens.values[:1])
    assert [pair[1].length for pair in results] == [1, 2, 3, 4]
    assert [pair[0].error is None for pair in results] == [True, True, False, False]
    with pytest.raises(errors.TokenLimit):
        _ = results[2][0].answer
    assert isinstance(results[3][0].error, errors.WrongPosition)


def test_queries_go_into_an_index_of_queries(client: Any, tokens: Tokens) -> None:
    selection = ctkvr.Selection(k=8, source="query_centroids", dense_below_tokens=0)
    with client.open_session(
        **GEOMETRY, selection=selection, centroids=4, list_tokens=64, maintenance="manual"
    ) as session:
        session.append(0, tokens.keys, tokens.values)
        with session.decode(k=8) as stream:
            for number in range(8):
                assert stream.step(0, *(a[number] for a in (tokens.keys, tokens.values, tokens.queries))).error is None
        assert session.maintain([0])[0] > 0
        assert session.info().layers[0].query_centroids == 4


def test_what_cannot_be_sent_is_refused_and_sends_nothing(session: Any, tokens: Tokens) -> None:
    with session.decode(in_flight_max=2, answer="ids") as stream:
        with pytest.raises(ValueError, match="at least one step"):
            stream.send([])
        with pytest.raises(ValueError, match="neither keys and values nor queries"):
            stream.send(Step(0))
        with pytest.raises(ValueError, match="keys has dims"):
            stream.send([step_of(tokens, 0), Step(0, tokens.values[:1], tokens.values[:1])])
        with pytest.raises(IndexError, match="layer is 9"):
            stream.send(step_of(tokens, 0, layer=9))
        with pytest.raises(RuntimeError, match="nothing is in flight"):
            stream.receive()
        stream.send(step_of(tokens, 0))
        with pytest.raises(RuntimeError, match="in_flight is 1; receive first"):
            stream.step(0, tokens.keys[0], tokens.values[0])
        stream.send(step_of(tokens, 1))
        with pytest.raises(RuntimeError, match="in_flight is 2; the limit is 2"):
            stream.send(step_of(tokens, 2))
        assert stream.receive()[0].length == 1
        stream.send(step_of(tokens, 2))
    assert session.info().layers[0].length == 3


def test_what_was_not_answered_is_sent_again_on_a_new_stream(connect: Connect, server: Server, tokens: Tokens) -> None:
    step_bytes = tokens.keys[0].nbytes + tokens.values[0].nbytes + tokens.queries[0].nbytes
    with (
        Proxy(server.address, cut_after_bytes=30 * step_bytes) as proxy,
        connect(proxy.address, retry=ctkvr.RetryOptions(attempts_max=8)) as client,
        client.open_session(**GEOMETRY, format="f32") as session,
    ):
        messages = [[step_of(tokens, number)] for number in range(100)]
        streams = answered = 0
        while messages:
            streams += 1
            stream = session.decode(answer="ids", in_flight_max=100)
            try:
                for steps in messages:
                    stream.send(steps)
                while stream.in_flight:
                    (result,) = stream.receive()
                    assert result.answer.ids[0, 0][-1] == answered
                    answered += 1
            except errors.Unavailable as error:
                with pytest.raises(errors.Unavailable) as again:
                    stream.receive()
                assert again.value is error
                with pytest.raises(errors.Unavailable):
                    stream.send(step_of(tokens, 0))
            messages = stream.unanswered
            assert [steps[0].first_position for steps in messages] == list(range(answered, 100))
        assert proxy.cuts_done == 1
        assert streams >= 2
        assert answered == session.info().layers[0].length == 100
        assert session.append(0, tokens.keys[:1], tokens.values[:1]).length == 101


def test_an_error_cancels_the_stream_and_what_was_appended_stays(session: Any, tokens: Tokens) -> None:
    with pytest.raises(ZeroDivisionError), session.decode() as stream:
        stream.step(0, tokens.keys[0], tokens.values[0])
        stream.send(step_of(tokens, 1))
        raise ZeroDivisionError
    for use in (lambda: stream.send(step_of(tokens, 2)), stream.receive):
        with pytest.raises(errors.Cancelled, match="closed on this side"):
            use()
    held = session.info().layers[0].length
    assert held in (1, 2)
    assert session.append(0, tokens.keys[:1], tokens.values[:1]).length == held + 1


def test_a_stream_ends_with_its_timeout(connect: Connect, server: Server, tokens: Tokens) -> None:
    with Proxy(server.address) as proxy, connect(proxy.address) as client:
        session = client.open_session(**{**GEOMETRY, "token_limit": 64})
        proxy.stall()
        stream = session.decode(timeout=0.1)
        stream.send(step_of(tokens, 0))
        with pytest.raises(errors.DeadlineExceeded):
            stream.receive()
