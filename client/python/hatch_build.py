# SPDX-License-Identifier: Apache-2.0
"""Generates ctkvr.v1, messages and their types, from the contract while a wheel is built.

The contract is the repository's folder proto, two levels up, or its copy in an sdist.
"""

import shutil
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from grpc_tools import protoc
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CONTRACT = "ctkvr/v1"


def find_beside_or_above(root: Path, name: str) -> Path:
    """`name` in the sdist, else in the repository that holds client/python."""
    inside = root / name
    return inside if inside.exists() else root.parent.parent / name


def generate(proto: Path, out: Path) -> None:
    """Writes out/ctkvr/v1/*_pb2.py and *_pb2.pyi for the messages in proto/ctkvr/v1."""
    sources = sorted(str(path.relative_to(proto)) for path in (proto / CONTRACT).glob("*.proto"))
    if not sources:
        raise FileNotFoundError(f"no .proto file in {proto / CONTRACT}")
    well_known = str(files("grpc_tools") / "_proto")
    command = ["protoc", f"-I{proto}", f"-I{well_known}", f"--python_out={out}", f"--pyi_out={out}", *sources]
    if protoc.main(command) != 0:
        raise RuntimeError(f"protoc could not read {', '.join(sources)} in {proto}")
    (out / CONTRACT / "__init__.py").write_text('"""The messages of the contract, generated from proto/ctkvr/v1."""\n')


class ContractHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the generated package to a wheel, and what it is generated from to an sdist."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files."""
        if version == "editable":
            raise RuntimeError("ctkvr has no editable install: ctkvr.v1 exists only in wheels; use pip install .")
        root = Path(self.root)
        proto = find_beside_or_above(root, "proto")
        licence = find_beside_or_above(root, "LICENSE")
        if self.target_name == "sdist":
            build_data["force_include"][str(proto / CONTRACT)] = f"proto/{CONTRACT}"
            build_data["force_include"][str(licence)] = "LICENSE"
            return
        self._out = Path(tempfile.mkdtemp(prefix="ctkvr-proto-"))
        generate(proto, self._out)
        build_data["force_include"][str(self._out / CONTRACT)] = CONTRACT
        build_data["force_include"][str(licence)] = "ctkvr/LICENSE"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling when the archive is written."""
        if self.target_name != "sdist":
            shutil.rmtree(self._out)
