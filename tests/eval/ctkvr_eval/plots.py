# SPDX-License-Identifier: Apache-2.0
"""Plots of results, each as SVG and PNG: dNLL against bytes read, against k, and recall against decode position."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ctkvr_eval.evaluate import Outcome
from ctkvr_eval.results import Row

_BUCKET = 8  # observed positions averaged for one point of a curve
_K = 256  # of the plot against bytes read


def keep_curve(folder: Path, row: Row, outcome: Outcome) -> None:
    """Adds the run's recall and mass by decode position to curves.json."""
    if not outcome.choices.layers:
        return
    path = folder / "curves.json"
    curves = json.loads(path.read_text()) if path.is_file() else {}
    curves[f"{row.text} {row.method} {row.k} {row.seed} {row.scored_tokens}"] = {
        name: [round(float(part.mean()), 4) for part in _buckets(outcome.choices.curve(f"{name}_at"))]
        for name in ("recall", "mass")
    }
    path.write_text(json.dumps(curves, indent=1, sort_keys=True) + "\n")


def _buckets(curve: Any) -> list[Any]:
    return np.array_split(curve, max(len(curve) // _BUCKET, 1))


def draw(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """Writes all plots that the rows have something for."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "ctkvr"  # the same file for the same rows
    written = []
    for text in dict.fromkeys(row.text for row in rows):
        of_text = [row for row in rows if row.text == text]
        plots = folder / "plots"
        written += _save(plots, f"bytes-{text}", partial(_against_bytes, rows=of_text, text=text))
        written += _save(plots, f"k-{text}", partial(_against_k, rows=of_text, text=text))
        written += _save(plots, f"recall-{text}", partial(_against_position, folder=folder, text=text))
    return written


def _save(folder: Path, name: str, fill: Callable[[Any], bool]) -> list[Path]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    written = []
    if fill(axes):
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / f"{name}.{kind}" for kind in ("svg", "png")]
        for path in written:
            figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return written


def _against_bytes(axes: Any, rows: Sequence[Row], text: str) -> bool:
    found = [row for row in rows if row.k == _K and row.bytes_read > 0]
    for row in found:
        x, bars = 100 * row.share_read, [[max(row.dnll - row.dnll_low, 0)], [max(row.dnll_high - row.dnll, 0)]]
        own = row.method.startswith("ctkvr")
        axes.errorbar(x, row.dnll, yerr=bars, fmt="o" if own else "s", color=_colour(row.method), capsize=2)
        axes.annotate(row.method, (x, row.dnll), xytext=(4, 3), textcoords="offset points", fontsize=7)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=0.02)
    axes.set_xlabel("bytes read a step, % of scanning the keys in 16 bits")
    axes.set_ylabel("rise of the loss over full attention (nats a token)")
    axes.set_title(f"{text}, K = {_K}")
    return bool(found)


def _against_k(axes: Any, rows: Sequence[Row], text: str) -> bool:
    curves: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        curves[row.method].append(row)
    found = {method: sorted(of, key=lambda row: row.k) for method, of in curves.items() if len({r.k for r in of}) > 1}
    for method, of in found.items():
        axes.plot([row.k for row in of], [row.dnll for row in of], marker="o", label=method, color=_colour(method))
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=0.02)
    axes.set_xlabel("K, tokens chosen a KV head")
    axes.set_ylabel("rise of the loss over full attention (nats a token)")
    axes.set_title(text)
    if found:
        axes.legend(fontsize=7)
    return bool(found)


def _against_position(axes: Any, folder: Path, text: str) -> bool:
    path = folder / "curves.json"
    curves = json.loads(path.read_text()) if path.is_file() else {}
    found = 0
    for name, curve in curves.items():
        of, method, k, _, scored = name.split(" ")
        if of != text or int(k) != _K:
            continue
        x = (np.arange(len(curve["recall"])) + 0.5) * int(scored) / len(curve["recall"])
        axes.plot(x, curve["recall"], label=method, color=_colour(method))
        found += 1
    axes.set_xlabel("tokens behind the prompt")
    axes.set_ylabel(f"recall of the exact best {_K}")
    axes.set_title(text)
    if found:
        axes.legend(fontsize=7)
    return found > 0


def _colour(method: str) -> Any:
    import zlib

    import matplotlib.pyplot as plt

    return plt.get_cmap("tab20")(zlib.crc32(method.encode()) % 20)
