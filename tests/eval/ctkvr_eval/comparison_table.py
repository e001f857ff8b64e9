# SPDX-License-Identifier: Apache-2.0
"""All comparison systems on recorded traces: at equal K and at equal bytes, with and without remainder.

    python -m ctkvr_eval.comparison_table TRACE... [--methods quest,...] [--k 64,128,256] [--every 4] [--csv FILE]

A trace is a folder as `ctkvr-cli replay` reads it. Indexes are built from the prompt; sinks (4), the prompt's last 64
tokens and what was decoded are always attended. Columns: needle share and that of the worst head with at least 20
needles, attention kept, error of the output (2-norm, relative to full attention's), tokens chosen a KV head, bytes of
index and keys read a step against a scan of all keys in fp16 (whole 64-byte lines), seconds to build all KV heads,
memory of the index against the keys and values in fp16.
"""

from __future__ import annotations

import argparse
import csv
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from ctkvr_eval.attention import Floats
from ctkvr_eval.selectors.clusters import WithRemainder, cluster_keys
from ctkvr_eval.selectors.comparison import BUILDERS, Builder, HeadPrompt
from ctkvr_eval.selectors.parts import FP16, Chosen, Index, Mask, logits_of, softmax

SINKS = 4
WINDOW = 64
NEEDLE_SHARE = 0.1
WORST_HEAD_NEEDLES = 20
STEPS_AT_ONCE = 64
# Methods that estimate, or weigh, what they do not choose.
OWN_ESTIMATE = ("magicpig", "magicpig_150", "retroinfer")


@dataclass(frozen=True)
class HeadTrace:
    """One KV head of a trace."""

    prompt: HeadPrompt
    keys: Floats  # [T, D] of all tokens
    values: Floats  # [T, V]
    queries: Floats  # [S, R, D] of the evaluated steps
    positions: Floats  # [S]: each query's own
    tokens: int  # of the prompt


@dataclass(frozen=True)
class Row:
    """One method on one trace."""

    trace: str
    method: str
    k: int
    needles: int
    needle: float
    worst_head: float
    mass: float
    error: float
    tokens: float
    bytes_read: float  # of a scan
    build_s: float
    memory: float  # of keys and values


def heads_of(folder: pathlib.Path, k: int, every: int, seed: int) -> Iterator[HeadTrace]:
    """The KV heads of a trace."""
    meta = json.loads((folder / "meta.json").read_text())
    q, k_all, v_all = (np.load(folder / f"{name}.npy").astype(np.float32) for name in "qkv")
    tokens, first = int(meta["prompt_tokens"]), int(meta["query_first_position"])
    group = len(q) // len(k_all)
    steps = np.arange(tokens, k_all.shape[1], every)
    free = slice(SINKS, tokens - WINDOW)
    for head, (keys, values) in enumerate(zip(k_all, v_all, strict=True)):
        mine = np.ascontiguousarray(q[head * group : (head + 1) * group].transpose(1, 0, 2))
        known = mine[: tokens - first]
        prompt = HeadPrompt(keys[free], values[free], known, first - SINKS, float(meta["scale"]), seed, k)
        yield HeadTrace(prompt, keys, values, mine[steps - first], steps, tokens)


@dataclass
class Sums:
    """What the steps of all heads add up to."""

    needles: list[int]
    found: list[int]
    mass: float = 0.0
    error: float = 0.0
    tokens: float = 0.0
    bytes_read: float = 0.0
    steps: int = 0


def measure(trace: HeadTrace, index: Index, k: int, sums: Sums) -> None:
    """Adds one KV head's steps to `sums`; its query heads become entries of needles and found."""
    heads = trace.queries.shape[1]
    counts = np.zeros((2, heads), dtype=np.int64)
    for begin in range(0, len(trace.queries), STEPS_AT_ONCE):
        block = slice(begin, begin + STEPS_AT_ONCE)
        chosen = index.choose(trace.queries[block], k)
        logits = logits_of(trace.queries[block], trace.keys, trace.prompt.scale)
        after = np.arange(len(trace.keys)) > trace.positions[block, None]
        logits = np.where(after[:, None], np.float32(-np.inf), logits)
        shares = softmax(logits)
        free = slice(SINKS, trace.tokens - WINDOW)
        taken: Mask = np.broadcast_to(chosen.mask[:, None], shares[:, :, free].shape)
        if chosen.bias is not None:
            taken = chosen.bias > -np.inf
        needles = shares[:, :, free] > NEEDLE_SHARE
        counts += [needles.sum(axis=(0, 2)), (needles & taken).sum(axis=(0, 2))]
        sums.mass += float(1 - np.where(taken, np.float32(0), shares[:, :, free]).sum(axis=-1).mean(axis=1).sum())
        sums.mass += len(logits) - 1
        truth = shares @ trace.values
        output = _attend(logits, trace.values, chosen, taken, free)
        error = np.linalg.norm(output - truth, axis=-1) / np.linalg.norm(truth, axis=-1)
        sums.error += float(error.mean(axis=1).sum())
        sums.tokens += float(chosen.mask.sum())
        sums.bytes_read += float(chosen.bytes_read.sum()) / (trace.prompt.keys.size * FP16)
        sums.steps += len(logits)
    sums.needles += counts[0].tolist()
    sums.found += counts[1].tolist()


def _attend(logits: Floats, values: Floats, chosen: Chosen, taken: Mask, free: slice) -> Floats:
    """Output [S, R, V] over what was chosen and the always-attended, weights and estimate included."""
    logits = logits.copy()
    part = logits[:, :, free]
    if chosen.bias is not None:
        part += np.where(taken, chosen.bias, np.float32(0))
    part[~taken] = -np.inf
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - top)
    total, output = weights.sum(axis=-1), weights @ values
    if chosen.rest is not None:
        more = np.exp(chosen.rest.lse - top[..., 0])
        total, output = total + more, output + more[..., None] * chosen.rest.output
    return np.asarray(output / total[..., None], dtype=np.float32)


def builder_of(method: str) -> Builder:
    """Of one of BUILDERS, or of one with "+remainder" behind it."""
    name, plus, rest = method.partition("+")
    if name not in BUILDERS or (plus and (rest != "remainder" or name in OWN_ESTIMATE)):
        raise ValueError(f"method = {method!r}: one of {', '.join(BUILDERS)}; +remainder where it has no estimate")
    if not plus:
        return BUILDERS[name]

    def build(prompt: HeadPrompt) -> Index:
        return WithRemainder(BUILDERS[name](prompt), cluster_keys(prompt.keys, prompt.values), prompt.scale)

    return build


def run(folder: pathlib.Path, methods: Sequence[str], budgets: Sequence[int], every: int, seed: int) -> Iterator[Row]:
    """Rows of one trace, method by method and K by K. Indexes that do not depend on K are built once a method."""
    for method in methods:
        sums = {k: Sums([], []) for k in budgets}
        build_s = dict.fromkeys(budgets, 0.0)
        memory = dict.fromkeys(budgets, 0.0)
        kept: Index | None = None
        for head, trace in enumerate(heads_of(folder, budgets[0], every, seed)):
            kept = None
            for k in budgets:
                prompt = HeadPrompt(**{**vars(trace.prompt), "k": k})
                if kept is None or method.startswith(("magicpig", "infllm")):
                    start = time.perf_counter()
                    kept = builder_of(method)(prompt)
                    seconds = time.perf_counter() - start
                build_s[k] += seconds
                held = (prompt.keys.size + prompt.values.size) * FP16
                memory[k] += (kept.memory_bytes / held - memory[k]) / (head + 1)
                measure(trace, kept, k, sums[k])
        for k, one in sums.items():
            yield _row(folder.name, method, k, one, build_s[k], memory[k])


def score(sums: Sums) -> tuple[float, float]:
    """Needle share, and that of the worst head with at least WORST_HEAD_NEEDLES."""
    pairs = zip(sums.needles, sums.found, strict=True)
    worst = min((found / count for count, found in pairs if count >= WORST_HEAD_NEEDLES), default=float("nan"))
    needles = sum(sums.needles)
    return sum(sums.found) / needles if needles else float("nan"), worst


def _row(trace: str, method: str, k: int, sums: Sums, build_s: float, memory: float) -> Row:
    share, worst = score(sums)
    mass, error, tokens, read = (value / sums.steps for value in (sums.mass, sums.error, sums.tokens, sums.bytes_read))
    return Row(trace, method, k, sum(sums.needles), share, worst, mass, error, tokens, read, build_s, memory)


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| trace | method | K | needle | worst | mass | error | tokens | read | build s | memory |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        lines.append(
            f"| {row.trace} | {row.method} | {row.k} | {row.needle:.3f} | {row.worst_head:.2f} | {row.mass:.3f} | "
            f"{row.error:.3f} | {row.tokens:.0f} | {row.bytes_read:.3f} | {row.build_s:.1f} | {row.memory:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=pathlib.Path)
    parser.add_argument("--methods", default=",".join(BUILDERS))
    parser.add_argument("--k", default="64,128,256")
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", type=pathlib.Path)
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    for folder in given.traces:
        budgets = [int(k) for k in given.k.split(",")]
        for row in run(folder, given.methods.split(","), budgets, given.every, given.seed):
            rows.append(row)
            sys.stderr.write(table([row]).splitlines()[-1] + "\n")
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    sys.stdout.write(table(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
