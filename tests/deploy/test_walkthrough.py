# SPDX-License-Identifier: Apache-2.0
"""The runbook's way from nothing to a secured, scraped and alerting server, walked by its own commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import DEPLOY, RULES, free_port, get, program, until

TITLE = "From nothing to a server that is secured, scraped and alerting"
PORTS = ("7420", "9464", "9090", "9093")  # those of the runbook; free ones stand in for them


class Shell:
    """A bash that lives from block to block, as a reader's does, until close()."""

    def __init__(self, folder: Path) -> None:
        path = [str(Path(program(name)).parent) for name in ("CTKVRD", "CTKVR_CLI")]
        self._process = subprocess.Popen(
            ["bash", "-euo", "pipefail"],
            cwd=folder,
            env={**os.environ, "PATH": ":".join([*path, os.environ["PATH"]])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, block: str) -> str:
        """What the commands print. Fails when one of them does, or when they take longer than a minute."""
        assert self._process.stdin
        assert self._process.stdout
        # Background jobs keep the pipe open when the shell ends, so it says that it does.
        self._process.stdin.write(f"trap 'echo the shell ended' EXIT\n{block}\necho the block ended\n")
        self._process.stdin.flush()
        printed = ""
        previous = signal.signal(signal.SIGALRM, self._late)
        signal.alarm(60)
        try:
            for line in self._process.stdout:
                if line == "the block ended\n":
                    return printed
                assert line != "the shell ended\n", f"a command failed:\n{block}\n{printed}"
                printed += line
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, previous)
        raise AssertionError(f"the shell is gone:\n{block}\n{printed}")

    def refused(self, command: str) -> str:
        """What a command says that must fail."""
        printed = self.run(f"if {command}; then echo 'it was let in'; fi")
        assert "it was let in" not in printed
        return printed

    @staticmethod
    def _late(*_: Any) -> None:
        raise TimeoutError("the block of commands did not end within a minute")

    def close(self) -> None:
        """Ends it and what it started."""
        os.killpg(self._process.pid, signal.SIGTERM)
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def ports() -> dict[str, str]:
    """For each port of the runbook, one that is free here."""
    return {port: str(free_port()) for port in PORTS}


@pytest.fixture(scope="module")
def address(ports: dict[str, str]) -> str:
    """Where the walk's server listens."""
    return f"127.0.0.1:{ports['7420']}"


@pytest.fixture(scope="module")
def blocks(ports: dict[str, str]) -> list[str]:
    """The section's commands, block by block, with this machine's ports, the tree's rules, and shorter lives."""
    section = (DEPLOY / "README.md").read_text().partition(f"### {TITLE}\n")[2].partition("\n### ")[0]
    found = re.findall(r"(?:^    .*\n)+", section, re.MULTILINE)
    text = "\0".join(re.sub("^    ", "", block, flags=re.MULTILINE) for block in found)
    for port, free in ports.items():
        assert f":{port}" in text
        text = text.replace(f":{port}", f":{free}")
    packaged = "/usr/share/doc/ctkvr/prometheus/rules.yml"  # test_package.py holds it there
    assert packaged in text
    text, shortened = re.subn(r"-days \d+", "-days 1", text.replace(packaged, str(RULES)))
    assert shortened == 2
    return text.split("\0")


@pytest.fixture(scope="module")
def shell(blocks: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A fresh folder in which all blocks but the last went well: certificates to Alertmanager."""
    shell = Shell(tmp_path_factory.mktemp("walkthrough"))
    try:
        for block in blocks[:-1]:
            shell.run(block)
        yield shell
    finally:
        shell.close()


def series(ports: dict[str, str], expression: str) -> list[Any]:
    """What the walk's Prometheus answers."""
    answer = json.loads(get(f"http://127.0.0.1:{ports['9090']}/api/v1/query?query={expression}"))
    found: list[Any] = answer["data"]["result"]
    return found


def alerts(ports: dict[str, str]) -> list[dict[str, Any]]:
    """What the walk's Alertmanager knows."""
    found: list[dict[str, Any]] = json.loads(get(f"http://127.0.0.1:{ports['9093']}/api/v2/alerts"))
    return found


def test_the_page_has_its_blocks(blocks: list[str]) -> None:
    """Those that the tests below walk through."""
    assert len(blocks) == 5


def refusals(ports: dict[str, str]) -> dict[str, int]:
    """How many calls the walk's server refused for who called, by what was wrong."""
    page = get(f"http://127.0.0.1:{ports['9464']}/metrics")
    found = re.findall(r'^ctkvr_access_refusals_total{reason="(\w+)"} (\d+)$', page, re.MULTILINE)
    return {reason: int(count) for reason, count in found}


def test_clients_get_in_by_certificate_and_token(shell: Shell, address: str, ports: dict[str, str]) -> None:
    """Not in plaintext, not without a certificate, not with one of another authority, not with one that expired."""
    shell.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=client"
        " -keyout foreign.key -out foreign.pem"
    )
    shell.run("openssl x509 -req -in client.csr -CA ca.pem -CAkey ca.key -days -1 -out expired.pem")
    anyone = f"ctkvr-cli --address {address}"
    for flags in (
        "",
        "--tls-ca ca.pem",
        "--tls-ca ca.pem --tls-certificate foreign.pem --tls-key foreign.key",
        "--tls-ca ca.pem --tls-certificate expired.pem --tls-key client.key",
    ):
        shell.run("ask info")
        assert "UNAVAILABLE" in shell.refused(f"{anyone} {flags} info")
    # And who has a certificate needs a token besides, one that the server knows and that has not run out.
    known = f"{anyone} --tls-ca ca.pem --tls-certificate client.pem --tls-key client.key"
    before = refusals(ports)
    assert "UNAUTHENTICATED" in shell.refused(f"{known} info")
    shell.run("ctkvr-cli token | head -n 1 >other.token")
    assert "UNAUTHENTICATED" in shell.refused(f"{known} --token-file other.token info")
    shell.run("mv access.toml kept.toml; sed 's/2099/2020/' kept.toml >access.new; mv access.new access.toml")
    until(lambda: "UNAUTHENTICATED" in shell.run("ask info 2>&1 || true"))
    shell.run("mv kept.toml access.toml")
    until(lambda: "UNAUTHENTICATED" not in shell.run("ask info 2>&1 || true"))
    counted = refusals(ports)
    assert counted["unknown_certificate"] == before["unknown_certificate"] + 1  # it is no tenant's name
    assert counted["unknown_token"] == before["unknown_token"] + 1
    assert counted["expired_token"] > before["expired_token"]
    token = shell.run("cat worker.token").strip()
    assert token not in shell.run("cat ctkvrd.log")
    # And nobody takes this server for one of another authority.
    own = "--tls-certificate client.pem --tls-key client.key"
    assert "UNAVAILABLE" in shell.refused(f"{anyone} --tls-ca foreign.pem {own} info")


def test_a_renewed_certificate_is_served_without_a_restart(shell: Shell, address: str) -> None:
    """By the runbook's own function; who asks meanwhile is answered."""
    serial = "openssl x509 -noout -serial"
    served = f"openssl s_client -connect {address} -alpn h2 -cert client.pem -key client.key </dev/null | {serial}"
    assert shell.run(served).splitlines()[-1] == shell.run(f"{serial} -in server.pem").strip()
    shell.run("issue server")
    renewed = shell.run(f"{serial} -in server.pem").strip()
    until(lambda: renewed in shell.run(f"ask info >info.txt; {served}"))
    shell.run("kill -0 $server")


def test_a_healthy_server_is_scraped_and_nothing_fires(shell: Shell, ports: dict[str, str]) -> None:
    """Its calls are counted, the rules are evaluated."""
    until(lambda: series(ports, "ctkvr:arena_reserved:ratio") != [])
    (calls,) = series(ports, 'sum(ctkvr_rpc_calls_total{code="OK"})')
    assert float(calls["value"][1]) > 0
    assert alerts(ports) == []


def test_a_cause_becomes_an_alert(shell: Shell, blocks: list[str], ports: dict[str, str]) -> None:
    """The last block: firing in Prometheus, and known to the Alertmanager with its entry in the runbook."""
    shell.run(blocks[-1])
    firing = json.loads(get(f"http://127.0.0.1:{ports['9090']}/api/v1/alerts"))["data"]["alerts"]
    # Others may be pending: calls were refused above, though not for long.
    assert [alert["labels"]["alertname"] for alert in firing if alert["state"] == "firing"] == ["CtkvrRestarted"]
    (alert,) = alerts(ports)
    assert alert["labels"]["instance"] == f"127.0.0.1:{ports['9464']}"
    assert alert["annotations"]["runbook"] == "deploy/README.md#ctkvrrestarted"
