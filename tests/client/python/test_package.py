# SPDX-License-Identifier: Apache-2.0
"""What is in the archives, and that an sdist builds by itself what the repository builds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "client/python"


def build(target: str, out: Path, package: Path = PACKAGE, **variables: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=package, check=True, capture_output=True, env={**os.environ, **variables})
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


def test_a_wheel_with_the_engine_is_of_its_platform() -> None:
    tags = distribution("ctkvr").read_text("WHEEL") or ""
    assert "Root-Is-Purelib: false" in tags
    assert "Tag: cp310-abi3-manylinux_" in tags
    assert {"_engine.abi3.so", "_engine.pyi"} <= {file.name for file in distribution("ctkvr").files or ()}


def test_without_the_engine_there_is_a_client_of_servers(tmp_path: Path) -> None:
    wheel = build("wheel", tmp_path / "wheel", CTKVR_ENGINE="off")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "packages")
    program = """if True:
        import ctkvr
        try:
            ctkvr.connect()
        except ModuleNotFoundError as error:
            print(error)
        ctkvr.connect("127.0.0.1:1", retry=ctkvr.RetryOptions(attempts_max=1))
    """
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "packages")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "this installation of ctkvr has no engine" in done.stdout
    assert 'ctkvr.connect("host:port")' in done.stdout
    assert "ctkvr.errors.Unavailable" in done.stderr


def test_what_is_missing_to_build_the_engine_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode != 0
    assert "the engine needs pkg-config" in done.stdout + done.stderr
    assert "deploy/packages.apt, or set CTKVR_ENGINE=off" in done.stdout + done.stderr


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


@pytest.mark.parametrize(
    "name", ["grpcio", "protobuf", "googleapis-common-protos", "numpy", "xxhash", "rich", "nanobind-backend"]
)
def test_what_the_tests_pin_is_what_the_package_allows(name: str) -> None:
    requirements = distribution("ctkvr").requires or []
    assert any(requirement.startswith(name) for requirement in requirements)
    pinned = (Path(__file__).parent / "requirements.txt").read_text()
    assert f"\n{name}=={distribution(name).version}\n" in pinned
