# SPDX-License-Identifier: Apache-2.0
"""Each comparison system against loops that do what its paper says, and against what its paper claims on easy text."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctkvr_eval import attention
from ctkvr_eval.attention import Floats
from ctkvr_eval.selectors.base import Task
from ctkvr_eval.selectors.blocks import InfLlm, Quest
from ctkvr_eval.selectors.clusters import RetroInfer, WithRemainder, cluster_keys, estimate
from ctkvr_eval.selectors.comparison import BUILDERS, ComparisonSelector, HeadPrompt
from ctkvr_eval.selectors.dense import ExactTopK, SlidingWindow, SnapKv
from ctkvr_eval.selectors.graphs import FaissGraph, FaissLists, RetrievalAttention
from ctkvr_eval.selectors.magicpig import MagicPig, sampling_probability
from ctkvr_eval.selectors.parts import Chosen, Mask, logits_of, row_bytes, top_mask
from ctkvr_eval.selectors.queries import QueryCentroids

SEED = int(os.environ.get("CTKVR_TEST_SEED", "20"))
SCALE = 0.25
TRACE = Path(__file__).parents[2] / "traces" / "records-layer07"


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"CTKVR_TEST_SEED={SEED}")  # noqa: T201 - pytest shows it with a failure
    return np.random.default_rng(SEED)


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape).astype(np.float32)


def topical_keys(rng: np.random.Generator, tokens: int, dim: int, run: int = 64, spread: float = 0.7) -> Floats:
    """Keys as in text that stays with a topic for `run` tokens; the mean is not zero, as of real keys it is not."""
    topics = normal(rng, -(-tokens // run), dim)
    keys = np.repeat(topics, run, axis=0)[:tokens] + np.float32(spread) * normal(rng, tokens, dim)
    return np.asarray(keys + np.float32(0.5), dtype=np.float32)


def naive_top(scores: list[float], k: int) -> set[int]:
    return set(sorted(range(len(scores)), key=lambda at: (-scores[at], at))[:k])


def naive_group(logits: list[list[float]]) -> list[float]:
    """Sum over heads of the softmax over tokens."""
    total = [0.0] * len(logits[0])
    for head in logits:
        top = max(head)
        weights = [math.exp(one - top) for one in head]
        for at, weight in enumerate(weights):
            total[at] += weight / sum(weights)
    return total


def naive_logits(queries: Floats, keys: Floats) -> list[list[float]]:
    return [[SCALE * sum(float(a) * float(b) for a, b in zip(q, key, strict=True)) for key in keys] for q in queries]


def chosen_by(mask: Mask) -> list[set[int]]:
    return [set(np.flatnonzero(row).tolist()) for row in mask]


def attend(queries: Floats, keys: Floats, values: Floats, chosen: Chosen) -> Floats:
    """Output [S, R, V] over what was chosen, with weights and rest."""
    logits = logits_of(queries, keys, SCALE) + (0 if chosen.bias is None else chosen.bias)
    logits = np.where(chosen.mask[:, None], logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - top)
    total, output = weights.sum(axis=-1), weights @ values
    if chosen.rest is not None:
        more = np.exp(chosen.rest.lse - top[..., 0])
        total, output = total + more, output + more[..., None] * chosen.rest.output
    return np.asarray(output / total[..., None], dtype=np.float32)


def full(queries: Floats, keys: Floats, values: Floats) -> Floats:
    return attend(queries, keys, values, Chosen(np.ones((len(queries), len(keys)), bool), np.zeros(len(queries), int)))


def needs_faiss(method: str) -> None:
    """tests/eval/requirements.txt has it; the environment of the client's tests has not."""
    if method in ("hnsw", "ivf"):
        pytest.importorskip("faiss")


class TestParts:
    def test_top_mask_prefers_low_positions_and_never_minus_infinity(self) -> None:
        scores = np.array([[1, 3, 3, 3, -np.inf], [-np.inf, -np.inf, 2, -np.inf, 1]], np.float32)
        assert chosen_by(top_mask(scores, 2)) == [{1, 2}, {2, 4}]
        assert chosen_by(top_mask(scores, 4)) == [{0, 1, 2, 3}, {2, 4}]
        assert chosen_by(top_mask(scores, 0)) == [set(), set()]

    @pytest.mark.parametrize("width", [4, 12, 32, 48, 64, 96, 128, 200])
    def test_row_bytes_counts_distinct_lines(self, rng: np.random.Generator, width: int) -> None:
        mask = rng.random((20, 50)) < 0.3
        for row, read in zip(mask, row_bytes(mask, width), strict=True):
            lines = {byte // 64 for at in np.flatnonzero(row) for byte in range(at * width, (at + 1) * width)}
            assert read == 64 * len(lines)


class TestDense:
    def test_exact_is_the_naive_top_k_and_reads_every_key(self, rng: np.random.Generator) -> None:
        keys, queries = normal(rng, 40, 8), normal(rng, 5, 3, 8)
        chosen = ExactTopK(keys, SCALE).choose(queries, 7)
        expected = [naive_top(naive_group(naive_logits(step, keys)), 7) for step in queries]
        assert chosen_by(chosen.mask) == expected
        assert chosen.bytes_read.tolist() == [40 * 8 * 2] * 5

    def test_window_is_the_end(self, rng: np.random.Generator) -> None:
        chosen = SlidingWindow(normal(rng, 9, 64)).choose(normal(rng, 2, 1, 64), 4)
        assert chosen_by(chosen.mask) == [{5, 6, 7, 8}] * 2
        assert chosen.bytes_read.tolist() == [4 * 128] * 2

    def test_snapkv_pools_the_votes_of_the_window(self, rng: np.random.Generator) -> None:
        keys, observed = normal(rng, 30, 8), normal(rng, 4, 2, 8)
        votes = np.zeros(30)
        for step in observed:
            votes += naive_group(naive_logits(step, keys))
        order = sorted(range(30), key=lambda at: (max(votes[max(0, at - 1) : at + 2]), votes[at]))
        chosen = SnapKv(keys, observed, SCALE, width=3).choose(normal(rng, 6, 2, 8), 5)
        assert chosen_by(chosen.mask) == [set(order[-5:])] * 6


class TestQuest:
    def naive_bounds(self, step: Floats, keys: Floats, page: int) -> list[list[float]]:
        return [
            [
                SCALE * sum(max(float(q) * float(key) for key in keys[at : at + page, d]) for d, q in enumerate(head))
                for at in range(0, len(keys), page)
            ]
            for head in step
        ]

    def test_bounds_are_those_of_the_paper_and_hold(self, rng: np.random.Generator) -> None:
        keys, queries = normal(rng, 37, 6), normal(rng, 4, 2, 6)
        bounds = Quest(keys, SCALE, page=8).bounds(queries)
        for step, found in zip(queries, bounds, strict=True):
            np.testing.assert_allclose(found, self.naive_bounds(step, keys, 8), rtol=1e-5, atol=1e-5)
        logits = logits_of(queries, keys, SCALE)
        assert (np.repeat(bounds, 8, axis=-1)[..., :37] >= logits - 1e-5).all()

    def test_pages_of_the_best_bounds(self, rng: np.random.Generator) -> None:
        keys, queries = normal(rng, 37, 6), normal(rng, 4, 2, 6)
        together = Quest(keys, SCALE, page=8).choose(queries, 16)
        alone = Quest(keys, SCALE, page=8, each_head=True).choose(queries, 16)
        assert alone.bias is not None
        for at, step in enumerate(queries):
            bounds = self.naive_bounds(step, keys, 8)
            pages = naive_top(naive_group(bounds), 2)
            assert chosen_by(together.mask)[at] == {token for token in range(37) if token // 8 in pages}
            for head, bound in enumerate(bounds):
                own = {token for token in range(37) if token // 8 in naive_top(bound, 2)}
                assert set(np.flatnonzero(alone.bias[at, head] == 0)) == own

    def test_reads_digests_and_pages(self, rng: np.random.Generator) -> None:
        chosen = Quest(normal(rng, 64, 64), SCALE).choose(normal(rng, 1, 1, 64), 16)
        assert chosen.bytes_read.tolist() == [4 * 2 * 128 + 16 * 128]


class TestInfLlm:
    @pytest.mark.parametrize("lag", [-5, 3, 20])
    def test_worth_is_the_mean_score_under_following_queries(self, rng: np.random.Generator, lag: int) -> None:
        keys, queries = normal(rng, 24, 6), normal(rng, 16, 2, 6)
        worth = InfLlm.worths(keys, queries, lag, local=6)
        for at, key in enumerate(keys):
            reach = [j for j in range(16) if at < lag + j <= at + 6]
            if not reach:
                reach = list(range(min(6, 16)))[:1] if at < lag else [15]
            scores = [float(queries[j].sum(axis=0) @ key) for j in reach]
            if len({lag + j for j in reach if at < lag + j <= at + 6}) == len(reach):
                assert worth[at] == pytest.approx(np.mean(scores), abs=1e-4)

    def test_blocks_of_the_best_representatives(self, rng: np.random.Generator) -> None:
        keys, prompt, queries = normal(rng, 50, 6), normal(rng, 60, 2, 6), normal(rng, 5, 2, 6)
        index = InfLlm(keys, prompt, 0, SCALE, block=8, representatives=3, local=10)
        worth = InfLlm.worths(keys, prompt, 0, 10)
        for step, mask in zip(queries, index.choose(queries, 16).mask, strict=True):
            relevance = []
            for begin in range(0, 50, 8):
                block = range(begin, min(begin + 8, 50))
                best = sorted(block, key=lambda at: -worth[at])[:3]
                relevance.append(float(np.mean([[q @ keys[at] for q in step] for at in best])))
            blocks = naive_top(relevance, 2)
            assert set(np.flatnonzero(mask)) == {at for at in range(50) if at // 8 in blocks}


class TestMagicPig:
    def test_probability_is_the_frequency_of_two_collisions(self, rng: np.random.Generator) -> None:
        bits, tables, trials = 4, 12, 4000
        for angle in (0.3, 0.8, 1.4, 2.0):
            one, other = np.array([1.0, 0.0]), np.array([math.cos(angle), math.sin(angle)])
            signs = rng.standard_normal((trials, tables, bits, 2))
            same = ((signs @ one > 0) == (signs @ other > 0)).all(axis=-1).sum(axis=-1) >= 2
            expected = sampling_probability(np.array([math.cos(angle)], np.float32), bits, tables)[0]
            assert same.mean() == pytest.approx(expected, abs=5 * math.sqrt(0.25 / trials))

    def test_collisions_are_counted_table_by_table(self, rng: np.random.Generator) -> None:
        keys, queries = topical_keys(rng, 60, 8), normal(rng, 7, 8)
        index = MagicPig(keys, SCALE, SEED, bits=3, tables=9)
        counts, read = index.collisions(queries)
        signs = np.random.default_rng(SEED).standard_normal((8, 27)).astype(np.float32)
        for q, row in enumerate(queries):
            total = 0
            for n, key in enumerate(keys - keys.mean(axis=0)):
                same = [(row @ signs[:, at] > 0) == (key @ signs[:, at] > 0) for at in range(27)]
                shared = sum(all(same[table * 3 : table * 3 + 3]) for table in range(9))
                total += shared
                assert counts[q, n] == shared
            assert read[q] >= 9 * 64
            assert read[q] <= 9 * 64 + 64 * 2 * 9 + 4 * total

    def test_weighs_by_the_probability_of_the_sample(self, rng: np.random.Generator) -> None:
        keys, queries = topical_keys(rng, 80, 8), normal(rng, 3, 2, 8)
        chosen = MagicPig(keys, SCALE, SEED, bits=4, tables=20).choose(queries, 0)
        assert chosen.bias is not None
        centred = keys - keys.mean(axis=0)
        for step, head, key in zip(*np.nonzero(chosen.bias > -np.inf), strict=True):
            q, k = queries[step, head], centred[key]
            p = 1 - math.acos(float(q @ k) / float(np.linalg.norm(q) * np.linalg.norm(k))) / math.pi
            u = 1 - (1 - p**4) ** 20 - 20 * p**4 * (1 - p**4) ** 19
            assert chosen.bias[step, head, key] == pytest.approx(-math.log(u), rel=1e-3, abs=1e-4)

    def test_a_sample_estimates_what_the_best_cannot(self, rng: np.random.Generator) -> None:
        """The paper's point: flat attention, values that go with keys; as many best tokens are further from it."""
        keys = topical_keys(rng, 1500, 16)
        values = np.ascontiguousarray(keys[:, :4])
        queries = np.asarray(0.5 * normal(rng, 12, 1, 16), dtype=np.float32)
        truth = full(queries, keys, values)
        error = sampled = 0.0
        for seed in range(8):
            chosen = MagicPig(keys, SCALE, SEED + seed, bits=7, tables=75).choose(queries, 0)
            error += np.abs(attend(queries, keys, values, chosen) - truth).mean() / 8
            sampled += chosen.mask.sum() / len(queries) / 8
        best = attend(queries, keys, values, ExactTopK(keys, SCALE).choose(queries, round(sampled)))
        assert error < 0.7 * np.abs(best - truth).mean()

    def test_tables_for_aims_at_k(self, rng: np.random.Generator) -> None:
        keys, queries = topical_keys(rng, 2000, 16), normal(rng, 40, 2, 16)
        tables = MagicPig.tables_for(keys, queries, 100, bits=8)
        chosen = MagicPig(keys, SCALE, SEED, bits=8, tables=tables).choose(queries, 0)
        assert chosen.bias is not None
        assert (chosen.bias > -np.inf).sum(axis=-1).mean() == pytest.approx(100, rel=0.25)


class TestClusters:
    def test_means_and_counts_are_those_of_the_members(self, rng: np.random.Generator) -> None:
        keys, values = topical_keys(rng, 300, 8), normal(rng, 300, 5)
        clusters = cluster_keys(keys, values, size=10, segment=128)
        assert clusters.counts.sum() == 300
        for group, count in enumerate(clusters.counts):
            members = [at for at in range(300) if clusters.owner[at] == group]
            assert len(members) == count > 0
            assert len({at // 128 for at in members}) == 1
            np.testing.assert_allclose(clusters.keys[group], np.mean(keys[members], axis=0), atol=1e-5)
            np.testing.assert_allclose(clusters.values[group], np.mean(values[members], axis=0), atol=1e-5)

    def test_finds_topics(self, rng: np.random.Generator) -> None:
        topic = np.repeat(np.arange(8), 50)
        keys = np.asarray(6 * normal(rng, 8, 16)[topic] + 0.1 * normal(rng, 400, 16), dtype=np.float32)
        clusters = cluster_keys(keys, keys, size=16)
        assert all(len(set(topic[clusters.owner == group])) == 1 for group in range(len(clusters.counts)))

    def test_estimate_is_the_sum_over_clusters(self, rng: np.random.Generator) -> None:
        keys, values, queries = topical_keys(rng, 90, 8), normal(rng, 90, 3), normal(rng, 4, 2, 8)
        clusters = cluster_keys(keys, values, size=9)
        left = rng.integers(0, 3, (4, 1, len(clusters.counts)))
        rest = estimate(queries, clusters, left, SCALE)
        for step in range(4):
            for head in range(2):
                total, output = 0.0, np.zeros(3)
                for group, count in enumerate(left[step, 0]):
                    weight = int(count) * math.exp(SCALE * float(queries[step, head] @ clusters.keys[group]))
                    total += weight
                    output += weight * clusters.values[group]
                assert rest.lse[step, head] == pytest.approx(math.log(total), abs=1e-4)
                np.testing.assert_allclose(rest.output[step, head], output / total, atol=1e-4)

    def test_retroinfer_opens_whole_clusters_and_estimates_the_next(self, rng: np.random.Generator) -> None:
        keys, values, queries = topical_keys(rng, 320, 8), normal(rng, 320, 3), normal(rng, 5, 2, 8)
        index = RetroInfer(keys, values, SCALE, size=8, estimated=0.25)
        clusters = cluster_keys(keys, values, size=8)
        groups = len(clusters.counts)
        chosen = index.choose(queries, 32)
        assert chosen.rest is not None
        for at, step in enumerate(queries):
            scores = naive_group(naive_logits(step, clusters.keys))
            order = sorted(range(groups), key=lambda group: -scores[group])
            members = {token for token in range(320) if clusters.owner[token] in order[:4]}
            assert set(np.flatnonzero(chosen.mask[at])) == members
            zone = order[4 : 4 + round(0.25 * groups)]
            left = np.zeros((1, 1, groups), np.int64)
            left[0, 0, zone] = clusters.counts[zone]
            expected = estimate(step[None], clusters, left, SCALE)
            np.testing.assert_allclose(chosen.rest.lse[at], expected.lse[0], atol=1e-4)
            # The paper's bound: a mean key never claims more than its members.
            true = logits_of(step[None], keys[np.isin(clusters.owner, zone)], SCALE)[0]
            assert (chosen.rest.lse[at] <= np.log(np.exp(true).sum(axis=-1)) + 1e-4).all()

    def test_remainder_vanishes_when_all_is_chosen(self, rng: np.random.Generator) -> None:
        keys, values, queries = topical_keys(rng, 60, 8), normal(rng, 60, 3), normal(rng, 4, 2, 8)
        index = WithRemainder(ExactTopK(keys, SCALE), cluster_keys(keys, values, size=6), SCALE)
        everything = index.choose(queries, 60)
        assert everything.rest is not None
        assert np.isneginf(everything.rest.lse).all()
        np.testing.assert_allclose(attend(queries, keys, values, everything), full(queries, keys, values), atol=1e-5)

    def test_remainder_counts_each_head_by_itself(self, rng: np.random.Generator) -> None:
        keys, values, queries = topical_keys(rng, 64, 8), normal(rng, 64, 3), normal(rng, 3, 2, 8)
        clusters = cluster_keys(keys, values, size=8)
        chosen = WithRemainder(Quest(keys, SCALE, page=4, each_head=True), clusters, SCALE).choose(queries, 16)
        assert chosen.bias is not None
        assert chosen.rest is not None
        for step in range(3):
            for head in range(2):
                taken = clusters.owner[chosen.bias[step, head] > -np.inf]
                left = clusters.counts - np.bincount(taken, minlength=len(clusters.counts))
                expected = estimate(queries[step, head][None, None], clusters, left[None, None], SCALE)
                assert chosen.rest.lse[step, head] == pytest.approx(expected.lse[0, 0], abs=1e-5)


class TestGraphs:
    def test_a_search_as_wide_as_the_graph_is_exact(self, rng: np.random.Generator) -> None:
        keys, prompt, queries = normal(rng, 200, 8), normal(rng, 40, 2, 8), normal(rng, 6, 2, 8)
        exact = ExactTopK(keys, SCALE).choose(queries, 10).mask
        wide = RetrievalAttention(keys, prompt, SCALE, width=200)
        found, scored, opened = wide.search(queries.reshape(-1, 8), 200)
        assert scored.all()
        assert opened.all()
        assert all(sorted(row) == list(range(200)) for row in found.tolist())
        assert (wide.choose(queries, 10).mask == exact).all()

    def test_libraries_asked_for_half_of_all_return_all(self, rng: np.random.Generator) -> None:
        needs_faiss("ivf")
        keys, queries = normal(rng, 200, 8), normal(rng, 6, 2, 8)
        exact = ExactTopK(keys, SCALE).choose(queries, 100).mask
        assert (FaissLists(keys, SCALE, SEED, lists=8, probed=8).choose(queries, 100).mask == exact).all()
        assert (FaissGraph(keys, SCALE).choose(queries, 100).mask & exact).sum() >= 0.97 * exact.sum()

    def test_keys_named_together_are_linked(self, rng: np.random.Generator) -> None:
        """Keys far from each other that the same queries want: no key-to-key index links them."""
        keys = np.asarray(np.eye(96, 32, dtype=np.float32) + 0.01 * normal(rng, 96, 32))
        keys[0] = 5 * np.eye(32)[0]
        keys[1] = 5 * np.eye(32)[1]
        prompt = np.zeros((20, 1, 32), np.float32)
        prompt[:, 0, :2] = 1
        index = RetrievalAttention(keys, prompt, SCALE)
        assert {0, 1} <= set(index._entries.tolist()) | set(index._graph[0].tolist())
        assert 1 in index._graph[0]
        assert 0 in index._graph[1]


class TestQueryCentroids:
    def test_is_the_two_stages_of_the_article(self, rng: np.random.Generator) -> None:
        keys, prompt, queries = normal(rng, 50, 6), normal(rng, 30, 2, 6), normal(rng, 5, 2, 6)
        index = QueryCentroids(keys, prompt, SCALE, centroids=12, listed=9, probed=3)
        norms = np.linalg.norm(prompt, axis=-1).mean(axis=0)
        lists = []
        for centroid in prompt[-12:]:
            level = centroid / np.linalg.norm(centroid, axis=-1, keepdims=True) * norms[:, None]
            lists.append(naive_top(naive_group(naive_logits(level, keys)), 9))
        for step, mask in zip(queries, index.choose(queries, 7).mask, strict=True):
            cosines = []
            for centroid in prompt[-12:]:
                pairs = [
                    (float(a @ b), np.linalg.norm(a) * np.linalg.norm(b)) for a, b in zip(step, centroid, strict=True)
                ]
                cosines.append(float(np.mean([dot / norm for dot, norm in pairs])))
            candidates = sorted(set().union(*(lists[at] for at in naive_top(cosines, 3))))
            scores = naive_group(naive_logits(step, keys[candidates]))
            assert set(np.flatnonzero(mask)) == {candidates[at] for at in naive_top(scores, 7)}


def head_trace() -> tuple[HeadPrompt, Floats, Floats]:
    """A head of the trace in tests/traces, every eighth of its decoded queries [S, R, D], and logits' sums over all."""
    meta = json.loads((TRACE / "meta.json").read_text())
    q, k, v = (np.load(TRACE / f"{name}.npy").astype(np.float32) for name in "qkv")
    free = slice(4, meta["prompt_tokens"] - 64)
    known = meta["prompt_tokens"] - meta["query_first_position"]
    queries = np.ascontiguousarray(q.transpose(1, 0, 2))
    lag = meta["query_first_position"] - 4
    prompt = HeadPrompt(k[0, free], v[0, free], queries[:known], lag, meta["scale"], SEED, 256)
    asked = queries[known::8]
    logits = logits_of(asked, k[0], meta["scale"])
    logits[
        np.arange(k.shape[1]) > meta["prompt_tokens"] + 8 * np.arange(len(asked))[:, None, None] + 0 * logits
    ] = -np.inf
    return prompt, asked, np.exp(logits).sum(axis=-1)


FOUND_ON_EASY_TEXT = {
    "exact": 1.0,
    "quest": 0.95,
    "quest_each_head": 0.95,
    "infllm": 0.95,
    "magicpig": 0.95,
    "retrieval_attention": 0.97,
    "hnsw": 0.9,
    "ivf": 0.95,
    "retroinfer": 0.95,
    "ctkvr": 0.9,
}


class TestClaims:
    """What the papers claim where attention is easy: one topic at a time, queries like the prompt's."""

    @pytest.fixture
    def text(self, rng: np.random.Generator) -> tuple[HeadPrompt, Floats]:
        """4,096 tokens; each query asks for a token of the past, as the prompt's did."""
        tokens, dim = 4096, 32
        keys = topical_keys(rng, tokens, dim)

        def asking(count: int) -> Floats:
            wanted = keys[rng.integers(0, tokens, count)] - keys.mean(axis=0)
            return np.asarray(2 * wanted[:, None] + 0.5 * normal(rng, count, 2, dim), dtype=np.float32)

        return HeadPrompt(keys, normal(rng, tokens, 4), asking(1024), tokens - 1024, SCALE, SEED, 256), asking(128)

    @pytest.mark.parametrize(
        ("method", "share"),
        sorted(FOUND_ON_EASY_TEXT.items()),
    )
    def test_needles_are_found_at_256_of_4096(self, text: tuple[HeadPrompt, Floats], method: str, share: float) -> None:
        needs_faiss(method)
        prompt, queries = text
        assert needle_share(prompt, queries, BUILDERS[method](prompt).choose(queries, 256)) >= share

    def test_the_attention_aware_graph_needs_fewer_keys_than_hnsw(self) -> None:
        """RetrievalAttention's claim: queries lie outside the keys' distribution; edges that follow queries cure it."""
        prompt, queries, _ = head_trace()
        flat = np.ascontiguousarray(queries.reshape(-1, queries.shape[-1]))
        truth = top_mask(flat @ prompt.keys.T, 100)
        index = RetrievalAttention(prompt.keys, prompt.queries, prompt.scale)
        found, scored, _ = index.search(flat, 192)
        recall = np.take_along_axis(np.pad(truth, ((0, 0), (0, 1))), found, axis=1).sum() / truth.sum()
        assert recall > 0.93
        # The paper's 1 to 3 % of 128K keys for its best 100 are 1,300 to 3,900.
        assert scored.sum(axis=1).mean() < 1300

    def test_quest_misses_the_needles_of_records(self) -> None:
        """The other side: on look-ups the trace's own figures say 0.20 of the needles for pages of 16."""
        prompt, queries, total = head_trace()
        chosen = BUILDERS["quest"](prompt).choose(queries, 256)
        assert 0.1 < needle_share(prompt, queries, chosen, total) < 0.3


def needle_share(prompt: HeadPrompt, queries: Floats, chosen: Chosen, total: Floats | None = None) -> float:
    """Of tokens with over 10 % of a query head's attention, the share chosen for it. total: None: over these alone."""
    weights = np.exp(logits_of(queries, prompt.keys, prompt.scale))
    needles = weights > 0.1 * (weights.sum(axis=-1) if total is None else total)[..., None]
    assert needles.sum() >= 20
    found = chosen.mask[:, None] if chosen.bias is None else chosen.bias > -np.inf
    return float((needles & found).sum() / needles.sum())


TASK = Task(
    layers=2, q_heads=4, kv_heads=2, head_dim=8, value_dim=5, prompt_tokens=150, scale=SCALE, window=8, seed=SEED
)


class Case:
    """A selector's answer to the positions after a prompt, and what it is made of."""

    def __init__(self, rng: np.random.Generator, method: str, k: int, **options: Any) -> None:
        self.keys, self.values = topical_keys(rng, 2 * 160, 8).reshape(2, 160, 8), normal(rng, 2, 160, 5)
        self.queries = normal(rng, 4, 160, 8)
        selector = ComparisonSelector(method, k, **options)
        selector.begin(TASK)
        selector.prepare(1, self.keys[:, :150], self.values[:, :150], self.queries[:, :150])
        self.found = selector.attend(1, self.queries[:, 150:], self.keys[:, 150:], self.values[:, 150:])
        assert self.found.bytes_read.shape == (10,)
        assert selector.memory_bytes >= 2 * (2 * 150 * 13)
        selector.end()

    def full(self) -> Floats:
        logits = attention.logits_of(self.queries[:, 150:], self.keys, SCALE)
        attention.causal(logits[:, :, 150:])
        return attention.attend(logits, self.values).output

    def by_hand(self, method: str, k: int, remainder: bool) -> Floats:
        """The output by one softmax over logits with weights, cluster by cluster and token by token."""
        output = np.zeros((4, 10, 5))
        for head in range(4):
            keys, values = self.keys[head // 2], self.values[head // 2]
            group = self.queries[head // 2 * 2 : head // 2 * 2 + 2].transpose(1, 0, 2)
            prompt = HeadPrompt(keys[4:142], values[4:142], group[:150], -4, SCALE, SEED, k)
            index = BUILDERS[method](prompt)
            if remainder:
                index = WithRemainder(index, cluster_keys(prompt.keys, prompt.values), SCALE)
            chosen = index.choose(group[150:], k)
            for step in range(10):
                weights = np.exp(SCALE * (keys @ self.queries[head, 150 + step]).astype(np.float64))
                weights[151 + step :] = 0
                weights[4:142] *= chosen.mask[step]
                if chosen.bias is not None:
                    weights[4:142] *= np.exp(chosen.bias[step, head % 2])
                total, summed = weights.sum(), weights @ values
                if chosen.rest is not None:
                    more = np.exp(chosen.rest.lse[step, head % 2])
                    total, summed = total + more, summed + more * chosen.rest.output[step, head % 2]
                output[head, step] = summed / total
        return output.astype(np.float32)


class TestComparisonSelector:
    @pytest.mark.parametrize("method", ["exact", "sliding_window", "snapkv", "quest", "quest_each_head"])
    @pytest.mark.parametrize("remainder", [False, True])
    def test_a_budget_of_everything_is_full_attention(
        self, rng: np.random.Generator, method: str, remainder: bool
    ) -> None:
        case = Case(rng, method, 160, remainder=remainder)
        np.testing.assert_allclose(case.found.output, case.full(), atol=1e-5)

    @pytest.mark.parametrize("method", sorted(BUILDERS))
    def test_is_its_index_head_by_head(self, rng: np.random.Generator, method: str) -> None:
        remainder = not method.startswith(("magicpig", "retroinfer"))
        needs_faiss(method)
        case = Case(rng, method, 32, remainder=remainder)
        np.testing.assert_allclose(case.found.output, case.by_hand(method, 32, remainder), atol=1e-4)

    def test_dense_layers_attend_all(self, rng: np.random.Generator) -> None:
        case = Case(rng, "sliding_window", 1, dense_layers=(1,))
        np.testing.assert_allclose(case.found.output, case.full(), atol=1e-5)

    def test_refuses_unknown_methods_and_second_estimates(self) -> None:
        with pytest.raises(ValueError, match="method = 'nothing'"):
            ComparisonSelector("nothing", 1)
        with pytest.raises(ValueError, match="retroinfer estimates"):
            ComparisonSelector("retroinfer", 1, remainder=True)
