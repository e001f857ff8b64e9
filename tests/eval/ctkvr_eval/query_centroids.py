# SPDX-License-Identifier: Apache-2.0
"""Which queries make the best query centroids, and how they should follow the text: measured on recorded traces.

    python -m ctkvr_eval.query_centroids TRACE... [--train TRACE...] [--centroids 256] [--list-tokens 512] [--probes 4]

A trace is a folder as `ctkvr-cli replay` reads it. The index is that of the service's source `query_centroids`, in
float32: centroids are queries of a group, head by head of norm 1; a list holds the best tokens of the prompt, between
sinks and window, for its centroid; a query reads the lists of the `probes` centroids nearest by the sum of cosines, and
keeps the best k of their union. Every row of the table is a plan: what the centroids are, and how they change while
1,024 tokens are decoded. Columns: needle share (of the last half of the steps), needle share of the worst head, recall
of the exact best k (of the last half), attention kept, candidates a query, centroids at the end, lists built.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ctkvr_eval import attention
from ctkvr_eval.attention import Floats

SINKS = 4
WINDOW = 64
NEEDLE_SHARE = 0.1
NEEDLES_MIN = 5  # evaluated ones, of a head that may be the worst
LAGS = (1, 4, 16, 64, 256, 1024)

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Settings:
    """Of the index and of what is kept."""

    centroids: int = 256
    list_tokens: int = 512
    probes: int = 4
    k: int = 256
    every: int = 4  # of the decoded steps, one is evaluated


def unit(rows: Floats) -> Floats:
    """Rows divided by their 2-norm; zeros stay."""
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(rows / np.where(norms > 0, norms, 1), np.float32)


def best_mask(ranks: Floats, k: int) -> Bools:
    """[n, T]: the k highest of each row."""
    mask = np.zeros(ranks.shape, bool)
    np.put_along_axis(mask, attention.best(ranks, k), True, axis=1)
    return mask


class Head:
    """One KV head of a trace: its queries, and the truth of the evaluated steps."""

    def __init__(self, folder: pathlib.Path, kv_head: int, settings: Settings) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        queries, keys, values = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in "qkv")
        group = queries.shape[0] // keys.shape[0]
        self.kv_head = kv_head
        rows = queries[kv_head * group : (kv_head + 1) * group].astype(np.float32)
        all_keys = keys[kv_head].astype(np.float32)
        self.scale = float(meta["scale"])
        self.prompt = int(meta["prompt_tokens"])
        self.first = int(meta["query_first_position"])
        self.queries: Floats = np.ascontiguousarray(rows.transpose(1, 0, 2))  # [positions, R, D]
        self.steps = np.arange(0, len(all_keys) - self.prompt, settings.every)
        begin, end = SINKS, self.prompt - WINDOW
        self.keys = all_keys[begin:end]
        self.prompt_keys = all_keys[: self.prompt]
        self.values = values[kv_head, self.first : self.prompt].astype(np.float32)
        self.asked = self.queries[self.prompt - self.first + self.steps]
        logits = attention.logits_of(np.ascontiguousarray(self.asked.transpose(1, 0, 2)), all_keys[None], self.scale)
        after = np.arange(len(all_keys)) > (self.prompt + self.steps)[:, None]
        logits[:, after] = -np.inf
        shares = np.exp(logits - logits.max(axis=2, keepdims=True))
        shares /= shares.sum(axis=2, keepdims=True)
        self.shares: Floats = shares[:, :, begin:end]
        self.always: Floats = 1 - self.shares.sum(axis=2)
        self.ranks: Floats = self.shares.sum(axis=0)
        self.exact = best_mask(self.ranks, settings.k)
        self.norms: Floats = np.linalg.norm(self.before(0, raw=True), axis=2).mean(axis=0)

    def before(self, step: int, *, raw: bool = False) -> Floats:
        """Queries [n, R, D] known when this step begins, unit rows unless raw."""
        known = self.queries[: self.prompt - self.first + step]
        return known if raw else unit(known)

    def received(self) -> Floats:
        """Of each prompt position with a query: the mean attention that it gets from later prompt queries."""
        queries = self.before(0, raw=True).transpose(1, 0, 2)
        total = np.zeros(queries.shape[1], np.float32)
        for begin in range(0, queries.shape[1], 256):
            part = np.ascontiguousarray(queries[:, begin : begin + 256])
            logits = attention.logits_of(part, self.prompt_keys[None], self.scale)
            at = self.first + begin + np.arange(part.shape[1])
            logits[:, np.arange(self.prompt) > at[:, None]] = -np.inf
            shares = np.exp(logits - logits.max(axis=2, keepdims=True))
            shares /= shares.sum(axis=2, keepdims=True)
            total += shares.sum(axis=(0, 1))[self.first :]
        return np.asarray(total / (len(queries) * np.arange(len(total), 0, -1)), np.float32)

    def lists(self, centroids: Floats, list_tokens: int) -> Bools:
        """[C, T]."""
        rows = centroids.transpose(1, 0, 2) * self.norms[:, None, None]
        logits = attention.logits_of(np.asarray(rows, np.float32), self.keys[None], self.scale)
        return best_mask(attention.group_ranks(logits, 1)[0], list_tokens)


def nearest(queries: Floats, centroids: Floats, probes: int) -> npt.NDArray[np.int64]:
    """[n, probes] of queries and centroids [..., R, D], by the sum of cosines."""
    cosines = unit(queries).reshape(len(queries), -1) @ unit(centroids).reshape(len(centroids), -1).T
    return attention.best(np.asarray(cosines, np.float32), probes)


def spread(rows: Floats, count: int) -> Floats:
    """`count` of the rows, evenly."""
    return np.asarray(rows[(np.arange(count) * len(rows)) // count])


def clusters(rows: Floats, count: int, weights: Floats | None = None, rounds: int = 3) -> tuple[Floats, Any]:
    """Spherical k-means of unit rows [n, R, D] from an even spread: centroids, and the centroid of each row."""
    flat = rows.reshape(len(rows), -1)
    found = spread(flat, count).copy()
    for _ in range(rounds):
        owner = np.argmax(flat @ found.T, axis=1)
        sums = np.zeros_like(found)
        np.add.at(sums, owner, flat if weights is None else flat * weights[:, None])
        moved = unit(sums.reshape(count, *rows.shape[1:])).reshape(count, -1)
        found = np.where((np.bincount(owner, minlength=count) > 0)[:, None], moved, found)
    return found.reshape(count, *rows.shape[1:]), np.argmax(flat @ found.T, axis=1)


class Plan:
    """What the centroids are as steps go on. `at` is called with ascending steps, `every` apart."""

    def __init__(self, name: str, every: int, make: Callable[[Head, int], Floats], share: int = 1) -> None:
        self.name, self.every, self.make = name, every, make
        self.share = share  # the search is over so many times fewer dimensions: the queries' first principal ones
        self.lists_built = 0

    def begin(self) -> None:
        """For another head."""
        self.lists_built = 0

    def nearest(self, head: Head, queries: Floats, centroids: Floats, probes: int) -> npt.NDArray[np.int64]:
        """As the function of that name."""
        if self.share == 1:
            return nearest(queries, centroids, probes)
        rows = head.before(0).reshape(len(head.before(0)), -1)
        middle = rows.mean(axis=0)
        axes = np.linalg.svd(rows - middle, full_matrices=False)[2][: rows.shape[1] // self.share].T
        flat = [(unit(group).reshape(len(group), -1) - middle) @ axes for group in (queries, centroids)]
        return nearest(flat[0][:, None], flat[1][:, None], probes)

    def at(self, head: Head, step: int) -> Floats:
        """Centroids [C, R, D]."""
        found = self.make(head, step)
        self.lists_built += len(found)
        return found


class Adjusted(Plan):
    """The service's adjustment to use: hot lists bring their newest user, the least used make room."""

    def __init__(self, name: str, every: int, first: Callable[[Head, int], Floats], settings: Settings) -> None:
        super().__init__(name, every, first)
        self.settings = settings

    def begin(self) -> None:
        """For another head."""
        super().begin()
        self.held: Floats | None = None

    def at(self, head: Head, step: int) -> Floats:
        """As Plan.at."""
        if self.held is None:
            self.held = super().at(head, step)
            self.uses = np.zeros(len(self.held))
            self.capacity = len(self.held)
            return self.held
        asked = head.before(step)[-self.every :]
        taken = nearest(asked, self.held, self.settings.probes)
        self.uses += np.bincount(taken.ravel(), minlength=len(self.held))
        mean = self.uses.mean()
        joining: list[int] = []
        for list_ in np.argsort(-self.uses, kind="stable"):
            if self.uses[list_] <= 2 * mean:
                break
            users = np.flatnonzero((taken == list_).any(axis=1))
            if len(users) and int(users[-1]) not in joining:
                joining.append(int(users[-1]))
        room = max(0, len(self.held) + len(joining) - self.capacity)
        coldest = [c for c in np.argsort(self.uses, kind="stable") if self.uses[c] < mean / 2]
        kept = np.setdiff1d(np.arange(len(self.held)), coldest[:room])
        joining = sorted(joining[: self.capacity - len(kept)])
        self.held = np.concatenate((self.held[kept], asked[joining]))
        self.uses = np.concatenate((self.uses[kept], np.full(len(joining), mean))) / 2
        self.lists_built += len(joining)
        return self.held


def plans(settings: Settings, trained: Sequence[pathlib.Path]) -> Iterator[Plan]:
    """The rows of the table. trained: traces of other texts whose queries are clustered for a row of its own."""
    count = settings.centroids

    def last(head: Head, step: int) -> Floats:
        return head.before(step)[-count:]

    def strided(head: Head, step: int) -> Floats:
        return spread(head.before(step), count)

    def clustered(head: Head, step: int) -> Floats:
        return clusters(head.before(step)[-2048:], count)[0]

    for name, make in (("last", last), ("strided", strided), ("clustered", clustered)):
        yield Plan(f"{name}, of the prompt", 1 << 20, make)
        yield Plan(f"{name}, built every 512 steps", 512, make)
        yield Plan(f"{name}, built every 128 steps", 128, make)
        yield Adjusted(f"{name}, adjusted every 128 steps", 128, make, settings)
    yield Plan("last, of the prompt, searched in an eighth of the dimensions", 1 << 20, last, 8)
    yield Plan("last, of the prompt, searched in a quarter of the dimensions", 1 << 20, last, 4)

    def weighted(head: Head, step: int) -> Floats:
        return clusters(head.before(0), count, head.received())[0]

    # The article's formula as it is written: a centroid lies among the values, and every head of the group shares it.
    def of_values(head: Head, step: int) -> Floats:
        owner = clusters(head.before(0), count)[1]
        sums = np.zeros((count, head.values.shape[1]), np.float32)
        np.add.at(sums, owner, head.values * head.received()[:, None])
        return np.repeat(unit(sums)[:, None], head.queries.shape[1], axis=1)

    yield Plan("clustered, sum of w Q / sum of w, of the prompt", 1 << 20, weighted)
    yield Plan("clustered, sum of w V / sum of w, of the prompt", 1 << 20, of_values)

    def of_others(head: Head, step: int) -> Floats:
        others = [Head(folder, head.kv_head, settings).queries[::2] for folder in trained]
        return clusters(unit(np.concatenate(others)), count)[0]

    if trained:
        yield Plan("trained on other texts", 1 << 20, of_others)


@dataclass
class Tally:
    """What a plan reached, summed over heads and steps; halves: all steps, and the last half of them."""

    needles: list[npt.NDArray[np.int64]] = field(default_factory=list)  # [R] a KV head
    hits: list[npt.NDArray[np.int64]] = field(default_factory=list)
    late: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(4, np.int64))  # needles, hits, best k, found
    best: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))  # best k, found
    mass: float = 0
    candidates: int = 0
    steps: int = 0
    centroids: list[int] = field(default_factory=list)
    lists_built: list[int] = field(default_factory=list)

    def row(self, name: str) -> str:
        """A line of the Markdown table."""
        needles, hits = np.concatenate(self.needles), np.concatenate(self.hits)
        counted = needles >= NEEDLES_MIN
        worst = f"{(hits[counted] / needles[counted]).min():.2f}" if counted.any() else ""
        late = np.maximum(self.late, 1)
        return (
            f"| {name} | {hits.sum() / max(needles.sum(), 1):.3f} ({self.late[1] / late[0]:.3f}) | {worst} "
            f"| {self.best[1] / self.best[0]:.3f} ({self.late[3] / late[2]:.3f}) | {self.mass / self.steps:.4f} "
            f"| {self.candidates / self.steps:.0f} | {np.mean(self.centroids):.0f} | {np.mean(self.lists_built):.0f} |"
        )


def measure(head: Head, plan: Plan, settings: Settings, tally: Tally) -> None:
    """Runs the plan over the steps of a head."""
    plan.begin()
    needles = head.shares > NEEDLE_SHARE
    hits = np.zeros_like(needles)
    decoded = int(head.steps[-1]) + settings.every
    for begin in range(0, decoded, plan.every):
        centroids = plan.at(head, begin)
        lists = head.lists(centroids, settings.list_tokens)
        at = np.flatnonzero((head.steps >= begin) & (head.steps < begin + plan.every))
        candidates = np.zeros((len(at), lists.shape[1]), bool)
        for column in plan.nearest(head, head.asked[at], centroids, settings.probes).T:
            candidates |= lists[column]
        chosen = best_mask(np.where(candidates, head.ranks[at], np.float32(-1)), settings.k) & candidates
        hits[:, at] = needles[:, at] & chosen
        found = (chosen & head.exact[at]).sum(axis=1)
        best = head.exact[at].sum(axis=1)
        is_late = head.steps[at] >= decoded // 2
        tally.best += (best.sum(), found.sum())
        tally.late[2:] += (best[is_late].sum(), found[is_late].sum())
        tally.mass += float(((head.shares[:, at] * chosen).sum(axis=2) + head.always[:, at]).mean(axis=0).sum())
        tally.candidates += int(candidates.sum())
        tally.steps += len(at)
    late_steps = head.steps >= decoded // 2
    tally.late[:2] += (needles[:, late_steps].sum(), hits[:, late_steps].sum())
    tally.needles.append(needles.sum(axis=(1, 2)))
    tally.hits.append(hits.sum(axis=(1, 2)))
    tally.centroids.append(len(centroids))
    tally.lists_built.append(plan.lists_built)


def lag_cosines(heads: Sequence[Head]) -> str:
    """Mean cosine of a query head's queries so many positions apart: least, mean and greatest of the heads."""
    cells = []
    for lag in LAGS:
        rows = [unit(head.queries) for head in heads]
        means = np.concatenate([(row[lag:] * row[:-lag]).sum(axis=2).mean(axis=0) for row in rows])
        cells.append(f"{lag}: {means.min():.2f} {means.mean():.2f} {means.max():.2f}")
    return "; ".join(cells)


def index_bytes(settings: Settings, tokens: int, group: int, head_dim: int) -> float:
    """Centroids in binary16 and packed lists of a KV head, as server/core/index.h counts them."""
    low_bits = (tokens // settings.list_tokens).bit_length() - 1
    words = -(-settings.list_tokens * low_bits // 64) + -(-(settings.list_tokens + ((tokens - 1) >> low_bits)) // 64)
    return settings.centroids * (2 * group * head_dim + 8 * words)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table for each trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=pathlib.Path)
    for name in ("centroids", "list-tokens", "probes", "k", "every"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Settings, name.replace("-", "_")))
    parser.add_argument("--train", nargs="*", type=pathlib.Path, default=[], help="traces of other texts, same layer")
    parser.add_argument("--plans", default="", help="only plans whose name has this in it")
    flags = parser.parse_args(arguments)
    settings = Settings(flags.centroids, flags.list_tokens, flags.probes, flags.k, flags.every)
    for folder in flags.traces:
        report(folder, settings, flags.train, flags.plans)


HEADING = """
| centroids | needles (last half) | worst head | recall (last half) | mass | candidates | C | lists built |
|---|---|---|---|---|---|---|---|
"""


def report(folder: pathlib.Path, settings: Settings, trained: Sequence[pathlib.Path], only: str) -> None:
    """The table of one trace, of plans whose name has `only` in it."""
    kv_heads = np.load(folder / "k.npy", mmap_mode="r").shape[0]
    heads = [Head(folder, kv_head, settings) for kv_head in range(kv_heads)]
    group, head_dim = heads[0].queries.shape[1:]
    share = 4.0 * head_dim * heads[0].prompt / index_bytes(settings, heads[0].prompt, group, head_dim)
    sys.stdout.write(
        f"\n{folder.name}: keys and values of the prompt in 16 bits take {share:.1f} times the bytes of the index; "
        f"cosine of neighbours by lag, least, mean and greatest head: {lag_cosines(heads)}\n{HEADING}"
    )
    for plan in plans(settings, trained):
        if only not in plan.name:
            continue
        tally = Tally()
        for head in heads:
            measure(head, plan, settings, tally)
        sys.stdout.write(tally.row(plan.name) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
