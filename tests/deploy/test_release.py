# SPDX-License-Identifier: Apache-2.0
"""One version everywhere, a changelog of the usual form, and bills of materials that are true."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

import sbom
from tools import DEPLOY, ROOT, VERSION, made_package, program, run

STATUS = """
Package: ctkvr
Status: install ok installed
Architecture: amd64
Version: 1.2.3
Depends: liba (>= 2), either | libb, libvirtual-1

Package: liba
Status: install ok installed
Architecture: amd64
Version: 2.0-1
Depends: libc

Package: libb
Status: install ok installed
Architecture: amd64
Version: 1:3.0-2
Depends: liba

Package: libreal
Status: install ok installed
Architecture: amd64
Version: 4
Provides: libvirtual-1 (= 4)

Package: libc
Status: install ok installed
Architecture: amd64
Version: 5
Depends: libc

Package: either
Status: deinstall ok config-files
Architecture: amd64
Version: 9

Package: unrelated
Status: install ok installed
Architecture: all
Version: 7
"""


def bill(*arguments: str) -> dict[str, Any]:
    """What the program writes; valid by CycloneDX' own schema."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    text = subprocess.check_output([sys.executable, str(DEPLOY / "sbom.py"), *arguments], env=environment, text=True)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    parsed: dict[str, Any] = json.loads(text)
    return parsed


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of this build."""
    return made_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def package_bill(package: Path) -> dict[str, Any]:
    """Its bill."""
    return bill("package", str(package))


def purls(bom: dict[str, Any]) -> dict[str, str]:
    """The purl of each component, by name."""
    return {part["name"]: part["purl"] for part in bom["components"]}


def test_the_version_is_the_same_everywhere() -> None:
    """Programs, Python client, image, Kubernetes, runbook."""
    assert run(program("CTKVRD"), "--version") == f"ctkvrd {VERSION}\n"
    stated = 0
    for file, pattern in (
        ("client/python/src/ctkvr/_version.py", r'__version__ = "(.*)"'),
        ("deploy/kubernetes/base/kustomization.yml", r"newTag: ([^}]+)"),
        ("deploy/docker/Dockerfile", r"ctkvr:(\d\S*)"),
        ("deploy/README.md", r"(?:\bv|ctkvr[:_ ])(\d+\.\d+\.\d+)"),
        ("deploy/sbom.py", r"ctkvr_(\d[^_]*)_"),
    ):
        found = re.findall(pattern, (ROOT / file).read_text())
        assert set(found) == {VERSION}, f"{file} says {found}"
        stated += len(found)
    assert stated > 8


def test_the_changelog_is_of_the_form_it_names() -> None:
    """Newest first, dated, of the six kinds; this version is its newest or what is being made."""
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    releases = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:]]
    assert all(releases)
    numbers = [tuple(int(part) for part in release.groups()) for release in releases if release]
    assert numbers == sorted(numbers, reverse=True)
    current = tuple(int(part) for part in VERSION.split("."))
    assert not numbers or numbers[0] <= current
    kinds = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert kinds
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_an_images_bill_names_all_that_is_installed(tmp_path: Path) -> None:
    """With what each needs, alternatives and provided names resolved; what is not installed is not in it."""
    (tmp_path / "status").write_text(STATUS)
    bom = bill("image", str(tmp_path / "status"))
    assert bom["metadata"]["component"]["version"] == "1.2.3"
    assert set(purls(bom)) == {"liba", "libb", "libreal", "libc", "unrelated"}
    assert purls(bom)["libb"] == "pkg:deb/debian/libb@1:3.0-2?arch=amd64&distro=debian-12"
    edges = {entry["ref"]: set(entry.get("dependsOn", [])) for entry in bom["dependencies"]}
    at = purls(bom)
    assert edges[bom["metadata"]["component"]["bom-ref"]] == {at["liba"], at["libb"], at["libreal"]}
    assert edges[at["libb"]] == {at["liba"]}
    assert edges[at["unrelated"]] == set()


def test_a_bill_with_a_gap_is_none(tmp_path: Path) -> None:
    """What is needed and not installed is named, exit code 1."""
    (tmp_path / "status").write_text(STATUS.replace("Package: libreal", "Package: libother").replace("Provides", "Tag"))
    command = [sys.executable, str(DEPLOY / "sbom.py"), "image", str(tmp_path / "status")]
    assert run(*command, status=1) == "sbom.py: ctkvr needs libvirtual-1, which is not installed\n"


def test_a_packages_bill_names_what_its_programs_load(package: Path, package_bill: dict[str, Any]) -> None:
    """Each shared library that the loader finds for them, by the package that owns it; the file by its digest."""
    libraries = set()
    for variable in ("CTKVRD", "CTKVR_CLI"):
        libraries |= {
            Path(os.path.realpath(found)) for found in re.findall(r"=> (\S+) ", run("ldd", program(variable)))
        }
    # Packages name their files below /lib or /usr/lib, which is one folder.
    owners = run("dpkg", "-S", *(f"*/{library.parent.name}/{library.name}" for library in libraries))
    loaded = {line.partition(":")[0] for line in owners.splitlines()}
    assert len(loaded) > 10
    assert loaded <= set(purls(package_bill))
    (digest,) = package_bill["metadata"]["component"]["hashes"]
    assert digest["content"] == run("sha256sum", str(package)).split()[0]
    assert package_bill == bill("package", str(package))  # no chance in it


def test_a_packages_bill_names_the_libraries_that_are_headers_alone(package_bill: dict[str, Any]) -> None:
    """Every header of another package that our sources include is of one in the bill, or comes with its library."""
    owners = set()
    for folder in ("kernels", "server", "client"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".h", ".cc"):
                for header in re.findall(r'#include [<"]([\w+/.-]+)[>"]', file.read_text()):
                    path = Path("/usr/include", header)
                    if path.is_file() and header.count("/") + header.endswith((".h", ".hpp")) > 0:
                        owners.add(path)
    packages = {
        line.split(":")[0] for line in run("dpkg", "-S", *sorted(str(path.resolve()) for path in owners)).splitlines()
    } - {"libc6-dev", "linux-libc-dev"}
    assert packages >= set(sbom.COMPILED_IN)
    known = sbom.installed(sbom.STATUS)
    named = set(purls(package_bill))
    for name in packages:
        assert name in named or sbom.needs(known[name], known) & named, f"{name} is compiled in and not named"
    uses = {part["name"] for part in package_bill["components"] if part.get("properties")}
    assert uses == set(sbom.COMPILED_IN)


def test_the_threat_model_names_tests_that_are_there() -> None:
    """One at least for each threat."""
    text = (DEPLOY / "THREAT_MODEL.md").read_text()
    rows = re.findall(r"^\| (?!threat|---)(.*) \|$", text, re.MULTILINE)
    assert len(rows) > 8
    for row in rows:
        shown = re.findall(r"`(tests/[^`]+)`", row)
        assert shown, row
        for path in shown:
            assert (ROOT / path).is_file(), path
