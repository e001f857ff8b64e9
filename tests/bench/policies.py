# SPDX-License-Identifier: Apache-2.0
"""What each policy of a session does to a selection, on traces of a real model, without the server.

Every row is the mean over the traces: share of the needles chosen (tokens between sinks and window of more than 10 % of
the full attention), the same for the worst head of at least 20, attention kept, relative error of the attention
output over the chosen tokens, tokens chosen and tokens scored with whole keys.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SINKS, WINDOW, K, CANDIDATES, KEEP, NEEDLE = 4, 64, 256, 512, 0.2, 0.1


@dataclass
class Head:
    """Keys and values of one KV head, and what the service stores of the keys."""

    keys: Array  # [T, D]
    values: Array
    rotation: Array
    sketches: tuple[Array, Array]  # [T, D] decoded from the first 2 and 4 planes of 8
    mean: Array
    signs: Array  # [T, D / 8] sign plane, packed
    separate: Array  # [T, 8] SimHash of 64 random planes of the keys as they come


def make_head(keys: Array, values: Array, random: np.random.Generator) -> Head:
    dim = keys.shape[1]
    rotation = np.linalg.qr(random.standard_normal((dim, dim)))[0].astype(np.float32)
    mean = keys[SINKS : SINKS + 512].mean(0)
    codes = (keys - mean) @ rotation.T
    planes = random.standard_normal((dim, 64)).astype(np.float32)
    return Head(
        keys=keys,
        values=values,
        rotation=rotation,
        sketches=(quantised(codes, 2), quantised(codes, 4)),
        mean=mean,
        signs=np.packbits(codes > 0, axis=1),
        separate=np.packbits(keys @ planes > 0, axis=1),
    )


def quantised(codes: Array, planes: int) -> Array:
    """The first planes of 8-bit codes, scaled so that the estimate is unbiased."""
    largest = np.abs(codes).max(1, keepdims=True) + 1e-20
    half = 2.0 ** (planes - 1)
    levels = np.clip(np.floor(codes / largest * half), -half, half - 1) + 0.5
    scale = (codes * codes).sum(1, keepdims=True) / (codes * levels).sum(1, keepdims=True)
    found: Array = (levels * scale).astype(np.float32)
    return found


@dataclass
class Policy:
    """What differs from the plain settings."""

    k: int = K
    candidates: int = CANDIDATES
    term: Callable[[Array, int], Array] | None = None  # added to logits to rank; (positions, length)
    term_everywhere: bool = False
    factor: Callable[[Array, int], Array] | None = None  # multiplies logits to rank
    dedup_bits: int = -1
    dedup_hash: str = "signs"
    top_p: float = 1.0
    length: int = 0  # only the last so many tokens are there
    k_of: Callable[[int], int] | None = None
    classes: Callable[[int], Array] | None = None  # of each position
    quotas: dict[int, int] = field(default_factory=dict)
    segment_tokens: int = 0  # only the best segments are searched
    segment_share: float = 1.0
    segment_by: str = "blocks"


@dataclass
class Sums:
    needles: dict[int, list[bool]] = field(default_factory=dict)
    mass: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    scored: list[float] = field(default_factory=list)
    dropped: list[float] = field(default_factory=list)


def group_rank(logits: Array) -> Array:
    """log of the sum over heads of each head's softmax. logits [R, n]."""
    top = logits.max(1, keepdims=True)
    lse = top + np.log(np.exp(logits - top).sum(1, keepdims=True))
    shares = logits - lse
    best = shares.max(0)
    found: Array = best + np.log(np.exp(shares - best).sum(0))
    return found


def best(ranks: Array, count: int) -> Array:
    order = np.argsort(-ranks, kind="stable")
    return order[:count]


def with_quotas(order: Array, classes: Array, policy: Policy, k: int) -> Array:
    """The first k of order, those that fill a class's quota first."""
    first = np.zeros(len(order), bool)
    for c, quota in policy.quotas.items():
        first[np.nonzero(classes[order] == c)[0][:quota]] = True
    return np.concatenate([order[first], order[~first]])[:k]


def chosen_of(ranks: Array, tokens: Array, policy: Policy, count: int) -> Array:
    """The best of tokens, best first, those that fill a quota before all others."""
    if policy.classes is None:
        return tokens[best(ranks, count)]
    return tokens[with_quotas(best(ranks, len(ranks)), policy.classes(10000)[tokens], policy, count)]


def best_segments(
    head: Head, query: Array, free: Array, begin: int, scale: float, ranks: Array, policy: Policy
) -> Array:
    """Of free, the tokens in the best segments: by their best block of 16 mean keys, or by their best estimate."""
    segments = free // policy.segment_tokens
    if policy.segment_by == "blocks":
        blocks = free // 16
        names = np.unique(blocks)
        means = np.stack([head.keys[begin + free[blocks == b]].mean(0) for b in names])
        block_ranks = group_rank(query @ means.T * scale)
        score = block_ranks[np.searchsorted(names, blocks)]
    else:
        score = ranks[free]
    names = np.unique(segments)
    tops = np.array([score[segments == s].max() for s in names])
    opened = names[best(tops, int(np.ceil(policy.segment_share * len(names))))]
    return free[np.isin(segments, opened)]


def deduplicated(head: Head, tokens: Array, policy: Policy) -> Array:
    """Of tokens, best first, those that are not within so many bits of a better one that is kept."""
    hashes = (head.signs if policy.dedup_hash == "signs" else head.separate)[tokens]
    words = np.ascontiguousarray(hashes).view(np.uint64).reshape(len(tokens), -1)
    kept = np.ones(len(tokens), bool)
    for i in range(1, len(tokens)):
        distance = np.bitwise_count(words[:i][kept[:i]] ^ words[i]).sum(1)
        kept[i] = not (distance <= policy.dedup_bits).any()
    return tokens[kept]


class Step:
    """One query of one KV head under one policy. Positions count from the first token that is there."""

    def __init__(self, head: Head, query: Array, end: int, scale: float, policy: Policy) -> None:
        begin = max(0, end - policy.length) if policy.length else 0
        self.head, self.query, self.scale, self.policy = head, query, scale, policy
        self.begin, self.end, self.count = begin, end, end - begin
        positions = np.arange(self.count)
        self.forced = (positions < SINKS) | (positions >= self.count - WINDOW)
        self.free = np.nonzero(~self.forced)[0]
        self.k = policy.k_of(self.count) if policy.k_of else policy.k
        self.logits = query @ head.keys[begin:end].T * scale
        shares = np.exp(self.logits - self.logits.max(1, keepdims=True))
        self.shares = shares / shares.sum(1, keepdims=True)
        self.dropped = 0.0

    def ranks(self, logits: Array, tokens: Array, last: bool = False) -> Array:
        """Of logits [R, tokens]."""
        if self.policy.factor and last:
            logits = logits * self.policy.factor(tokens, self.count)
        if self.policy.term and (last or self.policy.term_everywhere):
            logits = logits + self.policy.term(tokens, self.count)
        return group_rank(logits)

    def with_forced(self, tokens: Array) -> Array:
        return np.concatenate([tokens, np.nonzero(self.forced)[0]])

    def candidates(self) -> Array:
        """What is scored, best first."""
        wanted = max(self.policy.candidates, self.policy.candidates * self.k // K)
        if wanted >= len(self.free):
            return self.free
        rotated = self.query @ self.head.rotation.T
        mean_dot = (self.query @ self.head.mean)[:, None]
        first_keys, second_keys = (sketch[self.begin : self.end] for sketch in self.head.sketches)
        first = self.ranks((rotated @ first_keys.T + mean_dot) * self.scale, np.arange(self.count))
        free = self.free
        if self.policy.segment_tokens:
            free = best_segments(self.head, self.query, free, self.begin, self.scale, first, self.policy)
        kept = max(wanted, int(np.ceil(KEEP * self.count)))
        survivors = chosen_of(first[free], free, self.policy, kept)
        listed = self.with_forced(survivors)
        second = self.ranks((rotated @ second_keys[listed].T + mean_dot) * self.scale, listed)
        found = chosen_of(second[: len(survivors)], survivors, self.policy, wanted)
        if self.policy.dedup_bits >= 0:
            unlike = deduplicated(self.head, found + self.begin, self.policy) - self.begin
            self.dropped = 1 - len(unlike) / len(found)
            return unlike
        return found

    def choose(self, scored: Array) -> Array:
        if self.k + self.forced.sum() >= self.count:
            return self.free
        listed = self.with_forced(scored)
        ranks = self.ranks(self.logits[:, listed], listed, last=True)[: len(scored)]
        chosen = chosen_of(ranks, scored, self.policy, self.k)
        if self.policy.top_p == 1:
            return chosen
        estimated = np.exp(self.logits[:, listed] - self.logits[:, listed].max(1, keepdims=True))
        share = np.zeros(self.count)
        share[listed] = (estimated / estimated.sum(1, keepdims=True)).mean(0)
        reached = share[self.forced].sum() + np.cumsum(share[chosen]) - share[chosen]
        found: Array = chosen[reached < self.policy.top_p]
        return found

    def run(self, sums: Sums, first_head: int) -> None:
        scored = self.candidates()
        chosen = self.choose(scored)
        keep = self.forced.copy()
        keep[chosen] = True
        kept = self.shares[:, keep]
        values = self.head.values[self.begin : self.end]
        output = self.shares @ values
        partial = (kept / kept.sum(1, keepdims=True)) @ values[keep]
        sums.mass.extend(kept.sum(1))
        sums.error.extend(np.linalg.norm(partial - output, axis=1) / np.linalg.norm(output, axis=1))
        sums.chosen.append(float(len(chosen)))
        sums.scored.append(float(len(scored)))
        sums.dropped.append(self.dropped)
        for r, shares in enumerate(self.shares):
            for token in self.free[shares[self.free] > NEEDLE]:
                sums.needles.setdefault(first_head + r, []).append(bool(keep[token]))


def run(trace: Path, policies: dict[str, Policy], every: int, seed: int) -> dict[str, Sums]:
    meta = json.loads((trace / "meta.json").read_text())
    keys, values, queries = (np.load(trace / f"{name}.npy").astype(np.float32) for name in "kvq")
    random = np.random.default_rng(seed)
    group = queries.shape[0] // keys.shape[0]
    prompt, first = meta["prompt_tokens"], meta["query_first_position"]
    result = {name: Sums() for name in policies}
    for kv in range(keys.shape[0]):
        head = make_head(keys[kv], values[kv], random)
        for position in range(prompt, keys.shape[1], every):
            query = queries[kv * group : (kv + 1) * group, position - first]
            for name, policy in policies.items():
                Step(head, query, position + 1, meta["scale"], policy).run(result[name], kv * group)
    return result


def recency(low: float, high: float) -> Callable[[Array, int], Array]:
    return lambda t, n: np.log(low + (high - low) * t / max(n - 1, 1)).astype(np.float32)


def recency_factor(low: float, high: float) -> Callable[[Array, int], Array]:
    return lambda t, n: (low + (high - low) * t / max(n - 1, 1)).astype(np.float32)


def drawn(what: str, count: int) -> Array:
    random = np.random.default_rng(7)
    return random.exponential(1, 10000)[:count] if what == "weights" else random.integers(0, 16, 10000)[:count]


def ramp(k: int, dense: int, tokens: int) -> Callable[[int], int]:
    return lambda n: n if n <= dense else max(k, round(dense - (dense - k) * (n - dense) / tokens))


def article_ramp(n: int) -> int:
    return n if n < 200 else round(n * (1 - min(0.2 + (n - 200) * 0.002, 0.8)))


def suites() -> dict[str, dict[str, Policy]]:
    lengths = [256, 384, 512, 768, 1024, 2048]
    return {
        "plain": {"K = 256": Policy(), "K = 128": Policy(k=128), "K = 384": Policy(k=384), "K = 64": Policy(k=64)},
        "dedup": {
            **{f"signs, {b} bits of 64": Policy(dedup_bits=b) for b in (2, 4, 7, 12)},
            **{f"separate, {b} bits of 64": Policy(dedup_bits=b, dedup_hash="separate") for b in (4, 7)},
        },
        "recency": {
            "term, last selection": Policy(term=recency(0.5, 1.5)),
            "term, every pass": Policy(term=recency(0.5, 1.5), term_everywhere=True),
            "factor (wrong)": Policy(term=lambda t, n: np.zeros(n, np.float32), factor=recency_factor(0.5, 1.5)),
        },
        "length": {
            **{f"{n} tokens, K = 256": Policy(length=n) for n in (2048, 4096, 6144)},
            **{
                f"{n} tokens, scaled about 4096": Policy(length=n, k=round(256 * (n / 4096) ** 0.5))
                for n in (2048, 6144)
            },
        },
        "ramp": {
            **{
                f"{n} tokens, dense below 200": Policy(length=n, k_of=lambda n: n if n <= 200 else 256) for n in lengths
            },
            **{
                f"{n} tokens, K=64 dense below 200": Policy(length=n, k_of=lambda n: n if n <= 200 else 64)
                for n in lengths
            },
            **{f"{n} tokens, K=64 ramp 200 + 1848": Policy(length=n, k_of=ramp(64, 200, 1848)) for n in lengths},
            **{f"{n} tokens, article": Policy(length=n, k_of=article_ramp) for n in lengths},
        },
        "weight": {
            "boost 0.3, random weights": Policy(
                term=lambda t, n: np.log(1 + 0.3 * drawn("weights", n)), term_everywhere=True
            )
        },
        "class": {
            f"quota {q} of K = {k} for 1 of 16 classes drawn at random": Policy(
                k=k, candidates=2 * k, classes=lambda n: drawn("classes", n), quotas={3: q}
            )
            for k, q in ((256, 64), (256, 96), (256, 128), (512, 192))
        },
        "segment": {
            f"{share:.3f} of segments of {n}, by {by}": Policy(segment_tokens=n, segment_share=share, segment_by=by)
            for n in (128,)
            for share in (0.125, 0.25, 0.5)
            for by in ("blocks", "estimates")
        },
        "top_p": {f"p = {p}, K = {k}": Policy(top_p=p, k=k) for p in (0.9, 0.95, 0.99, 0.999) for k in (256, 512)},
    }


def row(name: str, results: list[Sums]) -> str:
    shares, worst = [], []
    for sums in results:
        hits = [hit for head in sums.needles.values() for hit in head]
        if hits:
            shares.append(np.mean(hits))
        worst += [float(np.mean(head)) for head in sums.needles.values() if len(head) >= 20]

    def mean(of: str) -> float:
        return float(np.mean([np.mean(getattr(sums, of)) for sums in results]))

    needle = f"{np.mean(shares):.4f} | {min(worst):.2f}" if worst else "- | -"
    return (
        f"| {name} | {needle} | {mean('mass'):.4f} | {mean('error'):.4f} | {mean('chosen'):.0f} |"
        f" {mean('scored'):.0f} | {mean('dropped'):.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path, help="folder of traces")
    parser.add_argument("--suite", default="plain,dedup,recency,length,ramp,top_p,weight,class,segment")
    parser.add_argument("--every", type=int, default=16, help="steps from one scored step to the next")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folders = sorted(p for p in options.traces.iterdir() if (p / "meta.json").exists())
    for suite in options.suite.split(","):
        policies = suites()[suite]
        results = [run(folder, policies, options.every, options.seed) for folder in folders]
        sys.stdout.write(f"\n{suite}\n| policy | needle | worst | mass | error | chosen | scored | dropped |\n")
        for name in policies:
            sys.stdout.write(row(name, [r[name] for r in results]) + "\n")


if __name__ == "__main__":
    main()
