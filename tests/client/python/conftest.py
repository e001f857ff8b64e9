# SPDX-License-Identifier: Apache-2.0
"""What the tests share: a server, clients of both kinds, a session of two layers, random tokens."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from typing import Any

import ctkvr
import numpy as np
import numpy.typing as npt
import pytest

from server import SMALL_ENGINE, Server
from twins import Connect, connector

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, TOKEN_LIMIT = 2, 4, 2, 32, 16, 4096
GEOMETRY: dict[str, Any] = {
    "layers": LAYERS,
    "q_heads": Q_HEADS,
    "kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "value_dim": VALUE_DIM,
    "dtype": "float32",
    "token_limit": TOKEN_LIMIT,
}

SEED = int(os.environ.get("CTKVR_TEST_SEED") or random.SystemRandom().getrandbits(32))


def pytest_report_header() -> str:
    return f"CTKVR_TEST_SEED={SEED}"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(SEED)


Array = npt.NDArray[np.float32]


class Tokens:
    """Random keys [n, kv_heads, head_dim], values [n, kv_heads, value_dim] and queries [n, q_heads, head_dim]."""

    def __init__(self, rng: np.random.Generator, tokens: int) -> None:
        self.keys: Array = rng.standard_normal((tokens, KV_HEADS, HEAD_DIM), np.float32)
        self.values: Array = rng.standard_normal((tokens, KV_HEADS, VALUE_DIM), np.float32)
        self.queries: Array = rng.standard_normal((tokens, Q_HEADS, HEAD_DIM), np.float32)


@pytest.fixture
def tokens(rng: np.random.Generator) -> Tokens:
    return Tokens(rng, 700)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as serving:
        yield serving


@pytest.fixture(scope="session", params=["server", "embedded"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a service answers: a server of its own process, then an engine in this one."""
    if request.param == "server":
        serving: Server = request.getfixturevalue("server")
        yield serving.address
    else:
        with ctkvr.connect(SMALL_ENGINE):  # open as long as tests come and go
            yield "embedded://small"


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture(params=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest, loop: asyncio.AbstractEventLoop) -> Connect:
    asyncio.set_event_loop(loop)  # asyncio.run, of a test before, has left none
    return connector(request.param, loop)


@pytest.fixture
def client(connect: Connect, address: str) -> Iterator[Any]:
    with connect(address) as connected:
        yield connected


@pytest.fixture
def session(client: Any) -> Iterator[Any]:
    """Stored in float32: what comes back is what went in."""
    selection = ctkvr.Selection(source="exact", sink_tokens=2, window_tokens=2, dense_below_tokens=0)
    with client.open_session(**GEOMETRY, format="f32", selection=selection) as opened:
        yield opened
