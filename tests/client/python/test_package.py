# SPDX-License-Identifier: Apache-2.0
"""What is in the archives, and that an sdist builds by itself what the repository builds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "client/python"


def build(target: str, out: Path, package: Path = PACKAGE) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=package, check=True, capture_output=True)
    (archive,) = out.iterdir()
    return archive


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_an_sdist_builds_the_same_wheel(tmp_path: Path) -> None:
    sdist = build("sdist", tmp_path / "sdist")
    shutil.unpack_archive(sdist, tmp_path)
    apart = build("wheel", tmp_path / "apart", tmp_path / sdist.name.removesuffix(".tar.gz"))
    here = build("wheel", tmp_path / "here")
    assert contents(apart) == contents(here)


def test_the_wheel_is_typed_and_licensed() -> None:
    names = {str(file) for file in distribution("ctkvr").files or ()}
    for name in ("py.typed", "LICENSE", "v1/__init__.py", "v1/cache_pb2.py", "v1/cache_pb2.pyi"):
        assert f"ctkvr/{name}" in names
    assert not any(name.startswith("google/") for name in names)


def test_an_editable_install_is_refused_by_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel:editable", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ctkvr has no editable install" in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["grpcio", "protobuf", "googleapis-common-protos", "numpy", "xxhash", "rich"])
def test_what_the_tests_pin_is_what_the_package_allows(name: str) -> None:
    requirements = distribution("ctkvr").requires or []
    assert any(requirement.startswith(name) for requirement in requirements)
    pinned = (Path(__file__).parent / "requirements.txt").read_text()
    assert f"\n{name}=={distribution(name).version}\n" in pinned
