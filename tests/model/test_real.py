# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M behind long real texts: the same tokens as plain transformers, and as many right in look-up answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ctkvr
import pytest
import torch
from ctkvr.transformers import CtkvrCache

from reading import Reading, load
from server import Server

LIMIT = 8192  # the model's positions
QUESTIONS_A_TEXT = 100


@pytest.fixture(scope="module")
def large_client() -> Iterator[ctkvr.Client]:
    with Server("--arena_bytes=1GiB") as server, ctkvr.connect(server.address) as client:
        yield client


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return load()


def test_200_tokens_are_those_of_plain_transformers(loaded: tuple[Any, Any], large_client: ctkvr.Client) -> None:
    reading = Reading(*loaded, prompt_tokens=6000, questions=1, seed=1)
    ids = torch.tensor([[*reading.prompt, *reading.questions[0].asked]])
    settings = {"max_new_tokens": 200, "min_new_tokens": 200, "do_sample": False}
    expected = reading.model.generate(ids, cache=reading.cache(), **settings)
    everything = ctkvr.Selection(dense_below_tokens=LIMIT)
    with CtkvrCache(reading.model, large_client, LIMIT, format="f32", selection=everything) as cache:
        cache.adopt(reading.cache())
        found = reading.model.generate(ids, cache=cache, **settings)
        assert cache.traffic.answers >= 30 * 199
    assert found.shape[1] == ids.shape[1] + 200
    assert found.tolist() == expected.tolist()


def test_the_default_answers_as_well(
    loaded: tuple[Any, Any],
    large_client: ctkvr.Client,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    questions = int(request.config.getoption("--questions"))
    asked = tokens = full = served = 0
    for seed, first in enumerate(range(0, questions, QUESTIONS_A_TEXT), start=1):
        count = min(QUESTIONS_A_TEXT, questions - first)
        reading = Reading(*loaded, prompt_tokens=4000, questions=count, seed=seed)
        plain = reading.cache()
        with CtkvrCache(reading.model, large_client, LIMIT) as cache:
            cache.adopt(reading.cache())
            for question in reading.questions:
                full += reading.right_at_once(plain, question)
                served += reading.right_by_steps(cache, question)
                asked, tokens = asked + 1, tokens + len(question.answer)
            assert cache.traffic.answers >= 30 * count
        with capsys.disabled():
            print(f"\n{asked} questions, {tokens} tokens: {full} right with full attention, {served} with ctkvr")
    assert full > tokens / 3  # else there is nothing to lose
    assert abs(full - served) <= max(tokens / 100, 3)  # a point, or of few questions three tokens
