# SPDX-License-Identifier: Apache-2.0
"""Rows of results: a CSV file that runs add to, and the tables in Markdown that it says."""

from __future__ import annotations

import csv
import math
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ctkvr_eval.evaluate import Outcome
from ctkvr_eval.metrics import Rise, Scores, rise
from ctkvr_eval.texts import Text


@dataclass(frozen=True)
class Row:
    """One method on one text. Rises are over full attention, with their 95 % intervals; NaN: not measured."""

    text: str
    model: str
    method: str
    k: int
    candidates: int  # 0: the method has none, or its default
    dnll: float
    dnll_answers: float
    accuracy: float  # of the answers' tokens, the likeliest token is right
    needle: float
    worst_head: float
    mass: float
    bytes_read: float  # a step, all layers
    bytes_fp16_scan: float
    retrieve_us_p50: float  # a layer and position
    tokens_per_s: float  # as the attention alone would allow
    build_ms: float
    memory_bytes: int
    seed: int
    commit: str
    dnll_low: float
    dnll_high: float
    dnll_answers_low: float
    dnll_answers_high: float
    nll: float
    recall: float
    prompt_tokens: int
    scored_tokens: int

    @property
    def key(self) -> tuple[object, ...]:
        """What a later run of the same replaces."""
        return self.text, self.model, self.method, self.k, self.seed, self.prompt_tokens, self.scored_tokens

    @property
    def share_read(self) -> float:
        """Bytes read over those of a scan."""
        return self.bytes_read / self.bytes_fp16_scan if self.bytes_fp16_scan else math.nan


@dataclass(frozen=True)
class HeadRow:
    """One query head of one run."""

    text: str
    model: str
    method: str
    k: int
    seed: int
    layer: int
    head: int
    needles: int
    found: int
    mass: float
    recall: float

    @property
    def key(self) -> tuple[object, ...]:
        """See Row."""
        return self.text, self.model, self.method, self.k, self.seed, self.layer, self.head


def make_row(
    text: Text, model: str, method: str, k: int, candidates: int, seed: int, outcome: Outcome, base: Scores
) -> Row:
    """base: of full attention on the same text."""
    answers = text.answers >= 0
    whole = rise(outcome.scores.nll, base.nll, seed)
    part = rise(outcome.scores.nll[answers], base.nll[answers], seed)
    choices = outcome.choices
    per_position = np.array(outcome.layer_seconds) / text.scored
    return Row(
        text=text.name,
        model=model,
        method=method,
        k=k,
        candidates=candidates,
        dnll=whole.mean,
        dnll_answers=part.mean,
        accuracy=float(outcome.scores.correct[answers].mean()) if answers.any() else math.nan,
        needle=choices.needle(),
        worst_head=choices.worst_head(),
        mass=choices.mean("mass") if choices.layers else math.nan,
        bytes_read=outcome.bytes_read,
        bytes_fp16_scan=outcome.bytes_scan,
        retrieve_us_p50=float(np.median(per_position)) * 1e6 if len(per_position) else math.nan,
        tokens_per_s=1 / float(per_position.sum()) if per_position.sum() else math.nan,
        build_ms=outcome.build_seconds * 1e3,
        memory_bytes=outcome.memory_bytes,
        seed=seed,
        commit=commit(),
        dnll_low=whole.low,
        dnll_high=whole.high,
        dnll_answers_low=part.low,
        dnll_answers_high=part.high,
        nll=float(outcome.scores.nll.mean()),
        recall=choices.mean("recall") if choices.layers else math.nan,
        prompt_tokens=len(text.prompt),
        scored_tokens=text.scored,
    )


def head_rows(row: Row, outcome: Outcome) -> list[HeadRow]:
    """Every head that was compared."""
    return [
        HeadRow(row.text, row.model, row.method, row.k, row.seed, layer, head, int(n), int(f), float(m), float(r))
        for layer, counts in outcome.choices.layers.items()
        for head, (n, f, m, r) in enumerate(zip(counts.needles, counts.found, counts.mass, counts.recall, strict=True))
    ]


def commit() -> str:
    """Of the working tree this stands in, with "+" where it differs; "" outside one."""
    folder = Path(__file__).parent

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    return name + (
        "+" if name and git("status", "--porcelain", "--untracked-files=no", ":/server", ":/kernels") else ""
    )


# ---- Files -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[Row]:
    """The rows of a file; none where there is none."""
    if not path.is_file():
        return []
    kinds = {field.name: str(field.type) for field in fields(Row)}
    make: Any = Row
    with path.open(newline="") as file:
        return [
            make(**{name: _parsed(kinds[name], text) for name, text in row.items()}) for row in csv.DictReader(file)
        ]


def _parsed(kind: str, text: str) -> object:
    if kind == "int":
        return int(text)
    return (float(text) if text else math.nan) if kind == "float" else text


def add(path: Path, rows: Sequence[Row] | Sequence[HeadRow]) -> None:
    """Writes rows behind those of the file, in place of older ones of the same key."""
    if not rows:
        return
    names = [field.name for field in fields(rows[0])]
    new = {tuple(map(str, row.key)): {name: _text(value) for name, value in asdict(row).items()} for row in rows}
    kept: list[dict[str, str]] = []
    if path.is_file():
        keyed = _key_names(rows[0])
        with path.open(newline="") as file:
            kept = [row for row in csv.DictReader(file) if tuple(row[name] for name in keyed) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *new.values()])


def _key_names(row: Row | HeadRow) -> tuple[str, ...]:
    if isinstance(row, Row):
        return "text", "model", "method", "k", "seed", "prompt_tokens", "scored_tokens"
    return "text", "model", "method", "k", "seed", "layer", "head"


def _text(value: object) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return str(value)


# ---- Markdown --------------------------------------------------------------------------------------------------------


def table(rows: Iterable[Row]) -> str:
    """Sorted by text, then by dNLL's method and k as they come."""
    lines = [
        "| text | method | K | read | dNLL | answers | accuracy | needle | worst head | mass | recall |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    dnll = _rise(Rise(row.dnll, row.dnll_low, row.dnll_high))
    answers = _rise(Rise(row.dnll_answers, row.dnll_answers_low, row.dnll_answers_high))
    cells = [row.text, f"`{row.method}`", str(row.k), _share(row.share_read), dnll, answers]
    cells += [_number(value, 3) for value in (row.accuracy, row.needle, row.worst_head, row.mass, row.recall)]
    return "| " + " | ".join(cells) + " |"


def _share(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:.1f} %"


def _number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def _rise(value: Rise) -> str:
    if math.isnan(value.mean):
        return ""
    return f"{value.mean:+.4f}{' (tie)' if value.tie else ''}"
