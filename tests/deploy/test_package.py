# SPDX-License-Identifier: Apache-2.0
"""The Debian package: what it holds, that its programs run from it, its unit, manuals and completion."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tools import DEPLOY, made_package, program, run

UNIT = DEPLOY / "debian" / "ctkvrd.service"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, made by CPack of this build."""
    return made_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def root(package: Path) -> Path:
    """Where it lies unpacked."""
    folder = package.parent / "root"
    run("dpkg-deb", "-x", str(package), str(folder))
    return folder


def test_the_package_says_what_it_is_and_needs(package: Path) -> None:
    """Name, version, and the libraries that the programs link to."""
    fields = run("dpkg-deb", "-f", str(package))
    assert re.search(r"^Package: ctkvr$", fields, re.MULTILINE)
    version = run(program("CTKVRD"), "--version").split()[1]
    assert re.search(rf"^Version: {re.escape(version)}$", fields, re.MULTILINE)
    (depends,) = re.findall(r"^Depends: (.*)$", fields, re.MULTILINE)
    for library in ("libc6", "libgrpc++1.51", "libprotobuf32", "libspdlog1.10", "libprometheus-cpp-pull1.0"):
        assert library in depends


def test_the_package_holds_the_programs_and_nothing_of_the_build(root: Path) -> None:
    """Each file is meant."""
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert files == {
        "etc/ctkvr/ctkvrd.toml",
        "lib/systemd/system/ctkvrd.service",
        "usr/bin/ctkvr-cli",
        "usr/bin/ctkvrd",
        "usr/share/bash-completion/completions/ctkvr-cli",
        "usr/share/bash-completion/completions/ctkvrd",
        "usr/share/doc/ctkvr/README.md",
        "usr/share/doc/ctkvr/copyright",
        "usr/share/doc/ctkvr/prometheus/rules.yml",
        "usr/share/man/man1/ctkvr-cli.1",
        "usr/share/man/man8/ctkvrd.8",
    }


def test_its_configuration_is_kept_on_upgrade_and_is_good(package: Path, root: Path) -> None:
    """A conffile, which the packaged server takes."""
    control = package.parent / "control"
    run("dpkg-deb", "-e", str(package), str(control))
    assert (control / "conffiles").read_text() == "/etc/ctkvr/ctkvrd.toml\n"
    for script in ("postinst", "prerm", "postrm"):
        assert os.access(control / script, os.X_OK)
        run("sh", "-n", str(control / script))
    server = str(root / "usr/bin/ctkvrd")
    assert run(server, "--config", str(root / "etc/ctkvr/ctkvrd.toml"), "--check-config") == ""


def test_its_unit_is_sound_and_confined(root: Path) -> None:
    """systemd finds nothing to say, and exposes at most 1.5 of 10."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    unit = root / "lib/systemd/system/ctkvrd.service"
    assert unit.read_text() == UNIT.read_text()
    run("systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=15", str(unit))


def test_its_unit_waits_for_the_drain() -> None:
    """And starts what the package installs."""
    unit = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))
    (drain,) = re.findall(r"^drain_seconds = (\d+)$", run(program("CTKVRD"), "--print-config"), re.MULTILINE)
    assert int(unit["TimeoutStopSec"]) >= int(drain) + 5
    assert unit["ExecStart"] == "/usr/bin/ctkvrd --config=/etc/ctkvr/ctkvrd.toml"
    assert unit["RestartPreventExitStatus"] == "2"


def test_the_manuals_say_what_the_help_says(root: Path) -> None:
    """Every flag of the server, every command of the command line."""
    plain = {"\\-": "-", "\\&": "", "\\(bu": ""}
    pages = []
    for page in ("man8/ctkvrd.8", "man1/ctkvr-cli.1"):
        text = (root / "usr/share/man" / page).read_text()
        for escaped, letter in plain.items():
            text = text.replace(escaped, letter)
        pages.append(text)
    for flag in re.findall(r"^  --(\w+)", run(program("CTKVRD"), "--help"), re.MULTILINE):
        assert f"--{flag}" in pages[0].replace("\\fB", "").replace("\\fR", "")
    for command in re.findall(
        r"^  (\w+)  ", run(program("CTKVR_CLI"), "--help").partition("Subcommands:")[2], re.MULTILINE
    ):
        assert command in pages[1]


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("ctkvrd --drain", {"--drain_seconds"}),
        ("ctkvrd --print", {"--print-config"}),
        ("ctkvr-cli re", {"replay"}),
        ("ctkvr-cli --add", {"--address"}),
        ("ctkvr-cli size --mo", {"--model"}),
        ("ctkvr-cli admin s", {"state", "slow-calls", "sessions"}),
        ("ctkvr-cli admin --adm", {"--admin-address"}),
        ("ctkvr-cli replay --min-needle", {"--min-needle-share"}),
    ],
)
def test_bash_completes(words: str, completions: set[str], root: Path) -> None:
    """What the programs' help names."""
    command = words.split()[0]
    function = "_" + command.replace("-", "_")
    script = f"""
      PATH={root}/usr/bin:$PATH
      . {root}/usr/share/bash-completion/completions/{command}
      COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
      {function} {command}; printf '%s\\n' "${{COMPREPLY[@]}}" """
    assert set(run("bash", "-c", script).split()) == completions
