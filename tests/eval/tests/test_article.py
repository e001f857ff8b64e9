# SPDX-License-Identifier: Apache-2.0
"""The article's figures on the trace of this repository: what each part computes, not what comes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ctkvr_eval import article
from ctkvr_eval.selectors.dense import ExactTopK

TRACE = Path(__file__).parents[2] / "traces" / "records-layer07"


def test_coding_is_within_half_a_step_and_exact_at_both_ends() -> None:
    rows = np.random.default_rng(3).standard_normal((50, 64)).astype(np.float32)
    rows[0] = 0
    rows[1, :32] = 7
    for bits in (4, 6, 8):
        found = article.coded(rows, bits)
        runs = rows.reshape(50, 2, 32)
        step = (runs.max(axis=-1) - runs.min(axis=-1)) / (2**bits - 1)
        # Half a step, and what fp16 loses of zero point and step.
        allowed = 0.5 * step + 4e-3 * np.abs(runs).max(axis=-1)
        assert (np.abs(found - rows).reshape(50, 2, 32).max(axis=-1) <= allowed).all()
        np.testing.assert_array_equal(found[0], 0)
        np.testing.assert_array_equal(found[1, :32], 7)
    assert article.coded_bytes(64, 4) == 32 + 8


def test_deduplication_keeps_the_better_of_near_copies() -> None:
    rng = np.random.default_rng(4)
    keys = rng.standard_normal((60, 16)).astype(np.float32)
    keys[1], keys[2] = keys[0] * np.float32(1.001), keys[0] * np.float32(0.999)
    queries = keys[None, :1] * np.float32(3)
    index = article.Deduplicated(keys, 0.5, most=0)
    mask = index.choose(queries, 5).mask[0]
    assert mask[1]
    assert not mask[0]
    assert not mask[2]
    assert mask.sum() == 5
    assert index.dropped == [2]
    plain = article.Deduplicated(keys, 0.5, most=-1).choose(queries, 5).mask
    assert (plain == ExactTopK(keys, 0.5).choose(queries, 5).mask).all()


def test_a_factor_pushes_negative_logits_the_wrong_way() -> None:
    logits = np.full(5, -2, np.float32)
    weights = np.linspace(0.5, 1.5, 5).astype(np.float32)
    assert article.as_factor_of_logits(logits, weights).argmax() == 0
    assert article.as_factor_of_shares(logits, weights).argmax() == 4
    assert article.as_term(logits, weights).argmax() == 4
    np.testing.assert_allclose(
        np.exp(article.as_factor_of_shares(logits, weights)), weights * np.exp(logits), rtol=1e-6
    )


def test_prints_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert article.main([str(TRACE), "--every", "128"]) == 0
    printed = capsys.readouterr().out
    tables = printed.strip().split("\n\n")
    assert len(tables) == len(article.PARTS)
    rows = {line.split("|")[2].strip(): line.split("|")[3:] for line in tables[1].splitlines()}
    errors = [float(rows[name][0]) for name in ("f16", "k8v8", "k8v4", "k4v4")]
    assert errors == sorted(errors)
    assert rows["k8v4"][2].strip() == "78.1 %"  # 80 + 40 bytes of 512
