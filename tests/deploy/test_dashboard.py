# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus over a loaded server answers every query of rules and dashboard."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

import pytest

from conftest import load
from tools import DEPLOY, Prometheus, Server, dashboard_queries, rule_queries

# What the load leaves out: quantiles of nothing are not numbers. The command line appends and asks by streams.
IDLE = re.compile(r'method="(Retrieve|Append)"')


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Has seen the server before and after some load."""
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), server)
    assert prometheus.await_values("ctkvr_build_info") == [1]
    load(server)
    # Some scrapes later, all that is recorded of other recorded series is there too.
    assert prometheus.await_values("count_over_time(ctkvr:arena_days_to_full[1m]) >= 3")
    yield prometheus
    prometheus.stop()


def test_every_query_of_the_dashboard_has_an_answer(prometheus: Prometheus) -> None:
    """At least a series each, of numbers."""
    queries = dashboard_queries()
    assert len(queries) > 40
    for title, expression in queries:
        values = prometheus.query(expression)
        assert values, f"{title}: {expression}: no series"
        if not IDLE.search(expression):
            assert not all(math.isnan(value) for value in values), f"{title}: {expression}: not a number"


def test_the_load_shows(prometheus: Prometheus) -> None:
    """Panels that a busy server must move, do."""
    queries = dashboard_queries()
    for title in (
        "Calls",
        "Decode, a message",
        "Stages, p99",
        "Lanes at work",
        "Tokens appended",
        "Bytes read a retrieval",
        "Exact repeats",
        "Needle share",
        "Calls by tenant",
    ):
        values = [value for name, expression in queries if name == title for value in prometheus.query(expression)]
        assert max(value for value in values if not math.isnan(value)) > 0, title


def test_every_recorded_series_is_recorded(prometheus: Prometheus) -> None:
    """And every series that an alert looks at is there, whether it fires or not."""
    for name, expression in rule_queries():
        if ":" in name:
            assert prometheus.query(name), f"{name} is not recorded"
        for selector in re.findall(r"\b(?:ctkvr[_:][\w:]*|up)(?:\{[^}]*\})?(?:\[\w+\])?", expression):
            counted = f"count_over_time({selector})" if selector.endswith("]") else selector
            assert prometheus.query(counted), f"{name}: {selector}: no series"


def test_nothing_fires_on_a_healthy_server(prometheus: Prometheus) -> None:
    """No alert is on at once."""
    assert prometheus.query('ALERTS{alertstate="firing"}') == []


def test_the_dashboard_is_whole() -> None:
    """Ids differ, panels do not overlap, each says what it shows."""
    panels = json.loads((DEPLOY / "grafana" / "ctkvr.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or len(panel["description"]) > 8
