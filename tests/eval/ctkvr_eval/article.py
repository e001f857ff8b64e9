# SPDX-License-Identifier: Apache-2.0
"""The article's own figures on recorded traces, as far as traces can say them. README.md sets them side by side.

    python -m ctkvr_eval.article TRACE... [--only stages,...] [--every 4]

stages       K against needles, mass and output error with 1,024 query centroids, and the candidates of each stage
formats      keys and values coded in fewer bits under full attention: output error, and the bytes saved
simhash      tokens left out as near copies of a better candidate: share saved, and what it costs
recency      linspace(0.5, 1.5) over positions as a factor of logits, of shares, and as a term
index_size   bytes of lists and centroids against keys and values, by length

Query cosines by distance, fixed and changing centroids, centroids trained on other texts, centroids among values, and
searches in an eighth of the dimensions: python -m ctkvr_eval.query_centroids.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ctkvr_eval.attention import Floats
from ctkvr_eval.comparison_table import STEPS_AT_ONCE, HeadTrace, Sums, heads_of, measure, score
from ctkvr_eval.selectors.dense import ExactTopK
from ctkvr_eval.selectors.parts import FP16, Chosen, Ids, Mask, group_scores, logits_of, top_mask
from ctkvr_eval.selectors.queries import QueryCentroids

SEED = 1
K = 256
BUDGETS = (128, 256, 512)


# ---- Two stages ------------------------------------------------------------------------------------------------------


def stages(folder: pathlib.Path, every: int) -> Iterator[str]:
    """K at C = 1,024, lists of 1,024 tokens, 8 probes."""
    yield "| trace | K | needle | worst | mass | error | tokens | centroids > candidates > K |"
    yield "|---|---|---|---|---|---|---|---|"
    for k in BUDGETS:
        sums = Sums([], [])
        exact = Sums([], [])
        met: list[float] = []
        for trace in heads_of(folder, k, every, SEED):
            index = QueryCentroids(trace.prompt.keys, trace.prompt.queries, trace.prompt.scale)
            measure(trace, index, k, sums)
            measure(trace, ExactTopK(trace.prompt.keys, trace.prompt.scale), k, exact)
            met.append(float(index.candidates(trace.queries[::4])[0].sum(axis=1).mean()))
        for name, one in (("", sums), (" exact", exact)):
            needle, worst = score(one)
            through = f"1024 > {np.mean(met):.0f} > {k}" if not name else ""
            yield (
                f"| {folder.name}{name} | {k} | {needle:.3f} | {worst:.2f} | {one.mass / one.steps:.3f} | "
                f"{one.error / one.steps:.3f} | {one.tokens / one.steps:.0f} | {through} |"
            )


# ---- Formats ---------------------------------------------------------------------------------------------------------


def coded(rows: Floats, bits: int, run: int = 32) -> Floats:
    """Rows as they decode after uniform coding in runs of 32 with fp16 scale and zero point."""
    parts = rows.reshape(*rows.shape[:-1], -1, min(run, rows.shape[-1]))
    low = parts.min(axis=-1, keepdims=True).astype(np.float16).astype(np.float32)
    step = ((parts.max(axis=-1, keepdims=True) - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint((parts - low) / np.where(step > 0, step, np.float32(1))), 0, 2**bits - 1)
    return np.asarray((low + codes * step).reshape(rows.shape), dtype=np.float32)


def coded_bytes(dim: int, bits: int, run: int = 32) -> float:
    """Of a row."""
    return dim * bits / 8 + 4 * -(-dim // run)


def rotation(dim: int) -> Floats:
    """A random orthogonal matrix: what spreads outliers over a key before it is coded."""
    return np.linalg.qr(np.random.default_rng(SEED).standard_normal((dim, dim)))[0].astype(np.float32)


FORMATS = {"f16": (16, 16), "k8v8": (8, 8), "k8v4": (8, 4), "k6v4": (6, 4), "k4v4": (4, 4)}


def formats(folder: pathlib.Path, every: int) -> Iterator[str]:
    """Full attention; keys centred and rotated before they are coded, as the service does."""
    yield "| trace | format | output error | greatest of a head | saved of fp32 | saved of fp16 |"
    yield "|---|---|---|---|---|---|"
    traces = list(heads_of(folder, K, every, SEED))
    for name, (key_bits, value_bits) in FORMATS.items():
        errors = []
        for trace in traces:
            dim, width = trace.keys.shape[1], trace.values.shape[1]
            turn, mean = rotation(dim), trace.prompt.keys.mean(axis=0)
            keys = trace.keys.astype(np.float16).astype(np.float32)
            values = trace.values.astype(np.float16).astype(np.float32)
            if key_bits < 16:
                keys = np.asarray(coded((trace.keys - mean) @ turn, key_bits) @ turn.T + mean, dtype=np.float32)
                values = coded(trace.values, value_bits)
            errors.append(_output_errors(trace, keys, values))
        by_head = np.concatenate(errors)
        held = (2 * dim + 2 * width) / 1.0
        if key_bits < 16:
            held = coded_bytes(dim, key_bits) + coded_bytes(width, value_bits)
        yield (
            f"| {folder.name} | {name} | {by_head.mean():.4f} | {by_head.max():.4f} | "
            f"{100 * (1 - held / (4 * dim + 4 * width)):.1f} % | {100 * (1 - held / (2 * dim + 2 * width)):.1f} % |"
        )


def _output_errors(trace: HeadTrace, keys: Floats, values: Floats) -> Floats:
    """Of each query head [R]: mean relative error of full attention over other keys and values."""
    errors = []
    for begin in range(0, len(trace.queries), STEPS_AT_ONCE):
        block = slice(begin, begin + STEPS_AT_ONCE)
        after = (np.arange(len(trace.keys)) > trace.positions[block, None])[:, None]
        outputs = []
        for held, weighed in ((trace.keys, trace.values), (keys, values)):
            logits = np.where(after, np.float32(-np.inf), logits_of(trace.queries[block], held, trace.prompt.scale))
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            outputs.append(weights @ weighed / weights.sum(axis=-1, keepdims=True))
        errors.append(np.linalg.norm(outputs[1] - outputs[0], axis=-1) / np.linalg.norm(outputs[0], axis=-1))
    return np.asarray(np.concatenate(errors).mean(axis=0), dtype=np.float32)


# ---- SimHash ---------------------------------------------------------------------------------------------------------


class Deduplicated:
    """Exact top-K among `candidates`, but for those whose key's sign hash is near that of a better one.

    Args:
        keys: [N, D].
        scale: of the softmax.
        most: bits of 64 in which hashes may differ and still count as copies.
        candidates: the best ones, which are looked at.

    """

    memory_bytes = 0

    def __init__(self, keys: Floats, scale: float, most: int, candidates: int = 1024) -> None:
        self._keys = keys
        self._scale = scale
        self._most = most
        self._candidates = candidates
        signs = np.random.default_rng(SEED).standard_normal((keys.shape[1], 64)).astype(np.float32)
        self._bits = np.where((keys - keys.mean(axis=0)) @ signs > 0, np.float32(1), np.float32(-1))
        self.dropped: list[int] = []

    def choose(self, queries: Floats, k: int) -> Chosen:
        """Best first; a candidate that is dropped makes room for the next."""
        scores = group_scores(logits_of(queries, self._keys, self._scale))
        order = np.argsort(-scores, axis=1, kind="stable")[:, : self._candidates]
        mask = np.zeros(scores.shape, dtype=np.bool_)
        for step, ids in enumerate(order):
            kept, dropped = self.kept(ids, k)
            mask[step, kept] = True
            self.dropped.append(dropped)
        return Chosen(mask, np.full(len(queries), self._keys.size * FP16))

    def kept(self, ids: Ids, k: int) -> tuple[list[int], int]:
        """The first k of ids that are no copy of an earlier one, and how many were passed over for them."""
        bits = self._bits[ids]
        copies = (64 - bits @ bits.T) / 2 <= self._most
        kept: list[int] = []
        for at in range(len(ids)):
            if not copies[at, kept].any():
                kept.append(at)
                if len(kept) == k:
                    break
        return [int(ids[at]) for at in kept], at + 1 - len(kept)


def simhash(folder: pathlib.Path, every: int) -> Iterator[str]:
    """A cosine of 0.93 is an angle of 0.376, 7.7 of 64 bits on average; 0.93 of 64 bits equal are at most 4 others."""
    yield "| trace | copies | passed over | of those looked at | needle | worst | mass | error |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, most in (("none", -1), ("Hamming <= 4", 4), ("Hamming <= 7 (cosine 0.93)", 7)):
        sums = Sums([], [])
        dropped: list[int] = []
        for trace in heads_of(folder, K, 2 * every, SEED):
            index = Deduplicated(trace.prompt.keys, trace.prompt.scale, most)
            measure(trace, index, K, sums)
            dropped += index.dropped
        needle, worst = score(sums)
        lost = float(np.mean(dropped))
        yield (
            f"| {folder.name} | {name} | {lost:.0f} | {100 * lost / (lost + K):.1f} % | {needle:.3f} | {worst:.2f} | "
            f"{sums.mass / sums.steps:.3f} | {sums.error / sums.steps:.3f} |"
        )


# ---- Recency ---------------------------------------------------------------------------------------------------------


def as_factor_of_logits(logits: Floats, weights: Floats) -> Floats:
    """What linspace(0.5, 1.5) times the score does: a negative one falls where the weight is high."""
    return logits * weights


def as_factor_of_shares(logits: Floats, weights: Floats) -> Floats:
    """The same on shares, which are positive."""
    return np.asarray(logits + np.log(weights))


def as_term(logits: Floats, weights: Floats) -> Floats:
    """The weight less one, added."""
    return logits + (weights - np.float32(1))


class Recent:
    """Top-K by logits that `change` has weighed by position."""

    memory_bytes = 0

    def __init__(self, keys: Floats, scale: float, change: Callable[[Floats, Floats], Floats]) -> None:
        self._keys = keys
        self._scale = scale
        self._change = change
        self._weights = np.linspace(0.5, 1.5, len(keys)).astype(np.float32)

    def choose(self, queries: Floats, k: int) -> Chosen:
        """Only the ranking is weighed."""
        logits = self._change(logits_of(queries, self._keys, self._scale), self._weights)
        mask: Mask = top_mask(group_scores(np.asarray(logits, dtype=np.float32)), k)
        return Chosen(mask, np.full(len(queries), self._keys.size * FP16))


def recency(folder: pathlib.Path, every: int) -> Iterator[str]:
    """Ranking alone; attention over what is chosen stays as it is."""
    yield "| trace | recency | needle | worst | mass | error |"
    yield "|---|---|---|---|---|---|"
    changes: dict[str, Callable[[Floats, Floats], Floats]] = {
        "none": lambda logits, weights: logits,
        "factor of logits": as_factor_of_logits,
        "factor of shares": as_factor_of_shares,
        "term": as_term,
    }
    for name, change in changes.items():
        sums = Sums([], [])
        for trace in heads_of(folder, K, every, SEED):
            measure(trace, Recent(trace.prompt.keys, trace.prompt.scale, change), K, sums)
        needle, worst = score(sums)
        yield (
            f"| {folder.name} | {name} | {needle:.3f} | {worst:.2f} | {sums.mass / sums.steps:.3f} | "
            f"{sums.error / sums.steps:.3f} |"
        )


# ---- Size ------------------------------------------------------------------------------------------------------------


def index_size(folder: pathlib.Path, every: int) -> Iterator[str]:
    """Counted: fp16 centroids of the group, and lists of ids packed in as few bits as the length asks for."""
    yield "| tokens | C | list | index of KV in fp16, group 3, head_dim 64 | group 4, head_dim 128 |"
    yield "|---|---|---|---|---|"
    for tokens in (8192, 16384, 98304, 131072, 1048576):
        for centroids, listed in ((256, 512), (1024, 1024)):
            shares = []
            for group, dim in ((3, 64), (4, 128)):
                bits = (tokens - 1).bit_length()
                held = centroids * (FP16 * group * dim + listed * bits / 8)
                shares.append(f"1/{2 * FP16 * tokens * dim / held:.1f}")
            yield f"| {tokens} | {centroids} | {listed} | {shares[0]} | {shares[1]} |"


PARTS: dict[str, Callable[[pathlib.Path, int], Iterator[str]]] = {
    "stages": stages,
    "formats": formats,
    "simhash": simhash,
    "recency": recency,
    "index_size": index_size,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=pathlib.Path)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--every", type=int, default=4)
    given = parser.parse_args(arguments)
    for name in given.only.split(","):
        # Sizes are the same for all traces.
        for number, folder in enumerate(given.traces[:1] if name == "index_size" else given.traces):
            for line, row in enumerate(PARTS[name](folder, given.every)):
                if number == 0 or line > 1:
                    sys.stdout.write(row + "\n")
                    sys.stdout.flush()
        sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
