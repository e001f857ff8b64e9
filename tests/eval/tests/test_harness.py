# SPDX-License-Identifier: Apache-2.0
"""The harness with a toy model: what must come out is known, as full attention over everything gives it."""

from __future__ import annotations

import csv
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ctkvr
import numpy as np
import pytest

from ctkvr_eval import attention, methods, metrics, results, texts
from ctkvr_eval.__main__ import main
from ctkvr_eval.evaluate import Full, Outcome, evaluate, make_task
from ctkvr_eval.selectors.base import Choice, Task, attend_chosen
from ctkvr_eval.selectors.server import Daemon, find_program
from toy import DIM, LAYERS, Q_HEADS, VOCABULARY, Toy

SEED = int(os.environ.get("CTKVR_TEST_SEED") or random.SystemRandom().getrandbits(32))
PROMPT, TAIL = 900, 96
EXAMPLE = str(Path(__file__).parents[1] / "examples/strided.py") + ":Strided"


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"CTKVR_TEST_SEED={SEED}")  # noqa: T201 (pytest shows it with a failure)
    return np.random.default_rng(SEED)


@pytest.fixture(scope="module")
def client() -> Iterator[ctkvr.Client]:
    daemon = Daemon(find_program(), arena="256MiB")
    with ctkvr.connect(daemon.address) as connected:
        yield connected
    daemon.stop()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"), SEED)


class Run:
    """Methods on one random text, beside the loss of the toy's own attention over prompt and tail in one pass."""

    def __init__(self, toy: Toy, client: ctkvr.Client) -> None:
        rng = np.random.default_rng(SEED)
        tokens = rng.integers(0, VOCABULARY, PROMPT + TAIL + 1).tolist()
        self.toy, self._client = toy, client
        self.capture = toy.capture(tokens[:PROMPT])
        self.text = texts.Text("random", tokens[:PROMPT], tokens[PROMPT:], np.full(TAIL, -1))
        logits = toy.forward(tokens[:-1], 0, _own_attention)[PROMPT:]
        self.own = metrics.score(logits, np.array(tokens[PROMPT + 1 :]))

    def of(self, method: str, k: int, every: int = 1) -> Outcome:
        selector = methods.make(method, k, self._client)
        return evaluate(self.toy, self.capture, self.text, selector, make_task(self.capture, SEED, every), k)


def _own_attention(tail: Any) -> Any:
    logits = attention.causal(attention.logits_of(tail.queries, tail.keys, DIM**-0.5))
    return attention.attend(logits, tail.values).output


@pytest.fixture(scope="module")
def run(toy: Toy, client: ctkvr.Client) -> Run:
    return Run(toy, client)


@pytest.fixture(scope="module")
def ungrouped(toy: Toy, client: ctkvr.Client, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """With a KV head a query head: then the ranks do not depend on what else is in the softmax."""
    return Run(Toy(tmp_path_factory.mktemp("toy"), SEED, kv_heads=Q_HEADS), client)


# ---- Loss: whatever attends to everything is full attention ----------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    ["full", "exact", "ctkvr-dense@f32", "ctkvr-exact@f32", "ctkvr-dense@f32:live=32", "ctkvr-exact@f32:live=7"],
)
def test_everything_chosen_is_full_attention(run: Run, method: str) -> None:
    outcome = run.of(method, PROMPT)
    np.testing.assert_allclose(outcome.scores.nll, run.own.nll, atol=2e-3)
    if method != "full":
        assert outcome.choices.mean("mass") == pytest.approx(1, abs=1e-5)
        assert outcome.choices.mean("recall") == 1


@pytest.mark.parametrize("method", ["exact", "ctkvr-sketch:dense_below_tokens=0"])
def test_every_fourth_position_is_counted_as_among_all(run: Run, method: str) -> None:
    some, none, all_ = run.of(method, 48, 4), run.of(method, 48, 0), run.of(method, 48)
    np.testing.assert_array_equal(some.scores.nll, all_.scores.nll)
    np.testing.assert_array_equal(none.scores.nll, all_.scores.nll)
    assert not none.choices.layers
    for name in ("mass_at", "recall_at"):
        few, many = (getattr(found.choices.layers[LAYERS - 1], name) for found in (some, all_))
        np.testing.assert_allclose(few, many[::4], rtol=1e-5)


def test_less_chosen_is_another_loss_and_less_mass(ungrouped: Run) -> None:
    some, none = ungrouped.of("exact", 64), ungrouped.of("sliding_window", 0)
    assert np.abs(none.scores.nll - ungrouped.own.nll).max() > 0.05  # what the other tests compare can differ
    assert none.choices.mean("mass") < some.choices.mean("mass") < 0.9999
    assert some.choices.mean("recall") == 1
    assert none.choices.mean("recall") == 0


def test_the_server_chooses_what_exact_does(ungrouped: Run) -> None:
    here, there = ungrouped.of("exact", 64), ungrouped.of("ctkvr-exact@f32:dense_below_tokens=0", 64)
    np.testing.assert_allclose(there.scores.nll, here.scores.nll, atol=2e-3)
    assert there.choices.mean("recall") > 0.9999
    assert there.bytes_read > 0
    assert there.memory_bytes > 0
    assert len(there.layer_seconds) == LAYERS


def test_the_remainder_is_nearer_to_full_attention(run: Run) -> None:
    without, with_ = (run.of(f"ctkvr-sketch{end}:dense_below_tokens=0", 32) for end in ("", "+remainder"))
    far = np.abs(without.scores.nll - run.own.nll).mean()
    assert np.abs(with_.scores.nll - run.own.nll).mean() < far / 2


def test_the_tail_may_go_to_the_server_and_into_its_index(run: Run) -> None:
    kept = run.of("ctkvr-sketch:live=32:maintain=false:dense_below_tokens=0", 64)
    taken = run.of("ctkvr-query_centroids:live=32:centroids=64:list_tokens=256:dense_below_tokens=0", 64)
    for outcome in (kept, taken):
        assert 0.1 < outcome.choices.mean("recall") <= 1


# ---- Measures --------------------------------------------------------------------------------------------------------


def test_needles_are_counted_by_hand(rng: np.random.Generator) -> None:
    """One token a head has all of the attention; the first KV head's is chosen, the second's is not."""
    task = Task(1, 4, 2, 8, 8, 100, 1.0, sinks=2, window=10)
    keys = np.zeros((2, 103, 8), np.float32)
    keys[0, 50] = keys[1, 60] = 9
    queries = np.ones((4, 3, 8), np.float32)
    chosen = [[np.array([50, 51]), np.array([61])]] * 3
    counts = metrics.compare(task, queries, keys, chosen, 1, np.full(3, task.free_end))
    assert counts.needles.tolist() == [3, 3, 3, 3]
    assert counts.found.tolist() == [3, 3, 0, 0]
    np.testing.assert_allclose(counts.recall, [1, 1, 0, 0])
    np.testing.assert_allclose(counts.mass, [1, 1, 0, 0], atol=1e-6)
    choices = metrics.Choices({0: counts})
    assert choices.needle() == 0.5
    assert np.isnan(choices.worst_head())  # three are too few
    keys[1, 60] = 0
    keys[1, 95] = 9  # in the window: no needle, and always attended
    counts = metrics.compare(task, queries, keys, chosen, 1, np.full(3, task.free_end))
    assert counts.needles.tolist() == [3, 3, 0, 0]
    np.testing.assert_allclose(counts.mass, 1, atol=1e-6)


def test_log_weights_are_added_to_logits(rng: np.random.Generator) -> None:
    task = Task(1, 1, 1, 4, 4, 50, 0.5, sinks=0, window=0)
    keys, values = (rng.standard_normal((1, 50, 4), np.float32) for _ in range(2))
    queries = rng.standard_normal((1, 1, 4), np.float32)
    weights = np.log(np.array([[2.0, 3.0]], np.float32))
    part = attend_chosen(task, queries, keys, values, Choice([[np.array([7, 9])]], np.zeros(1, np.int64), [[weights]]))
    shares = np.array([2, 3]) * np.exp(0.5 * keys[0, [7, 9]] @ queries[0, 0])
    np.testing.assert_allclose(part.output[0, 0], shares @ values[0, [7, 9]] / shares.sum(), rtol=1e-5)
    assert part.log_sum_exp[0, 0] == pytest.approx(np.log(shares.sum()), rel=1e-5)


def test_a_rise_is_a_tie_where_its_interval_holds_none(rng: np.random.Generator) -> None:
    base = rng.standard_normal(512)
    noise = rng.standard_normal(512)
    assert metrics.rise(base + noise - noise.mean(), base, 1).tie
    above = metrics.rise(base + 0.5 + 0.1 * noise, base, 1)
    assert not above.tie
    assert above.low < above.mean < above.high
    assert above.mean == pytest.approx(0.5, abs=0.05)
    assert np.isnan(metrics.rise(base[:0], base[:0], 1).mean)


# ---- Texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", texts.NAMES)
def test_texts_are_the_same_for_a_seed_and_answers_stand_in_the_prompt(name: str, toy: Toy) -> None:
    def encode(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return [ord(letter) for letter in text], [(at, at + 1) for at in range(len(text))]

    one, again, other = (texts.build(name, encode, 6000, 400, seed) for seed in (1, 1, 2))
    assert (one.prompt, one.tail) == (again.prompt, again.tail)
    assert one.prompt != other.prompt
    assert len(one.tail) == one.scored + 1 == 401
    prompt = "".join(map(chr, one.prompt))
    questions = sorted(set(one.answers.tolist()) - {-1})
    assert bool(questions) == (name in ("records", "topics"))
    for question in questions[:-1]:  # the last may be cut
        answer = "".join(chr(token) for token, of in zip(one.tail[1:], one.answers, strict=True) if of == question)
        assert answer.strip()
        assert f": {answer.strip()}\n" in prompt


# ---- The command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_rows_and_replaces_them(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("".join(f"line {n} of a text of mine\n" for n in range(100)))
    arguments = ["--text", str(file), "--prompt", "700", "--tail", "64", "--k", "32", "--out", str(tmp_path)]
    for method in (EXAMPLE, "exact", "ctkvr+remainder"):
        assert main([*arguments, "--only", method], toy) == 0
    assert main([*arguments, "--only", "exact"], toy) == 0
    rows = results.read(tmp_path / "results.csv")
    assert sorted(row.method for row in rows) == sorted([EXAMPLE, "exact", "ctkvr+remainder"])
    assert all(row.text == "mine" and row.model == "toy" and row.scored_tokens == 64 for row in rows)
    with (tmp_path / "heads.csv").open() as file_:
        assert len(list(csv.DictReader(file_))) == 3 * LAYERS * Q_HEADS
    assert len(json.loads((tmp_path / "curves.json").read_text())) == 3
    assert "| mine | `exact` | 32 |" in results.table(rows)
    assert "dNLL" in capsys.readouterr().out


def test_unknown_names_are_refused(client: ctkvr.Client) -> None:
    with pytest.raises(ValueError, match="method is 'nothing'"):
        methods.make("nothing", 3, client)
    with pytest.raises(ValueError, match="speed is no setting"):
        methods.make("ctkvr-sketch:speed=3", 3, client)
    with pytest.raises(ValueError, match="text is 'nothing'"):
        texts.build("nothing", lambda text: ([], []), 1, 1, 1)


def test_full_reads_every_key(run: Run) -> None:
    outcome = evaluate(run.toy, run.capture, run.text, Full(), make_task(run.capture, SEED), 1)
    assert outcome.bytes_read == outcome.bytes_scan == LAYERS * run.toy.kv_heads * PROMPT * DIM * 2
