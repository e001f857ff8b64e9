# SPDX-License-Identifier: Apache-2.0
"""The table of comparison systems, on the trace of this repository."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from ctkvr_eval import comparison_table
from ctkvr_eval.selectors.dense import ExactTopK
from ctkvr_eval.selectors.parts import Chosen

TRACE = Path(__file__).parents[2] / "traces" / "records-layer07"


def test_measures_as_loops_do() -> None:
    (trace,) = comparison_table.heads_of(TRACE, 64, 128, 1)
    index = ExactTopK(trace.prompt.keys, trace.prompt.scale)
    sums = comparison_table.Sums([], [])
    comparison_table.measure(trace, index, 64, sums)
    masses, errors, needles = [], [], 0
    for step, mask in enumerate(index.choose(trace.queries, 64).mask):
        kept = np.ones(int(trace.positions[step]) + 1, bool)
        kept[4 : trace.tokens - 64] = mask
        for query in trace.queries[step]:
            weights = np.exp(trace.keys[: len(kept)].astype(np.float64) @ query * trace.prompt.scale)
            full = weights @ trace.values[: len(kept)] / weights.sum()
            part = (weights * kept) @ trace.values[: len(kept)] / (weights * kept).sum()
            masses.append((weights * kept).sum() / weights.sum())
            errors.append(np.linalg.norm(part - full) / np.linalg.norm(full))
            needles += int((weights[4 : trace.tokens - 64] > 0.1 * weights.sum()).sum())
    assert sums.steps == len(trace.queries)
    assert sums.mass / sums.steps == pytest.approx(np.mean(masses), abs=1e-4)
    assert sums.error / sums.steps == pytest.approx(np.mean(errors), abs=1e-4)
    assert sum(sums.needles) == sum(sums.found) == needles > 0


def test_weights_and_estimates_enter_the_error() -> None:
    (trace,) = comparison_table.heads_of(TRACE, 64, 256, 1)

    class Everything:
        """All tokens: by weights that are none, the attention is full."""

        memory_bytes = 0

        def choose(self, queries: np.ndarray[tuple[int, ...], np.dtype[np.float32]], k: int) -> Chosen:
            mask = np.ones((len(queries), len(trace.prompt.keys)), bool)
            bias = np.full((*queries.shape[:2], mask.shape[1]), k, np.float32)
            return Chosen(mask, np.zeros(len(queries), np.int64), bias=bias)

    errors = []
    for k in (0, 3):
        sums = comparison_table.Sums([], [])
        comparison_table.measure(trace, Everything(), k, sums)
        errors.append(sums.error / sums.steps)
    assert errors[0] < 1e-5
    assert errors[1] > 1e-2


def test_writes_a_table_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(TRACE), "--methods", "exact,quest+remainder", "--k", "64,256", "--every", "128"]
    assert comparison_table.main([*arguments, "--csv", str(tmp_path / "rows.csv")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["k"]) for row in rows] == [
        ("exact", "64"),
        ("exact", "256"),
        ("quest+remainder", "64"),
        ("quest+remainder", "256"),
    ]
    assert all(float(row["needle"]) == 1 for row in rows[:2])


def test_refuses_a_second_estimate() -> None:
    with pytest.raises(ValueError, match=r"method = 'magicpig\+remainder'"):
        comparison_table.builder_of("magicpig+remainder")
