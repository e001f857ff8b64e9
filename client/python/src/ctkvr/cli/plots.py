# SPDX-License-Identifier: Apache-2.0
"""Pictures of what heads look at, and of recall. matplotlib, for it draws PNG and SVG without a display."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ctkvr.cli.looks import Looks
from ctkvr.cli.top_view import printable
from ctkvr.cli.trace import RecordedAnswer, Trace

BINS = 256  # a side of a picture, at most
SHARE_MIN = 1e-4  # of the attention on a bin; less is left white
NEEDLE_SHARE = 0.1  # of a head's attention on one token
_MEAN_POSITIONS = 32  # of the thick line of recall

Image = npt.NDArray[np.float64]


def save(figure: Figure, out: Path) -> None:
    """ValueError: an ending that matplotlib does not know."""
    figure.savefig(out, dpi=150, bbox_inches="tight")


# ---- Positions -------------------------------------------------------------------------------------------------------


def images_of(looks: Looks) -> tuple[Image, Image]:
    """Mean shares of the attention on bins of cache positions: [rows, bins] of all heads, and [q_heads, bins].

    A row is as many decoded positions as give at most BINS rows. ValueError: nothing was looked at.
    """
    if not looks.positions:
        raise ValueError(f"{looks.name}: no decoded position to look at")
    end = max(looks.positions) + 1
    heads = len(looks.ids[0])
    width = -(-end // BINS)
    height = -(-len(looks.positions) // BINS)
    by_position = np.zeros((-(-len(looks.positions) // height), -(-end // width)))
    by_head = np.zeros((heads, by_position.shape[1]))
    for place, (ids, shares) in enumerate(zip(looks.ids, looks.shares, strict=True)):
        for head in range(heads):
            np.add.at(by_position[place // height], ids[head] // width, shares[head])
            np.add.at(by_head[head], ids[head] // width, shares[head])
    rows = np.bincount(np.arange(len(looks.positions)) // height)[:, np.newaxis]
    return by_position / (rows * heads), by_head / len(looks.positions)


def draw_positions(looks: Looks) -> Figure:
    """Above, the mean of all heads over decode position; below, each query head over all decoded positions."""
    by_position, by_head = images_of(looks)
    first, last = looks.positions[0], looks.positions[-1]
    figure = Figure(figsize=(9, 7))
    upper, lower = figure.subplots(2, 1, sharex=True)
    extents = ((0.0, last + 1.0, first - 0.5, last + 0.5), (0.0, last + 1.0, -0.5, len(by_head) - 0.5))
    for axes, image, extent in zip((upper, lower), (by_position, by_head), extents, strict=True):
        drawn = axes.imshow(
            np.where(image < SHARE_MIN, np.nan, image),
            norm=LogNorm(SHARE_MIN, 1),
            extent=extent,
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            cmap="viridis_r",
        )
    figure.colorbar(drawn, ax=[upper, lower], label=f"mean {looks.what}")
    upper.set_title(printable(looks.name), parse_math=False)
    upper.set(ylabel="decode position")
    lower.yaxis.set_major_locator(MaxNLocator(integer=True))
    lower.set(xlabel="cache position", ylabel="query head")
    return figure


# ---- Recall ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recall:
    """How good a session's answers were."""

    name: str
    positions: list[int]
    recall: list[float]  # mean over sets, of each position
    needles_found: list[int]
    needles_missed: list[int]  # by position

    @property
    def needle_share(self) -> float | None:
        """None: no needle was met."""
        needles = sum(self.needles_found) + sum(self.needles_missed)
        return sum(self.needles_found) / needles if needles else None


def recall_of(trace: Trace, every: int) -> Recall:
    """Of the exact best k among the tokens that are not always included, the share that was chosen; and needles.

    Ranked as reduction sum_softmax does, over the keys as they were appended. A needle is a query head with more than
    NEEDLE_SHARE of its attention on one such token; it is found where the heaviest such token was chosen. ValueError:
    the trace has no answers.
    """
    if not trace.answers:
        raise ValueError(f"{trace.name}: no answers.jsonl; recall is of what a server chose: record a session")
    found = Recall(trace.name, trace.decoded(every), [], [], [])
    for position in found.positions:
        recall, needles, missed = _judge(trace.answers[position], trace.shares(position))
        found.recall.append(recall)
        found.needles_found.append(needles - missed)
        found.needles_missed.append(missed)
    return found


def _judge(answer: RecordedAnswer, shares: npt.NDArray[np.float64]) -> tuple[float, int, int]:
    """(recall, needles, needles missed) of one position; shares [q_heads, tokens]."""
    heads, tokens = shares.shape
    free = np.arange(min(answer.sink_tokens, tokens), max(tokens - answer.window_tokens, answer.sink_tokens))
    sets = len(answer.chosen)
    recalls: list[float] = []
    needles = missed = 0
    for set_, chosen in enumerate(answer.chosen):
        own = shares[set_ * heads // sets : (set_ + 1) * heads // sets][:, free]
        best = free[np.argsort(-own.sum(axis=0), kind="stable")[: answer.k_tokens]]
        recalls.append(float(np.isin(best, chosen).mean()) if len(best) else 1.0)
        if len(free):
            heavy = own.max(axis=1) > NEEDLE_SHARE
            needles += int(heavy.sum())
            missed += int((~np.isin(free[own.argmax(axis=1)], chosen))[heavy].sum())
    return float(np.mean(recalls)), needles, missed


def draw_recall(found: Recall) -> Figure:
    """Recall of each decoded position, its running mean, and a cross where a needle was missed. ValueError: nothing."""
    if not found.positions:
        raise ValueError(f"{found.name}: no answered position to judge")
    positions, recall = np.array(found.positions), np.array(found.recall)
    figure = Figure(figsize=(9, 4))
    axes = figure.subplots()
    axes.plot(positions, recall, linewidth=0.5, alpha=0.6, label="recall of the exact best k")
    width = min(_MEAN_POSITIONS, len(recall))
    means = np.convolve(recall, np.ones(width) / width, mode="valid")
    axes.plot(positions[width - 1 :], means, linewidth=2, label=f"mean of the last {width}")
    missed = np.array(found.needles_missed) > 0
    axes.plot(positions[missed], np.zeros(missed.sum()), "rx", label=f"needle missed ({sum(found.needles_missed)})")
    share = "unknown" if found.needle_share is None else f"{found.needle_share:.3f}"
    title = f"{printable(found.name)}: recall {recall.mean():.3f}, needle share {share}"
    axes.set_title(title, parse_math=False)
    axes.set(
        xlabel="decode position",
        ylabel="recall",
        ylim=(-0.05, 1.05),
    )
    axes.legend(loc="lower right")
    return figure
