# SPDX-License-Identifier: Apache-2.0
"""What is tried again, when, and what never; operations are driven by hand, so no time passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ctkvr import RetryOptions, Selection, Step, errors
from ctkvr.calls import ClientCore, Connection, Effect, Operation, SessionCore, Sleep, Unary, Upload
from ctkvr.codec import QuerySettings
from ctkvr.decode import DecodeCore
from ctkvr.errors import CtkvrError, make_error
from ctkvr.session import SessionHandle
from ctkvr.v1 import cache_pb2
from ctkvr.wire import Reply

from conftest import GEOMETRY, HEAD_DIM, KV_HEADS, VALUE_DIM

BOOT_ID = 77
HEADER = cache_pb2.ReplyHeader(boot_id=BOOT_ID)
UNAVAILABLE = make_error("UNAVAILABLE", "connection refused")
DRAINING = make_error("UNAVAILABLE", "the server is draining", "DRAINING")
QUEUE_FULL = make_error("RESOURCE_EXHAUSTED", "the queue is full", "QUEUE_FULL", retry_after=0.4)
TOO_LARGE = make_error("RESOURCE_EXHAUSTED", "the answer is too large")
UNKNOWN_SESSION = make_error("NOT_FOUND", "never opened", "SESSION_UNKNOWN")


def copy_of(error: CtkvrError) -> CtkvrError:
    return make_error(error.code, error.message, error.reason, error.metadata, error.retry_after)


class Driver:
    """Answers the effects of an operation from a script of replies and errors."""

    def __init__(self, operation: Operation[Any], *script: Any) -> None:
        self.calls: list[str] = []
        self.sleeps: list[float] = []
        self.requests: list[Any] = []
        self.result: Any = None
        self.error: Exception | None = None
        self._script = list(script)
        self._run(operation)

    def _run(self, operation: Operation[Any]) -> None:
        reply: Any = None
        try:
            while True:
                effect = operation.throw(reply) if isinstance(reply, CtkvrError) else operation.send(reply)
                reply = self._answer(effect)
        except StopIteration as stop:
            self.result = stop.value
        except CtkvrError as error:
            self.error = error
        assert not self._script, "not all of the script was needed"

    def _answer(self, effect: Effect) -> Any:
        if isinstance(effect, Sleep):
            self.sleeps.append(effect.seconds)
            return None
        assert isinstance(effect, (Unary, Upload))
        self.calls.append(effect.method)
        self.requests.append(effect.request if isinstance(effect, Unary) else list(effect.requests))
        reply = self._script.pop(0)
        return copy_of(reply) if isinstance(reply, CtkvrError) else reply


def make_connection(**retry: Any) -> Connection:
    limits = cache_pb2.ServerLimits(append_tokens_max=10)
    info = cache_pb2.GetServerInfoReply(header=HEADER, limits=limits)
    return Connection(retry=RetryOptions(**retry), info=info)


def opened(length: int = 0) -> cache_pb2.OpenSessionReply:
    reply = cache_pb2.OpenSessionReply(header=HEADER)
    reply.session.session_id = "a"
    reply.session.epoch = 5
    geometry = reply.session.options.geometry
    for name in ("layers", "q_heads", "kv_heads", "head_dim", "value_dim"):
        setattr(geometry, name, GEOMETRY[name])
    geometry.dtype = 1  # type: ignore[assignment]
    for layer in range(GEOMETRY["layers"]):
        reply.session.layers.add(layer=layer, length=length)
    return reply


def make_session(length: int = 0, **retry: Any) -> SessionCore:
    return SessionCore(make_connection(**retry), opened(length), b"")


def got(length: int) -> cache_pb2.GetSessionReply:
    return cache_pb2.GetSessionReply(header=HEADER, session=opened(length).session)


def arrays(tokens: int) -> tuple[Any, Any]:
    return np.ones((tokens, KV_HEADS, HEAD_DIM), np.float32), np.ones((tokens, KV_HEADS, VALUE_DIM), np.float32)


REPEATABLE = [
    lambda s: s.append(0, *arrays(2)),
    lambda s: s.retrieve(0, np.ones((4, HEAD_DIM), np.float32)),
    lambda s: s.info(),
    lambda s: s.keep_alive(),
    lambda s: s.maintain(),
    lambda s: s.close(),
    lambda s: ClientCore(s.connection).open_session(**GEOMETRY),
    lambda s: ClientCore(s.connection).attach_session("a"),
    lambda s: ClientCore(s.connection).list_sessions(),
    lambda s: ClientCore(s.connection).server_info(),
]


@pytest.mark.parametrize("call", REPEATABLE)
def test_a_broken_connection_is_tried_again_with_a_growing_back_off(call: Any) -> None:
    driver = Driver(call(make_session(attempts_max=4, backoff_initial=1.0, backoff_max=2.5)), *[UNAVAILABLE] * 4)
    assert isinstance(driver.error, errors.Unavailable)
    assert driver.error.attempts == 4
    assert "UNAVAILABLE after 4 attempts: connection refused" in str(driver.error)
    assert len(set(driver.calls)) == 1
    assert all(request == driver.requests[0] for request in driver.requests)
    for sleep, wanted in zip(driver.sleeps, [1.0, 2.0, 2.5], strict=True):
        assert 0.8 * wanted <= sleep <= 1.2 * wanted


def test_truncate_is_not_tried_again_when_the_connection_breaks() -> None:
    driver = Driver(make_session().truncate(3), UNAVAILABLE)
    assert isinstance(driver.error, errors.Unavailable)
    assert driver.sleeps == []


@pytest.mark.parametrize("error", [DRAINING, TOO_LARGE, make_error("INTERNAL", "x"), make_error("DATA_LOSS", "x")])
@pytest.mark.parametrize("call", REPEATABLE)
def test_what_waiting_does_not_cure_is_raised_at_once(call: Any, error: CtkvrError) -> None:
    driver = Driver(call(make_session()), error)
    assert type(driver.error) is type(error)
    assert driver.sleeps == []


@pytest.mark.parametrize("call", [*REPEATABLE, lambda s: s.truncate(3)])
def test_a_refusal_is_tried_again_after_the_delay_it_names(call: Any) -> None:
    driver = Driver(call(make_session(attempts_max=2, backoff_initial=0.01)), QUEUE_FULL, QUEUE_FULL)
    assert isinstance(driver.error, errors.QueueFull)
    assert driver.sleeps == [0.4]


def test_no_attempt_starts_after_the_deadline() -> None:
    driver = Driver(make_session(backoff_initial=100.0, backoff_max=100.0).keep_alive(timeout=50), UNAVAILABLE)
    assert isinstance(driver.error, errors.Unavailable)
    assert driver.sleeps == []


def test_an_open_whose_answer_was_lost_attaches_to_what_it_opened() -> None:
    exists = make_error("ALREADY_EXISTS", "in use")
    operation = ClientCore(make_connection()).open_session(**GEOMETRY)
    driver = Driver(operation, UNAVAILABLE, exists, got(0))
    assert driver.calls == ["OpenSession", "OpenSession", "GetSession"]
    assert driver.requests[2].session.session_id == driver.requests[0].session_id != ""
    assert driver.result.ref.epoch == 5
    # An id of the caller's own may be anybody's.
    operation = ClientCore(make_connection()).open_session(**GEOMETRY, session_id="mine")
    assert isinstance(Driver(operation, UNAVAILABLE, exists).error, errors.SessionExists)


def test_a_close_whose_answer_was_lost_is_done() -> None:
    closed = make_error("NOT_FOUND", "closed", "SESSION_CLOSED")
    session = make_session()
    driver = Driver(session.close(), UNAVAILABLE, closed, cache_pb2.GetServerInfoReply(header=HEADER))
    assert driver.result == 0
    assert session.closed
    driver = Driver(make_session().close(), closed, cache_pb2.GetServerInfoReply(header=HEADER))
    assert isinstance(driver.error, errors.SessionLost)


def test_an_unknown_session_is_explained_by_the_boot_that_answers() -> None:
    other = cache_pb2.GetServerInfoReply(header=cache_pb2.ReplyHeader(boot_id=78))
    driver = Driver(make_session().keep_alive(), UNKNOWN_SESSION, other)
    assert isinstance(driver.error, errors.SessionLost)
    assert driver.error.reason == "SERVER_RESTARTED"
    assert driver.error.metadata == {"boot_id": "78", "expected_boot_id": "77"}
    same = cache_pb2.GetServerInfoReply(header=HEADER)
    driver = Driver(make_session().keep_alive(), UNKNOWN_SESSION, same)
    assert isinstance(driver.error, errors.SessionLost)
    assert driver.error.reason == "SESSION_UNKNOWN"
    # Where that cannot be asked, the error stays what it was.
    driver = Driver(make_session(attempts_max=1).keep_alive(), UNKNOWN_SESSION, UNAVAILABLE)
    assert isinstance(driver.error, errors.SessionLost)
    assert driver.error.reason == "SESSION_UNKNOWN"


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (cache_pb2.ReplyHeader(boot_id=78), "SERVER_RESTARTED"),
        (cache_pb2.ReplyHeader(boot_id=BOOT_ID, session_epoch=6), "EPOCH_MISMATCH"),
    ],
)
def test_a_reply_of_another_boot_or_epoch_is_never_taken(header: cache_pb2.ReplyHeader, reason: str) -> None:
    driver = Driver(make_session().keep_alive(), cache_pb2.KeepAliveReply(header=header))
    assert isinstance(driver.error, errors.SessionLost)
    assert driver.error.reason == reason


# ---- Streams ---------------------------------------------------------------------------------------------------------


def streamed(length: int, chunks: int = 1) -> cache_pb2.AppendStreamReply:
    return cache_pb2.AppendStreamReply(header=HEADER, lengths=[length, 0], chunks=chunks)


def positions(requests: list[cache_pb2.AppendRequest]) -> list[tuple[int, int]]:
    return [(request.chunk.first_position, request.chunk.keys.dims[0]) for request in requests]


def test_no_message_is_over_the_servers_limit() -> None:
    session = make_session()
    limit = 1 << 16
    session.connection.info = cache_pb2.GetServerInfoReply(limits=cache_pb2.ServerLimits(message_bytes_max=limit))
    session.ref.session_id, session.ref.fingerprint = "i" * 128, b"f" * 256
    driver = Driver(session.append(0, *arrays(1000)), streamed(1000))
    (requests,) = driver.requests
    assert sum(request.chunk.keys.dims[0] for request in requests) == 1000
    assert limit - 2048 < max(request.ByteSize() for request in requests) <= limit


@pytest.mark.parametrize(
    ("held", "again"),
    [
        (100, [(100, 10), (110, 10), (120, 5)]),  # nothing came through
        (110, [(110, 10), (120, 5)]),
        (115, [(115, 10)]),  # somebody's own borders
        (120, [(120, 5)]),
        (125, [(120, 5)]),  # all of it: the last message proves it
        (90, [(100, 10), (110, 10), (120, 5)]),  # truncated meanwhile: the server will say what it expects
    ],
)
def test_a_broken_stream_goes_on_where_the_server_holds(held: int, again: list[tuple[int, int]]) -> None:
    driver = Driver(make_session(100).append(0, *arrays(25)), UNAVAILABLE, got(held), streamed(125, 2))
    assert driver.calls == ["AppendStream", "GetSession", "AppendStream"]
    assert positions(driver.requests[0]) == [(100, 10), (110, 10), (120, 5)]
    assert positions(driver.requests[2]) == again
    assert (driver.result.length, driver.result.chunks, driver.result.resumed) == (125, 2, 1)


def test_a_stream_that_gets_on_may_break_more_often_than_one_that_does_not() -> None:
    session = make_session(attempts_max=2)
    script = [UNAVAILABLE, got(10), UNAVAILABLE, got(20), QUEUE_FULL, got(30), streamed(35)]
    assert Driver(session.append(0, *arrays(35)), *script).result.resumed == 3
    session = make_session(attempts_max=2)
    driver = Driver(session.append(0, *arrays(35)), UNAVAILABLE, got(0), UNAVAILABLE)
    assert isinstance(driver.error, errors.Unavailable)
    assert driver.error.attempts == 2


def test_a_stream_that_the_server_refuses_is_not_taken_up_again() -> None:
    wrong = make_error("OUT_OF_RANGE", "gap", "WRONG_POSITION", {"expected_position": "3"})
    session = make_session(9)
    driver = Driver(session.append(0, *arrays(25)), wrong)
    assert isinstance(driver.error, errors.WrongPosition)
    assert driver.error.expected_position == 3
    # What the layer holds is open now, so the next append asks.
    appended = cache_pb2.AppendReply(header=HEADER, length=5)
    driver = Driver(session.append(0, *arrays(2)), got(3), appended)
    assert driver.calls == ["GetSession", "Append"]
    assert driver.requests[1].chunk.first_position == 3


# ---- Decode ----------------------------------------------------------------------------------------------------------


def decode_reply(**fields: Any) -> cache_pb2.DecodeReply:
    return cache_pb2.DecodeReply(**{"header": HEADER, "sequence": 1, "items": [cache_pb2.DecodeReplyItem()], **fields})


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (decode_reply(sequence=2), errors.ProtocolError),
        (decode_reply(items=[]), errors.ProtocolError),
        (decode_reply(header=cache_pb2.ReplyHeader(boot_id=78)), errors.SessionLost),
    ],
)
def test_replies_out_of_order_or_of_another_boot_are_never_taken(
    reply: cache_pb2.DecodeReply, kind: type[CtkvrError]
) -> None:
    settings = QuerySettings(Selection(), "ids", "f16")
    for taken, error in ((decode_reply(), None), (reply, kind)):
        core = DecodeCore(make_session(), settings, 8)
        request = Driver(core.prepare([Step(0, *arrays(1))])).result
        assert request.sequence == 1
        if error is None:
            assert core.take(Reply(taken, None))[0].error is None
        else:
            with pytest.raises(error):
                core.take(Reply(taken, None))


def test_a_stream_keeps_to_one_boot_and_a_failed_look_counts_on_nothing() -> None:
    settings = QuerySettings(Selection(), "ids", "f16")
    session = make_session(7, attempts_max=1)
    other = SessionCore(session.connection, opened(), b"")
    other.boot_id = 78
    core = DecodeCore(session, settings, 8)
    steps = [Step(0, *arrays(1)), Step(0, *arrays(1), session=SessionHandle(other))]
    with pytest.raises(ValueError, match="of one boot of the server"):
        Driver(core.prepare(steps))
    other.boot_id = BOOT_ID
    other.set_length(0, None)
    assert isinstance(Driver(core.prepare(steps), UNAVAILABLE).error, errors.Unavailable)
    assert core.in_flight == 0
    assert Driver(session.next_position(0), got(7)).result == 7  # asked, not counted
