# SPDX-License-Identifier: Apache-2.0
"""The runbook's figures are what the calculator says."""

import json
import re
from typing import Any

import pytest

from tools import DEPLOY, parse_bytes, program, run


def size(*flags: str, model: str = "llama-3-8b", tokens: str = "96k") -> dict[str, Any]:
    """What `ctkvr-cli size` says of a model's session."""
    printed = run(program("CTKVR_CLI"), "--json", "size", "--model", model, "--tokens", tokens, *flags)
    report: dict[str, Any] = json.loads(printed)
    return report


@pytest.mark.parametrize(
    ("row", "flags", "key"),
    [
        ("keys and values in f16", [], "f16_bytes"),
        ("the same in f32", [], "f32_bytes"),
        ("a session in `k8v4`", [], "session_bytes"),
        ("a session in `k6v4`", ["--format", "k6v4"], "session_bytes"),
        ("32 sessions in `k8v4`, with 8 lanes", ["--sessions", "32", "--lanes", "8"], "server_bytes"),
    ],
)
def test_the_runbooks_sizes_are_computed(row: str, flags: list[str], key: str) -> None:
    """To the digits that it prints."""
    stated = re.search(rf"^\| {re.escape(row)}.*\| ([0-9.]+) GiB \|$", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    assert stated
    digits = len(stated.group(1).partition(".")[2])
    assert f"{size(*flags)[key] / 2**30:.{digits}f}" == stated.group(1)


def test_the_runbooks_capacities_and_costs_are_computed() -> None:
    """Of the arena that overlay cpu has, at the price that the text names."""
    runbook = (DEPLOY / "README.md").read_text()
    arena = re.search(
        r'^arena_bytes = "(.*)"', (DEPLOY / "kubernetes/overlays/cpu/ctkvrd.toml").read_text(), re.MULTILINE
    )
    stated = re.search(r"sessions in the (\d+) GiB of overlay `cpu`, .*\nhere ([0-9.]+) of", runbook)
    assert arena
    assert stated
    arena_bytes = parse_bytes(arena.group(1))
    assert arena_bytes == int(stated.group(1)) * 2**30
    rows = re.findall(
        r"^\| ([a-z0-9.-]+) \| (\d+k) \| `(\w+)` \| ([0-9.]+) GiB \| (\d+) \| ([0-9.]+) \|$", runbook, re.MULTILINE
    )
    assert len(rows) == 6
    for model, tokens, form, session, sessions, price in rows:
        session_bytes = size("--format", form, model=model, tokens=tokens)["session_bytes"]
        fits = arena_bytes // session_bytes
        cost = float(stated.group(2)) / fits
        assert (f"{session_bytes / 2**30:.1f}", str(fits), f"{cost:.3f}") == (session, sessions, price), (model, tokens)


def test_a_wrong_model_is_refused_with_the_known_ones() -> None:
    """Exit code 2, as for any wrong command line; no server is asked."""
    printed = run(program("CTKVR_CLI"), "--address", "127.0.0.1:1", "size", "--model", "llama-9", status=2)
    assert "llama-3-8b" in printed
