# SPDX-License-Identifier: Apache-2.0
"""Tokens and quotas through both clients, against a server with access control; its log never holds a token."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ctkvr
import pytest
from ctkvr import errors
from ctkvr.channel import token_metadata

from conftest import GEOMETRY, Tokens
from server import Server
from twins import Connect

RED, BLUE, UNKNOWN = "ctkvr_red-70b4c2", "ctkvr_blue-1f93aa", "ctkvr_unknown-5d00e1"
ONCE = ctkvr.RetryOptions(attempts_max=1)


def tenant(name: str, token: str, more: str = "") -> str:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f'[[tenant]]\nname = "{name}"\ntokens = [{{sha256 = "{digest}"}}]\n{more}\n'


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Server]:
    file = tmp_path / "access.toml"
    file.write_text(tenant("red", RED) + tenant("blue", BLUE, "sessions = 1"))
    with Server(f"--access_file={file}") as server:
        yield server
        server.stop()
        assert not any(token in line for line in server.lines() for token in (RED, BLUE, UNKNOWN))


def test_a_token_opens_the_door_and_shows_its_own_sessions_alone(
    connect: Connect, guarded: Server, tokens: Tokens
) -> None:
    for missing in ({}, {"token": UNKNOWN}):
        with pytest.raises(errors.NotAuthenticated) as refused:
            connect(guarded.address, retry=ONCE, **missing)
        assert "no valid token" in refused.value.message
    with (
        connect(guarded.address, token=RED) as red,
        connect(guarded.address, token=BLUE) as blue,
        red.open_session(**GEOMETRY, session_id="s", format="f32") as session,
    ):
        session.append(0, tokens.keys, tokens.values)
        with session.decode(k=8, answer="ids") as stream:
            result = stream.step(0, tokens.keys[0], tokens.values[0], tokens.queries[0])
            assert result.length == len(tokens.keys) + 1
        assert [entry.session_id for entry in red.list_sessions()] == ["s"]
        assert blue.list_sessions() == []
        with pytest.raises(errors.SessionLost) as unknown:
            blue.attach_session("s")
        assert unknown.value.reason == "SESSION_UNKNOWN"


def test_a_quota_is_an_error_of_its_own(connect: Connect, guarded: Server) -> None:
    with connect(guarded.address, token=BLUE, retry=ONCE) as blue, blue.open_session(**GEOMETRY):
        with pytest.raises(errors.QuotaExceeded) as refused:
            blue.open_session(**GEOMETRY)
        assert refused.value.reason == "SESSION_QUOTA"
        assert refused.value.retry_after == 1.0


def test_a_token_does_not_cross_a_network_in_the_clear(connect: Connect) -> None:
    for address in ("cache.example:7420", "10.0.0.1:7420", "127.example.org:1", "dns:///127.0.0.1:1"):
        with pytest.raises(ValueError, match="unencrypted"):
            connect(address, token=RED)
        assert token_metadata(address, None, RED, allow_plaintext=True) == (("authorization", f"Bearer {RED}"),)
    for address in ("127.0.0.1:7420", "localhost:7420", "[::1]:7420", "unix:/run/ctkvr.sock"):
        assert token_metadata(address, None, RED, allow_plaintext=False)
    for wrong in ("", "two words", "line\n", "ümlaut"):
        with pytest.raises(ValueError, match="no token"):
            connect("127.0.0.1:7420", token=wrong)


def test_every_code_of_access_has_its_class() -> None:
    kinds: dict[str, Any] = {"UNAUTHENTICATED": errors.NotAuthenticated, "PERMISSION_DENIED": errors.NotAllowed}
    for code, kind in kinds.items():
        assert type(errors.make_error(code, "text")) is kind
    for reason in ("MEMORY_QUOTA", "SESSION_QUOTA", "QUEUE_QUOTA", "RATE_QUOTA"):
        assert type(errors.make_error("RESOURCE_EXHAUSTED", "text", reason)) is errors.QuotaExceeded
