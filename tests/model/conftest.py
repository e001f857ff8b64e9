# SPDX-License-Identifier: Apache-2.0
"""What the tests share: a server with a client, and a torch that keeps to itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ctkvr
import pytest
import torch
from ctkvr.transformers import CtkvrCache

from models import SEED, WINDOW
from server import Server

EXACT: dict[str, Any] = {"format": "f32", "source": "dense", "remainder": False}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--questions", default=40, help="look-up questions for the real model; 200 takes some minutes")


def pytest_report_header() -> str:
    return f"CTKVR_TEST_SEED={SEED}"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Most models here are too small for more, and what shares the machine would stall two."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as serving:
        yield serving


@pytest.fixture
def client(server: Server) -> Iterator[ctkvr.Client]:
    with ctkvr.connect(server.address) as connected:
        yield connected


class Open:
    """Makes caches that are closed with the test."""

    def __init__(self, client: ctkvr.Client) -> None:
        self._client = client
        self.made: list[CtkvrCache] = []

    def __call__(self, model: Any, **settings: Any) -> CtkvrCache:
        """A cache whose answers are exact unless the settings say otherwise."""
        cache = CtkvrCache(model, self._client, 1024, **{**EXACT, "window": WINDOW, **settings})
        self.made.append(cache)
        return cache


@pytest.fixture
def open_cache(client: ctkvr.Client) -> Iterator[Open]:
    opener = Open(client)
    yield opener
    for cache in opener.made:
        cache.close()
