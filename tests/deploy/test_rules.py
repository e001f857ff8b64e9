# SPDX-License-Identifier: Apache-2.0
"""Every alert fires where it should and stays silent where it should, by promtool on made-up series."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import DEPLOY, RULES, run

ME = '{job="ctkvr",instance="a"}'


def calls(code: str, values: str, method: str = "Retrieve") -> dict[str, str]:
    """A series of calls that ended with a code."""
    return {f'ctkvr_rpc_calls_total{{job="ctkvr",instance="a",method="{method}",code="{code}"}}': values}


def items(code: str, values: str) -> dict[str, str]:
    """A series of items that ended with a code."""
    return {f'ctkvr_rpc_items_total{{job="ctkvr",instance="a",method="Retrieve",code="{code}"}}': values}


def traffic(good: str, bad: str, code: str = "INTERNAL") -> dict[str, str]:
    """Calls and items: all calls go well, items do not."""
    return calls("OK", good) | calls(code, "0x500") | items("OK", good) | items(code, bad)


def speed(fast: str, every: str) -> dict[str, str]:
    """Retrievals: within the objective, and all of them."""
    series = {}
    for metric, method in (("ctkvr_rpc_seconds", "Retrieve"), ("ctkvr_rpc_message_seconds", "Decode")):
        label = f'job="ctkvr",instance="a",method="{method}"'
        series[f'{metric}_bucket{{{label},le="0.05"}}'] = fast
        series[f"{metric}_count{{{label}}}"] = every
    return series


def gauges(**values: str) -> dict[str, str]:
    """Series of one server without further labels."""
    return {f"ctkvr_{name}{ME}": text for name, text in values.items()}


def needles(found: str, there: str) -> dict[str, str]:
    """What exact repeats found, of one source."""
    label = '{job="ctkvr",instance="a",source="sketch"}'
    return {f"ctkvr_truth_needles_found_total{label}": found, f"ctkvr_truth_needles_total{label}": there}


def refusals(kind: str, labels: str, values: str) -> dict[str, str]:
    """A series of calls that were refused: for who called (`access`), or by a tenant's quota."""
    return {f'ctkvr_{kind}_refusals_total{{job="ctkvr",instance="a",{labels}}}': values}


@dataclass
class Case:
    """Series a minute (or `step`) apart, and whether the alert fires at `at`."""

    alert: str
    fires: bool
    at: str
    series: dict[str, str] = field(default_factory=dict)
    step: str = "1m"


CASES = [
    # 3 % of calls and items fail: 30 times the budget, for an hour and more.
    Case("CtkvrAvailabilityBurn", True, "90m", traffic("0+9800x100", "0+600x100")),
    # As many, but of the client's making.
    Case("CtkvrAvailabilityBurn", False, "90m", traffic("0+9800x100", "0+600x100", "INVALID_ARGUMENT")),
    # It was bad for an hour, and is over: the short window ends the alarm.
    Case("CtkvrAvailabilityBurn", False, "98m", traffic("0+9800x100", "0+600x60 36000x40")),
    # 0.5 % for hours is no matter of minutes.
    Case("CtkvrAvailabilityBurn", False, "8h", traffic("0+99500x500", "0+500x500")),
    Case("CtkvrAvailabilityDrift", True, "4d", traffic("0+99500x100", "0+500x100"), "1h"),
    Case("CtkvrAvailabilityDrift", False, "4d", traffic("0+99950x100", "0+50x100"), "1h"),
    Case("CtkvrLatencyBurn", True, "90m", speed("0+80x100", "0+100x100")),
    Case("CtkvrLatencyBurn", False, "90m", speed("0+95x100", "0+100x100")),
    Case("CtkvrLatencyDrift", True, "4d", speed("0+96x100", "0+100x100"), "1h"),
    Case("CtkvrLatencyDrift", False, "4d", speed("0+995x100", "0+1000x100"), "1h"),
    Case("CtkvrDown", True, "10m", {f"up{ME}": "1x3 0x20"}),
    Case("CtkvrDown", False, "10m", {f"up{ME}": "1x7 0 1x20"}),
    Case("CtkvrAbsent", True, "10m", {'up{job="other"}': "1x20"}),
    Case("CtkvrAbsent", False, "10m", {'up{job="monitoring/ctkvr"}': "1x20"}),
    Case("CtkvrRestarted", True, "10m", gauges(start_time_seconds="100x4 400x20")),
    Case("CtkvrRestarted", False, "30m", gauges(start_time_seconds="100x4 400x40")),
    Case("CtkvrCrashLoop", True, "30m", gauges(start_time_seconds="1x5 2x5 3x5 4x5 5x20")),
    Case("CtkvrCrashLoop", False, "30m", gauges(start_time_seconds="1x5 2x5 3x5 4x20")),
    Case("CtkvrDeviceLost", True, "10m", gauges(device_lost="0x8 1x20")),
    Case("CtkvrDeviceLost", False, "10m", gauges(device_lost="0x20")),
    Case("CtkvrDeviceErrors", True, "10m", gauges(device_errors_total="0x8 1x20", sessions_failed_total="0x20")),
    Case("CtkvrDeviceErrors", True, "10m", gauges(device_errors_total="0x20", sessions_failed_total="0x8 1x20")),
    Case("CtkvrDeviceErrors", False, "10m", gauges(device_errors_total="3x20", sessions_failed_total="2x20")),
    Case("CtkvrMemoryFull", True, "10m", gauges(arena_bytes="100x20", arena_reserved_bytes="96x20")),
    Case("CtkvrMemoryFull", False, "10m", gauges(arena_bytes="100x20", arena_reserved_bytes="95x20")),
    # 5 GiB a day of 100 GiB, from 65 GiB on: 80 GiB after three days, full in four.
    Case(
        "CtkvrMemoryFillsUp",
        True,
        "75h",
        gauges(
            arena_bytes="107374182400x100", arena_reserved_bytes="69793218560+223696213x100", start_time_seconds="0x100"
        ),
        "1h",
    ),
    # Day and night, but no growth.
    Case(
        "CtkvrMemoryFillsUp",
        False,
        "90h",
        gauges(
            arena_bytes="107374182400x100",
            arena_reserved_bytes=" ".join(["1000+6400000000x11 76800000000-6400000000x11"] * 4),
            start_time_seconds="0x100",
        ),
        "1h",
    ),
    Case("CtkvrSessionsNearLimit", True, "10m", gauges(sessions="91x20", sessions_max="100x20")),
    Case("CtkvrSessionsNearLimit", False, "10m", gauges(sessions="90x20", sessions_max="100x20")),
    Case("CtkvrQueueFills", True, "10m", gauges(queue_items="51x20", queue_items_max="100x20")),
    Case("CtkvrQueueFills", False, "10m", gauges(queue_items="50x20", queue_items_max="100x20")),
    Case("CtkvrQueueRejects", True, "10m", gauges(queue_rejections_total="0+1x20")),
    Case("CtkvrQueueRejects", False, "30m", gauges(queue_rejections_total="0+1x9 9x40")),
    Case(
        "CtkvrCallsExpire",
        True,
        "30m",
        calls("OK", "0+99x40")
        | {
            'ctkvr_expired_calls_total{job="ctkvr",instance="a",point="queue"}': "0+1x40",
            'ctkvr_expired_calls_total{job="ctkvr",instance="a",point="flight"}': "0+1x40",
        },
    ),
    Case(
        "CtkvrCallsExpire",
        False,
        "30m",
        calls("OK", "0+200x40") | {'ctkvr_expired_calls_total{job="ctkvr",instance="a",point="queue"}': "0+1x40"},
    ),
    Case("CtkvrDrainStuck", True, "10m", gauges(draining="0 1x20")),
    Case("CtkvrDrainStuck", False, "10m", gauges(draining="0x6 1x20")),
    Case(
        "CtkvrLeasesExpire",
        True,
        "3h",
        {
            'ctkvr_sessions_ended_total{job="ctkvr",instance="a",end="expired"}': "0+2x200",
            'ctkvr_sessions_ended_total{job="ctkvr",instance="a",end="closed"}': "0+1x200",
        },
    ),
    Case(
        "CtkvrLeasesExpire",
        False,
        "3h",
        {
            'ctkvr_sessions_ended_total{job="ctkvr",instance="a",end="expired"}': "0+1x200",
            'ctkvr_sessions_ended_total{job="ctkvr",instance="a",end="closed"}': "0+2x200",
        },
    ),
    # Half of the needles are missed: 16 times the budget.
    Case("CtkvrNeedleShareBurn", True, "90m", needles("0+50x100", "0+100x100")),
    Case("CtkvrNeedleShareBurn", False, "90m", needles("0+96x100", "0+100x100")),
    # A fifth, for six hours and still.
    Case("CtkvrNeedleShareBurn", True, "8h", needles("0+80x500", "0+100x500")),
    # It is over: the short windows end the alarm.
    Case("CtkvrNeedleShareBurn", False, "8h", needles("0+80x400 32000+100x100", "0+100x500")),
    # Too few to judge by: one a minute.
    Case("CtkvrNeedleShareBurn", False, "90m", needles("0x100", "0+1x100")),
    Case("CtkvrNeedleShareDrift", True, "4d", needles("0+96x100", "0+100x100"), "1h"),
    Case("CtkvrNeedleShareDrift", True, "30h", needles("0+90x100", "0+100x100"), "1h"),
    Case("CtkvrNeedleShareDrift", False, "4d", needles("0+98x100", "0+100x100"), "1h"),
    Case("CtkvrNeedleShareDrift", False, "4d", needles("0x100", "0+20x100"), "1h"),
    Case("CtkvrCallsWithoutRight", True, "40m", refusals("access", 'reason="expired_token"', "0+12x60")),
    # A worker that tried twice with its old token.
    Case("CtkvrCallsWithoutRight", False, "40m", refusals("access", 'reason="expired_token"', "0x20 2x40")),
    Case("CtkvrTenantOverQuota", True, "40m", refusals("tenant", 'tenant="a",quota="memory"', "0+12x60")),
    Case("CtkvrTenantOverQuota", False, "40m", refusals("tenant", 'tenant="a",quota="memory"', "0+3x60")),
    Case(
        "CtkvrVersionsMixed",
        True,
        "3h",
        {
            'ctkvr_build_info{job="ctkvr",instance="a",version="1"}': "1x200",
            'ctkvr_build_info{job="ctkvr",instance="b",version="2"}': "1x200",
        },
    ),
    Case(
        "CtkvrVersionsMixed",
        False,
        "3h",
        {
            'ctkvr_build_info{job="ctkvr",instance="a",version="2"}': "1x200",
            'ctkvr_build_info{job="ctkvr",instance="b",version="2"}': "1x200",
        },
    ),
]


def alerts() -> dict[str, dict[str, Any]]:
    """The alerts of the rules, by name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def promtool_file(cases: list[Case], step: str) -> str:
    """The cases as promtool reads them. Groups in order: samples that a later one recorded may be too old to find."""
    groups = [group["name"] for group in yaml.safe_load(RULES.read_text())["groups"]]
    return yaml.safe_dump(
        {
            "rule_files": [str(RULES)],
            "evaluation_interval": step,
            "group_eval_order": groups,
            "tests": [promtool_test(case) for case in cases],
        }
    )


def promtool_test(case: Case) -> dict[str, Any]:
    """The case as promtool reads it."""
    firing = f'count(ALERTS{{alertname="{case.alert}",alertstate="firing"}})'
    return {
        "interval": case.step,
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "promql_expr_test": [
            {
                "expr": firing,
                "eval_time": case.at,
                "exp_samples": [{"labels": "{}", "value": 1}] if case.fires else [],
            }
        ],
    }


@pytest.mark.parametrize("step", sorted({case.step for case in CASES}))
def test_every_alert_fires_and_stays_silent_as_it_should(step: str, tmp_path: Path, promtool: str) -> None:
    """Runs all cases of that step; promtool names those that go wrong by expression and time."""
    file = tmp_path / "rules_test.yml"
    file.write_text(promtool_file([case for case in CASES if case.step == step], step))
    run(promtool, "test", "rules", str(file))


@pytest.mark.parametrize(
    ("reserved", "forecast"),
    [
        # A GiB an hour: 100 GiB are left after 100 hours, which last for 100 / 24 days.
        ("0+1073741824x200", "ctkvr:arena_days_to_full > 4.16 < 4.18"),
        # What shrinks does not get full.
        ("214748364800-1073741824x200", "ctkvr:arena_days_to_full > 365"),
    ],
)
def test_the_forecast_counts_the_days(reserved: str, forecast: str, tmp_path: Path, promtool: str) -> None:
    """Of an arena of 200 GiB."""
    series = gauges(arena_bytes="214748364800x200", arena_reserved_bytes=reserved)
    test = promtool_test(Case("CtkvrMemoryFillsUp", True, "100h", series, "1h"))
    test["promql_expr_test"][0]["expr"] = f"count({forecast})"
    file = tmp_path / "forecast.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1h", "tests": [test]}))
    run(promtool, "test", "rules", str(file))


def test_burn_alerts_and_dashboard_use_the_objectives_budgets() -> None:
    """What the objectives at the head of the rules leave over is what alerts, dashboard and runbook count with."""
    head = RULES.read_text().partition("groups:")[0]
    panels = json.loads((DEPLOY / "grafana" / "ctkvr.json").read_text())["panels"]
    runbook = (DEPLOY / "README.md").read_text()
    for name, alert, series, panel in (
        ("availability", "CtkvrAvailability", "errors", "Availability, budget burnt"),
        ("latency", "CtkvrLatency", "slow", "Latency, budget burnt"),
        ("needle share", "CtkvrNeedleShare", "missed_needles", "Needle share, budget burnt"),
    ):
        objective = re.search(rf"^#   {name} +([0-9.]+) %", head, re.MULTILINE)
        assert objective
        budget = f"{1 - float(objective.group(1)) / 100:.4g}"
        for kind, windows in (("Burn", ["1h", "5m", "6h", "30m"]), ("Drift", ["1d", "2h", "3d", "6h"])):
            expression = alerts()[alert + kind]["expr"]
            found = re.findall(rf"ctkvr:{series}:ratio_rate(\w+) > ([0-9.]+) \* ([0-9.]+)", expression)
            factors = ["14.4", "14.4", "6", "6"] if kind == "Burn" else ["3", "3", "1", "1"]
            assert found == [(window, factor, budget) for window, factor in zip(windows, factors, strict=True)]
        (drawn,) = (shown for shown in panels if shown["title"] == panel)
        for target in drawn["targets"]:
            assert re.fullmatch(rf"ctkvr:{series}:ratio_rate\w+{{.*}} / {budget}", target["expr"])
        assert re.search(rf"^\| {name} \| {re.escape(objective.group(1))} % ", runbook, re.MULTILINE)


def test_every_alert_has_a_case_of_each_kind() -> None:
    """No alert goes unproved, and no case speaks of an alert that is gone."""
    for fires in (True, False):
        assert {case.alert for case in CASES if case.fires is fires} == set(alerts())


def test_promtool_finds_a_wrong_expectation(tmp_path: Path, promtool: str) -> None:
    """The check above can fail."""
    case = Case("CtkvrDown", True, "10m", {f"up{ME}": "1x20"})
    file = tmp_path / "wrong.yml"
    file.write_text(promtool_file([case], "1m"))
    assert "FAILED" in run(promtool, "test", "rules", str(file), status=1)


def test_rules_are_well_formed(promtool: str) -> None:
    """As promtool judges."""
    run(promtool, "check", "rules", "--lint-fatal", str(RULES))


def test_every_alert_says_how_bad_it_is_and_where_to_read_on() -> None:
    """Its entry in the runbook has its name as heading and more than a line of text."""
    runbook = (DEPLOY / "README.md").read_text()
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["runbook"] == f"deploy/README.md#{name.lower()}"
        entry = re.search(rf"^#+ {name}\n\n(.+?)(?=^#|\Z)", runbook, re.MULTILINE | re.DOTALL)
        assert entry, f"deploy/README.md has no entry {name}"
        assert len(entry.group(1)) > 100, f"the entry {name} says next to nothing"


def test_the_runbooks_command_makes_a_resource_of_the_rules() -> None:
    """What is piped into kubectl for the Prometheus operator."""
    runbook = (DEPLOY / "README.md").read_text()
    command = re.search(r"^    (\{ printf .*?\}) \| kubectl apply -f -$", runbook, re.MULTILINE | re.DOTALL)
    assert command
    resource = yaml.safe_load(run("bash", "-c", f"cd {DEPLOY.parent}\n{command.group(1)}"))
    assert resource["kind"] == "PrometheusRule"
    assert resource["spec"] == yaml.safe_load(RULES.read_text())
