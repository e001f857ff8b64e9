# SPDX-License-Identifier: Apache-2.0
"""The image's description says what the package, the program and Kubernetes say. It is built by hand."""

import re

import yaml

from tools import DEPLOY, ROOT, program, run

TEXT = (DEPLOY / "docker" / "Dockerfile").read_text()
LAST = TEXT.rpartition("\nFROM ")[2]


def test_the_last_stage_runs_the_packaged_server_as_nobody_special() -> None:
    """The user is a number, and the one that Kubernetes runs it as."""
    pod = yaml.safe_load((DEPLOY / "kubernetes" / "base" / "statefulset.yml").read_text())["spec"]["template"]["spec"]
    user = pod["securityContext"]["runAsUser"]
    assert re.search(rf"^USER {user}:{pod['securityContext']['runAsGroup']}$", LAST, re.MULTILINE)
    assert 'ENTRYPOINT ["/usr/bin/ctkvrd"]' in LAST
    assert "/package/*.deb" in LAST


def test_its_ports_are_the_programs_defaults() -> None:
    """As --help names them."""
    ports = re.findall(r'"127\.0\.0\.1:(\d+)"; CTKVR_', run(program("CTKVRD"), "--help"))
    assert re.search(r"^EXPOSE (.*)$", LAST, re.MULTILINE).group(1).split() == ports  # type: ignore[union-attr]


def test_every_stage_begins_with_the_base_that_was_given() -> None:
    """And the packages to build with are those of the one list."""
    assert re.findall(r"^FROM (\S+) AS (\w+)$", TEXT, re.MULTILINE) == [("${BASE}", "build"), ("${BASE}", "cpu")]
    assert "/src/deploy/packages.apt" in TEXT


def test_build_folders_stay_out_of_it() -> None:
    """What is copied is the sources."""
    assert {".git", "build"} <= set((ROOT / ".dockerignore").read_text().split())
