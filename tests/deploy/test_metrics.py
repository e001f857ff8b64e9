# SPDX-License-Identifier: Apache-2.0
"""Names and labels in rules and dashboard are those of a running server's page."""

import re

import pytest

from conftest import load
from tools import DEPLOY, Server, dashboard_queries, metric_names, rule_queries, run, selectors


def labels_of(page: str) -> dict[str, dict[str, set[str]]]:
    """For each series name of the page, the values of each label."""
    found: dict[str, dict[str, set[str]]] = {}
    for name, braces in re.findall(r"^(ctkvr_\w+)(?:\{([^}]*)\})? ", page, re.MULTILINE):
        labels = found.setdefault(name, {})
        for label, value in re.findall(r'(\w+)="([^"]*)"', braces):
            labels.setdefault(label, set()).add(value)
    return found


def test_the_page_is_well_formed(server: Server, promtool: str) -> None:
    """As promtool judges: types, units, helps."""
    assert run(promtool, "check", "metrics", text=server.page()) == ""


def test_rules_and_dashboard_speak_of_series_that_are_there(server: Server) -> None:
    """Each name, and each label value that a selector asks for."""
    page = labels_of(server.page())
    recorded = {name for name, _ in rule_queries()}
    for rule, expression in rule_queries() + dashboard_queries():
        for name in metric_names(expression):
            assert name in page or name in recorded, f"{rule}: {name} is no series"
        for name, labels in selectors(expression):
            for label, values in labels.items():
                if label in ("job", "instance"):  # Prometheus' own
                    continue
                for value in values.split("|"):
                    assert value in page[name].get(label, set()), f"{rule}: {name} has no {label}={value}"


def test_the_runbook_speaks_of_series_that_are_there(server: Server) -> None:
    """Each name between backticks, and each label value with it."""
    page = labels_of(server.page())
    page |= {name.removesuffix("_count"): labels for name, labels in page.items()}  # a histogram by its own name
    recorded = {name for name, _ in rule_queries()}
    spoken = re.findall(r"`([^`]+)`", (DEPLOY / "README.md").read_text())
    series = {name for span in spoken for name in metric_names(span) if re.match(r"ctkvr(_[a-z]|:[a-z])", name)}
    assert len(series) >= 30
    for name in series:
        assert name in page or name in recorded, f"{name} is no series"
    for span in spoken:
        for name, labels in selectors(span):
            for label, value in labels.items():
                assert label == "code" or value in page[name][label], f"{span}: no {label}={value}"


@pytest.mark.parametrize(
    ("text", "names"), [('rate(ctkvr_a_total{b="ctkvr_c"}[5m]) / ctkvr:d:e1', {"ctkvr_a_total", "ctkvr:d:e1"})]
)
def test_names_are_found_in_expressions(text: str, names: set[str]) -> None:
    """The search itself, by an example."""
    assert metric_names(text) == names
    assert selectors(text)[0] == ("ctkvr_a_total", {"b": "ctkvr_c"})


def test_load_adds_no_series(server: Server) -> None:
    """Their number never changes, whatever clients do."""

    def series() -> list[str]:
        return [line.rpartition(" ")[0] for line in server.page().splitlines() if line.startswith("ctkvr_")]

    before = series()
    load(server)
    assert series() == before
    assert len(before) > 100
