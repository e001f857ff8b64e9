# SPDX-License-Identifier: Apache-2.0
"""What the tests of deploy/ share: paths, programs run to their end, a server with its page."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
# The version that CMake gives the programs.
VERSION = re.findall(r"^project\(ctkvr VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)[0]


def run(*command: str, status: int = 0, text: str | None = None, seconds: float = 120) -> str:
    """Runs a program to its end; returns what it printed on both streams. Fails unless it ends with `status`."""
    done = subprocess.run(
        command, input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False
    )
    assert done.returncode == status, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def program(variable: str) -> str:
    """A program under test. Without it nothing here can be proved, so that is a failure and no reason to skip."""
    path = os.environ.get(variable, "")
    if not path or not Path(path).is_file():
        raise FileNotFoundError(f"{variable} is {path!r}; it must name a program")
    return path


def made_package(folder: Path) -> Path:
    """The Debian package, made by CPack of the build under test."""
    run("cpack", "--config", os.environ["CTKVR_BUILD"] + "/CPackConfig.cmake", "-B", str(folder))
    (file,) = folder.glob("*.deb")
    return file


def parse_bytes(text: str) -> int:
    """A size as the program prints it."""
    digits = text.rstrip("KMGTiB")
    return int(digits) * {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[text[len(digits) :]]


def get(url: str) -> str:
    """The body of an HTTP reply of this machine."""
    with urllib.request.urlopen(url, timeout=10) as reply:
        return str(reply.read(), "utf-8")


def free_port() -> int:
    """A port of loopback that nobody listens on, for a program that cannot say which it took."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(holds: Callable[[], bool]) -> None:
    """Asks until it holds; fails when it does not within a minute."""
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come to hold within a minute")


def await_file(path: Path, process: subprocess.Popen[Any]) -> str:
    """The text of a file that appears whole once a process is ready."""
    while not path.exists():
        assert process.poll() is None, f"{process.args!r} ended with {process.returncode}"
        time.sleep(0.01)
    return path.read_text()


class Server:
    """A ctkvrd of the test's own, on free ports of loopback, until stop()."""

    def __init__(self, folder: Path, *flags: str) -> None:
        ready = folder / "ready.json"
        command = [
            program("CTKVRD"),
            "--listen_address=127.0.0.1:0",
            "--metrics_address=127.0.0.1:0",
            "--arena_bytes=256MiB",
            "--lanes=1",
            "--noaccess_log",
            f"--ready_file={ready}",
            *flags,
        ]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        addresses = json.loads(await_file(ready, self._process))
        self.address: str = addresses["listen_address"]
        self.metrics_address: str = addresses["metrics_address"]

    def page(self) -> str:
        """The text of /metrics."""
        return get(f"http://{self.metrics_address}/metrics")

    def stop(self) -> None:
        """Drains it."""
        self._process.terminate()
        assert self._process.wait(timeout=60) == 0


def metric_names(expression: str) -> set[str]:
    """Names of ctkvr's own series in an expression, recorded ones too."""
    return set(re.findall(r"\bctkvr[a-z0-9_:]*", re.sub(r'"[^"]*"', '""', expression)))


def selectors(expression: str) -> list[tuple[str, dict[str, str]]]:
    """Each metric of an expression with its label matchers that pin a value: {"method": "Retrieve"}, regexes split."""
    found = []
    for name, braces in re.findall(r"\b(ctkvr_[a-z0-9_]*)(?:\{([^}]*)\})?", expression):
        found.append((name, dict(re.findall(r'(\w+)=~?"([^"]*)"', braces))))
    return found


class Prometheus:
    """A Prometheus of the test's own: scrapes one server and evaluates the rules each second, until stop()."""

    def __init__(self, folder: Path, server: Server) -> None:
        config = folder / "prometheus.yml"
        targets = [{"targets": [server.metrics_address]}]
        config.write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(RULES)],
                    "scrape_configs": [{"job_name": "ctkvr", "static_configs": targets}],
                }
            )
        )
        self._address = f"127.0.0.1:{free_port()}"
        command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self._address}",
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _get(self, path: str, **arguments: str) -> Any:
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        answer = json.loads(get(url))
        assert answer["status"] == "success", answer
        return answer["data"]["result"]

    def query(self, expression: str) -> list[float]:
        """The values of an expression now."""
        return [float(sample["value"][1]) for sample in self._get("query", query=expression)]

    def query_range(self, expression: str, begin: float, end: float) -> list[tuple[dict[str, str], list[list[Any]]]]:
        """Labels and [time, value] of each series of an expression, a second apart."""
        series = self._get("query_range", query=expression, start=str(begin), end=str(end), step="1")
        return [(one["metric"], one["values"]) for one in series]

    def await_values(self, expression: str) -> list[float]:
        """The values of an expression once there are any; none when there are none within half a minute."""
        for _ in range(300):
            assert self._process.poll() is None, f"prometheus ended with {self._process.returncode}"
            with contextlib.suppress(urllib.error.URLError):
                if values := self.query(expression):
                    return values
            time.sleep(0.1)
        return []

    def stop(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait(timeout=60)


def fill(expression: str, interval: str) -> str:
    """A query of the dashboard with its variables as Grafana fills them in."""
    for variable, value in (("$job", ".*"), ("$instance", ".*"), ("$__rate_interval", interval)):
        expression = expression.replace(variable, value)
    return expression


def dashboard_queries() -> list[tuple[str, str]]:
    """Every query of the dashboard with the title of its panel, its variables filled in."""
    panels = json.loads((DEPLOY / "grafana" / "ctkvr.json").read_text())["panels"]
    return [(panel["title"], fill(target["expr"], "1m")) for panel in panels for target in panel.get("targets", [])]


def rule_queries() -> list[tuple[str, str]]:
    """Every expression of the rules with the name of its rule."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [(rule.get("alert") or rule["record"], rule["expr"]) for group in groups for rule in group["rules"]]
