# SPDX-License-Identifier: Apache-2.0
"""Draws the dashboard's panels of a real run as deploy/grafana/ctkvr.png, for the runbook.

Run by hand, with matplotlib beside requirements.txt, after a change of the dashboard:
    CTKVRD=build/release/server/ctkvrd CTKVR_CLI=build/release/client/ctkvr-cli python tests/deploy/draw_dashboard.py
It serves, loads and scrapes for a minute on this machine.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl  # type: ignore[import-not-found,unused-ignore]
import matplotlib.pyplot as plt  # type: ignore[import-not-found,unused-ignore]
from PIL import Image  # type: ignore[import-not-found,unused-ignore]

from tools import DEPLOY, ROOT, Prometheus, Server, fill, program, run

SECONDS = 60
COLUMNS = 3


def load(server: Server) -> None:
    """A minute of a mixed load, with a pause in which leases and gauges show."""
    trace = str(ROOT / "tests/traces/records-layer07")
    end = time.time() + SECONDS
    while time.time() < end:
        for more in (["--source", "sketch"], ["--source", "exact"], ["--source", "query_centroids"]):
            command = ["bench", "--tokens", "16384", "--retrievals", "200", "--in-flight", "4", *more]
            run(program("CTKVR_CLI"), "--address", server.address, *command)
        run(program("CTKVR_CLI"), "--address", server.address, "replay", trace, "--steps", "40", "--answer", "rows")
        time.sleep(2)


def label(template: str, labels: dict[str, str]) -> str:
    """A legend as Grafana makes it."""
    for name, value in labels.items():
        template = template.replace("{{" + name + "}}", value)
    return template


def draw(axes: Any, panel: dict[str, Any], prometheus: Prometheus, begin: float, end: float) -> None:
    """One panel: its series that are not all nought, or all of them when none moves."""
    lines = []
    for target in panel["targets"]:
        for labels, values in prometheus.query_range(fill(target["expr"], "10s"), begin, end):
            points = [(float(at) - begin, float(value)) for at, value in values if value != "NaN"]
            lines.append((label(target["legendFormat"], labels), points))
    moving = [line for line in lines if any(value for _, value in line[1])]
    for name, points in moving or lines[:1]:
        axes.plot([at for at, _ in points], [value for _, value in points], linewidth=1, label=name)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.set_title(f"{panel['title']} [{unit}]", fontsize=7)
    axes.tick_params(labelsize=5)
    axes.set_xlim(0, end - begin)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(mpl.ticker.EngFormatter(sep=""))
    axes.legend(fontsize=4.5, loc="upper left", framealpha=0.6)


def main() -> None:
    """Serves, loads, draws."""
    panels = json.loads((DEPLOY / "grafana" / "ctkvr.json").read_text())["panels"]
    drawn = [panel for panel in panels if panel["type"] != "row"]
    with tempfile.TemporaryDirectory() as name:
        server = Server(Path(name), "--lanes=2", "--truth_share=0.2", "--truth_budget=0.2")
        prometheus = Prometheus(Path(name), server)
        begin = time.time()
        load(server)
        end = time.time()
        figure, grid = plt.subplots(-(-len(drawn) // COLUMNS), COLUMNS, figsize=(11, 1.55 * len(drawn) / COLUMNS))
        for axes, panel in zip(grid.flat, drawn, strict=False):
            draw(axes, panel, prometheus, begin, end)
        prometheus.stop()
        server.stop()
    figure.tight_layout(pad=0.5)
    picture = DEPLOY / "grafana" / "ctkvr.png"
    figure.savefig(picture, dpi=80, metadata={"Software": None})
    Image.open(picture).convert("RGB").quantize(32).save(picture, optimize=True)  # a quarter of its bytes


if __name__ == "__main__":
    main()
