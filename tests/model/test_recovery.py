# SPDX-License-Identifier: Apache-2.0
"""A server that is killed while a model generates: the text goes on as it would have, or an error ends it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import ctkvr
import pytest
import torch
from ctkvr.errors import SessionLost, Unavailable
from ctkvr.transformers import CtkvrCache, Recovery
from transformers import StoppingCriteria

from conftest import EXACT
from models import WINDOW, generate, make, text
from proxy import Proxy
from server import Server

DEFAULT: dict[str, Any] = {"k": 32, "selection": ctkvr.Selection(dense_below_tokens=0)}
PROMPT, TOKENS = 700, 30


class Killable:
    """A server that SIGKILL ends and that comes back at its address."""

    def __init__(self) -> None:
        self.server = Server()
        self.address = self.server.address
        self.kills = 0

    def kill(self, restart: bool = True) -> None:
        self.server.kill()
        self.kills += 1
        if restart:
            self.server = Server(address=self.address)


@pytest.fixture
def killable() -> Iterator[Killable]:
    made = Killable()
    yield made
    made.server.stop()


class At(StoppingCriteria):  # type: ignore[misc]
    """Does something once, when so many tokens are there."""

    def __init__(self, tokens: int, do: Callable[[], object]) -> None:
        self.tokens = tokens
        self.do = do

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if input_ids.shape[1] == self.tokens:
            self.do()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def cached(model: Any, client: ctkvr.Client, **settings: Any) -> CtkvrCache:
    return CtkvrCache(model, client, 1024, window=WINDOW, **settings)


@pytest.mark.parametrize("settings", [EXACT, DEFAULT], ids=["exact", "default"])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_text_goes_on_as_it_would_have(
    settings: dict[str, Any], rows: int, killable: Killable, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = make("llama"), text(PROMPT, rows)
    with ctkvr.connect(killable.address) as client:
        with cached(model, client, **settings) as cache:
            expected = generate(model, ids, TOKENS, cache=cache)
            assert not cache.recoveries
        told: list[Recovery] = []
        with cached(model, client, **settings, on_recovery=told.append) as cache, caplog.at_level(logging.WARNING):
            stops = [At(PROMPT + 10, killable.kill), At(PROMPT + 20, killable.kill)]
            found = generate(model, ids, TOKENS, cache=cache, stopping_criteria=stops)
            assert killable.kills == 2
            assert found.tolist() == expected.tolist()
            assert told == cache.recoveries
            assert [recovery.tokens for recovery in told] == [
                rows * 4 * (PROMPT + 9) + rows,  # and the first layer's token of the step that met it
                rows * 4 * (PROMPT + 19) + rows,
            ]
            assert cache.sessions[0].info().layers[0].length == PROMPT + TOKENS - 1
    assert "opened again" in caplog.text


@pytest.mark.parametrize("tokens", [PROMPT, 1], ids=["prompt", "step"])
def test_a_kill_between_two_layers(tokens: int, killable: Killable) -> None:
    """Layers then differ in length."""
    model, ids = make("llama"), text(PROMPT)
    expected = generate(model, ids, TOKENS)

    def hook(_module: Any, args: Any, _output: Any) -> None:
        if args[0].shape[1] == tokens and not killable.kills:
            killable.kill()

    handle = model.model.layers[1].register_forward_hook(hook)
    with ctkvr.connect(killable.address) as client, cached(model, client, **EXACT) as cache:
        assert generate(model, ids, TOKENS, cache=cache).tolist() == expected.tolist()
        assert killable.kills == 1
        assert len(cache.recoveries) == 1
    handle.remove()


def test_a_kill_before_a_turn_of_several_messages(killable: Killable) -> None:
    model, ids = make("llama"), text(200)
    with ctkvr.connect(killable.address) as client, cached(model, client, **EXACT) as cache:
        said = torch.cat([generate(model, ids, 10, cache=cache), text(150, seed=3)], dim=1)
        killable.kill()
        assert generate(model, said, 10, cache=cache).tolist() == generate(model, said, 10).tolist()
        assert len(cache.recoveries) == 1


def test_a_kill_before_crop(killable: Killable) -> None:
    model, ids = make("llama"), text(200)
    with ctkvr.connect(killable.address) as client, cached(model, client, **EXACT) as cache:
        said = generate(model, ids, 10, cache=cache)
        killable.kill()
        cache.crop(-40)
        assert cache.sessions[0].info().layers[0].length == 209 - 40
        other = torch.cat([said[:, :169], text(3, seed=3)], dim=1)
        assert generate(model, other, 10, cache=cache).tolist() == generate(model, other, 10).tolist()


def test_a_session_that_somebody_closed_is_filled_again(killable: Killable) -> None:
    model, ids = make("llama"), text(200)
    with ctkvr.connect(killable.address) as client, cached(model, client, **EXACT) as cache:

        def close() -> None:
            client.attach_session(cache.sessions[0].id).close()

        found = generate(model, ids, 20, cache=cache, stopping_criteria=[At(210, close)])
        assert found.tolist() == generate(model, ids, 20).tolist()
        assert len(cache.recoveries) == 1


def test_a_connection_that_breaks_costs_no_session(killable: Killable) -> None:
    model, ids = make("llama"), text(200)
    with (
        Proxy(killable.address, cut_after_bytes=225_000) as proxy,
        ctkvr.connect(proxy.address) as client,
        cached(model, client, **EXACT) as cache,
    ):
        found = generate(model, ids, 20, cache=cache)
        assert proxy.cuts_done == 1
        assert found.tolist() == generate(model, ids, 20).tolist()
        assert cache.sessions[0].info().layers[0].length == 219


def test_what_is_not_kept_ends_with_an_error(killable: Killable) -> None:
    model, ids = make("llama"), text(200)
    written: list[int] = []
    with ctkvr.connect(killable.address) as client, cached(model, client, **EXACT, keep=False) as cache:
        stops = [At(205, killable.kill), At(206, lambda: written.append(206))]
        with pytest.raises(SessionLost):
            generate(model, ids, 20, cache=cache, stopping_criteria=stops)
        assert cache.kept_bytes < 100_000
    assert not written
    with ctkvr.connect(killable.address) as client, cached(model, client, **EXACT, keep=False) as cache:
        assert generate(model, ids, 20, cache=cache).tolist() == generate(model, ids, 20).tolist()
        assert cache.kept_bytes == 0


def test_a_server_that_stays_away_ends_with_an_error(killable: Killable) -> None:
    model, ids = make("llama"), text(200)
    with ctkvr.connect(killable.address) as client, cached(model, client, **EXACT, patience=0.5) as cache:
        with pytest.raises(Unavailable):
            generate(model, ids, 20, cache=cache, stopping_criteria=[At(205, lambda: killable.kill(restart=False))])
        killable.server = Server(address=killable.address)
