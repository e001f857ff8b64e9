# SPDX-License-Identifier: Apache-2.0
"""Answers with new rows are those with all rows, to the bit, whatever was lost, cut off or came in another order. For
both clients, a server and an engine in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ctkvr
import numpy as np
import pytest
from ctkvr import codec, errors
from ctkvr.row_cache import NewRows, RowCache, StaleAnswer

from conftest import GEOMETRY, HEAD_DIM, LAYERS, Q_HEADS, SEED, Tokens
from twins import Connect

SLOTS = 200
SELECTION = ctkvr.Selection(source="exact", k=24, sink_tokens=2, window_tokens=8, dense_below_tokens=0)
FORMATS = [("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("k8v4", "f16"), ("k8v4", "storage"), ("k6v4", "storage")]


def same(one: ctkvr.Answer, other: ctkvr.Answer) -> bool:
    assert one.keys is not None
    assert one.values is not None
    assert other.keys is not None
    assert other.values is not None
    return (
        np.array_equal(one.counts, other.counts)
        and np.array_equal(one.ids.flat, other.ids.flat)
        and one.keys.flat.tobytes() == other.keys.flat.tobytes()
        and one.values.flat.tobytes() == other.values.flat.tobytes()
        and (one.row_format, one.source, one.length) == (other.row_format, other.source, other.length)
    )


def like(rng: np.random.Generator, query: Any) -> Any:
    """A query near another, as that of a next step is."""
    return (query + 0.3 * rng.standard_normal(query.shape)).astype(np.float32)


@pytest.fixture
def caching(client: Any) -> Iterator[Any]:
    with client.open_session(**GEOMETRY, format="f32", selection=SELECTION, cache_slots=SLOTS) as opened:
        yield opened


@pytest.mark.parametrize(("stored", "row_format"), FORMATS)
def test_random_steps_find_what_all_rows_hold(
    client: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, stored: str, row_format: Any
) -> None:
    sent = chosen = lost = 0
    dtype = {"f16": "float16", "bf16": "bfloat16"}.get(stored, "float32")
    convert = {"float16": lambda a: a.astype(np.float16), "bfloat16": ctkvr.to_bfloat16}.get(dtype, lambda a: a)
    options = {**GEOMETRY, "dtype": dtype}
    with (
        client.open_session(**options, format=stored, selection=SELECTION, cache_slots=SLOTS) as session,
        client.attach_session(session.id) as other,
    ):
        lengths = [0] * LAYERS
        query = rng.standard_normal((3, Q_HEADS, HEAD_DIM), np.float32)
        for _ in range(60):
            layer = int(rng.integers(LAYERS))
            if lengths[layer] < 8 or rng.random() < 0.4:
                tokens = Tokens(rng, int(rng.integers(8, 300)))
                lengths[layer] = session.append(layer, convert(tokens.keys), convert(tokens.values)).length
            if rng.random() < 0.1:
                session.truncate(min(lengths) // 2)
                lengths = [min(lengths) // 2] * LAYERS
            if lengths[layer] < 8:
                continue
            query = like(rng, query)
            arguments = {"row_format": row_format, "queries": convert(query[: int(rng.integers(1, 4))])}
            if rng.random() < 0.15:  # the reply is lost on its way; or another worker asks
                lost += 1
                lose(monkeypatch, session if rng.random() < 0.5 else None, other, layer, arguments)
            new = session.retrieve(layer, answer="new_rows", **arguments)
            assert same(new, session.retrieve(layer, answer="rows", **arguments)), f"seed {SEED}"
            sent, chosen = sent + new.new_rows, chosen + int(new.counts.sum())
    assert sent < chosen, "rows that are held need not travel"
    assert lost > 0


def lose(monkeypatch: pytest.MonkeyPatch, session: Any, other: Any, layer: int, arguments: dict[str, Any]) -> None:
    if session is None:
        other.retrieve(layer, answer="new_rows", **arguments)
        return

    def fail(*_: object) -> None:
        raise errors.Unavailable("UNAVAILABLE", "lost")

    with monkeypatch.context() as patch, pytest.raises(errors.Unavailable):
        patch.setattr(codec, "decode_answer", fail)
        session.retrieve(layer, answer="new_rows", **arguments)


def test_what_is_held_does_not_travel_again(caching: Any, tokens: Tokens) -> None:
    caching.append(0, tokens.keys, tokens.values)
    first = caching.retrieve(0, tokens.queries[-1], answer="new_rows")
    again = caching.retrieve(0, tokens.queries[-1], answer="new_rows")
    assert first.new_rows == first.counts.sum() > 0
    assert again.new_rows == 0
    assert same(first, again)
    assert first.scores is None


def test_row_formats_and_sets_may_change_from_one_answer_to_the_next(client: Any, tokens: Tokens) -> None:
    per_head = replace(SELECTION, reduction="per_head")
    with client.open_session(**GEOMETRY, format="f32", selection=per_head, cache_slots=SLOTS) as session:
        session.append(0, tokens.keys, tokens.values)
        for row_format in ("f16", "f32", "bf16", "storage", "f32", "f32"):
            for reduction in ("per_head", "sum_softmax"):
                selection = ctkvr.Selection(reduction=reduction)
                new, rows = (
                    session.retrieve(0, tokens.queries[-1], answer=mode, row_format=row_format, selection=selection)
                    for mode in ("new_rows", "rows")
                )
                assert same(new, rows)


def test_rows_may_stay_as_they_are_stored(client: Any, tokens: Tokens) -> None:
    with client.open_session(**GEOMETRY, format="k8v4", selection=SELECTION, cache_slots=SLOTS) as session:
        session.append(0, tokens.keys, tokens.values)
        for query in tokens.queries[-3:]:
            answers = [
                session.retrieve(0, query, answer=mode, row_format="storage", decode_rows=False)
                for mode in ("new_rows", "rows")
            ]
            assert same(*answers)
            assert answers[0].decoder is not None


def test_a_stream_of_many_in_flight_finds_the_same(caching: Any, tokens: Tokens) -> None:
    caching.append(0, tokens.keys[:300], tokens.values[:300])
    with caching.decode(answer="new_rows", row_format="f32") as stream:
        results = []
        for token in range(300, 400):
            stream.send(ctkvr.Step(0, tokens.keys[token], tokens.values[token], tokens.queries[token]))
            if stream.in_flight == 5:
                results += stream.receive()
        while stream.in_flight:
            results += stream.receive()
    for token, result in zip(range(300, 400), results, strict=True):
        expected = caching.retrieve(0, tokens.queries[token], token, answer="rows", row_format="f32")
        assert np.array_equal(result.answer.ids.flat, expected.ids.flat)
        assert np.array_equal(result.answer.keys.flat, expected.keys.flat)
        assert np.array_equal(result.answer.values.flat, expected.values.flat)
    with caching.decode(answer="new_rows") as stream:
        for step in range(4):
            answer = stream.step(0, queries=tokens.queries[0]).answer
            assert answer.new_rows == (answer.counts.sum() if step == 0 else 0)


def test_threads_that_ask_at_once_find_the_same(address: str, tokens: Tokens) -> None:
    failures: list[object] = []

    def work(session: ctkvr.Session, begin: int) -> None:
        try:
            for token in range(begin, begin + 40):
                new = session.retrieve(0, tokens.queries[token], answer="new_rows")
                if not same(new, session.retrieve(0, tokens.queries[token], answer="rows")):
                    failures.append(token)
        except Exception as error:
            failures.append(error)

    with (
        ctkvr.connect(address) as client,
        client.open_session(**GEOMETRY, format="f32", selection=SELECTION, cache_slots=SLOTS) as session,
    ):
        session.append(0, tokens.keys, tokens.values)
        threads = [threading.Thread(target=work, args=(session, 40 * number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_sessions_without_slots_or_too_few_say_so(connect: Connect, address: str, tokens: Tokens) -> None:
    with connect(address) as client:
        for slots, kind in ((0, errors.CtkvrError), (4, errors.CacheTooSmall)):
            with client.open_session(**GEOMETRY, format="f32", selection=SELECTION, cache_slots=slots) as session:
                session.append(0, tokens.keys, tokens.values)
                with pytest.raises(kind, match="cache_slots") as raised:
                    session.retrieve(0, tokens.queries[-1], answer="new_rows")
                assert raised.value.code == "FAILED_PRECONDITION"


# ---- The cache alone -------------------------------------------------------------------------------------------------


def new_rows(counts: list[int], slots: list[int], new: dict[int, float], version: int) -> NewRows:
    """Of one position and one set; `new`: what is written to which slot."""
    values = np.array(list(new.values()), np.float32)[:, np.newaxis]
    return NewRows(
        counts=np.array([counts], np.uint32),
        slots=np.array(slots, np.uint16),
        new_counts=np.array([[len(new)]], np.uint32),
        new_slots=np.array(list(new), np.uint16),
        ids=np.array([int(value) for value in new.values()], np.uint32),
        keys=values,
        values=-values,
        version=version,
    )


def test_an_answer_that_rests_on_rows_that_are_gone_is_refused() -> None:
    cache = RowCache(4)
    assert cache.take(new_rows([2], [0, 1], {0: 10, 1: 11}, 5), 0).ids.tolist() == [10, 11]
    # Two were asked for at version 5; the later one, complete, comes first.
    assert cache.take(new_rows([2], [0, 1], {0: 20, 1: 21}, 7), 5).keys.ravel().tolist() == [20, 21]
    with pytest.raises(StaleAnswer):
        cache.take(new_rows([2], [0, 2], {2: 12}, 6), 5)
    assert cache.version == 7
    assert cache.take(new_rows([2], [0, 1], {}, 8), 7).values.ravel().tolist() == [-20, -21]


@pytest.mark.parametrize(
    ("new", "text"),
    [
        (new_rows([2], [0, 3], {}, 9), "never filled"),
        (new_rows([2], [0, 4], {}, 9), "slots has slot 4; the cache has 4"),
        (new_rows([1], [0], {9: 1.0}, 9), "new_slots has slot 9"),
    ],
)
def test_a_damaged_answer_empties_the_cache(new: NewRows, text: str) -> None:
    cache = RowCache(4)
    with pytest.raises(errors.ProtocolError, match="holds nothing"):
        cache.take(new_rows([1], [0], {}, 3), 0)
    cache.take(new_rows([2], [0, 1], {0: 10, 1: 11}, 5), 0)
    with pytest.raises(errors.ProtocolError, match=text):
        cache.take(new, 5)
    assert cache.version == 0
    with pytest.raises(errors.ProtocolError, match="never filled"):
        cache.take(new_rows([1], [0], {}, 9), 0)
    assert cache.take(new_rows([1], [0], {0: 30}, 10), 0).ids.tolist() == [30]
