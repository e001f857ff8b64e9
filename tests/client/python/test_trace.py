# SPDX-License-Identifier: Apache-2.0
"""The trace context that a client was given goes with its calls, as the server's log lines show."""

from __future__ import annotations

import asyncio
from typing import Any

import ctkvr
import ctkvr.aio
import pytest
from ctkvr.channel import trace_metadata

from server import Server

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"
GEOMETRY: dict[str, Any] = {
    "layers": 1,
    "q_heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "dtype": "float32",
    "token_limit": 64,
}


def access_lines(server: Server, methods: set[str]) -> dict[str, dict[str, object]]:
    """The access line of one call of each method."""
    return {method: server.await_event("access", f'"method":"{method}"') for method in methods}


def blocking(server: Server) -> None:
    """A call of each kind."""
    with ctkvr.connect(server.address, traceparent=lambda: TRACEPARENT) as client:
        session = client.open_session(**GEOMETRY)
        stream = session.decode()
        stream.close()


async def awaiting(server: Server) -> None:
    """The same."""
    async with await ctkvr.aio.connect(server.address, traceparent=lambda: TRACEPARENT) as client:
        session = await client.open_session(**GEOMETRY)
        stream = session.decode()
        await stream.close()


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_call_carries_its_trace(kind: str) -> None:
    """Unary calls and streams alike."""
    server = Server()
    try:
        if kind == "blocking":
            blocking(server)
        else:
            asyncio.run(awaiting(server))
        for method, line in access_lines(server, {"GetServerInfo", "OpenSession", "Decode"}).items():
            assert (line["trace_id"], line["span_id"]) == (TRACE, SPAN), method
    finally:
        server.stop()


@pytest.mark.parametrize("text", [None, "", "00-zz", TRACEPARENT + "\n", "00-" + "é" * 52])
def test_what_is_no_trace_is_left_out(text: str | None) -> None:
    """GRPC would refuse the call for some of these."""
    assert trace_metadata(lambda: text) == ()


def test_nobody_is_asked_where_nobody_was_named() -> None:
    """The default."""
    assert trace_metadata(None) == ()
