# SPDX-License-Identifier: Apache-2.0
"""Every block of the README is run as it stands, with this test's server in place of the address."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from server import Server

ROOT = Path(__file__).parents[3]
README = (ROOT / "client/python/README.md").read_text()
ADDRESS = "127.0.0.1:7420"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert found, f"the README has no block of {language}"
    return found


def test_there_are_no_other_blocks() -> None:
    assert README.count("```") == 2 * (len(blocks("python")) + len(blocks("sh")))


def test_python_blocks_run_from_top_to_bottom(server: Server) -> None:
    namespace: dict[str, Any] = {}
    for number, block in enumerate(blocks("python")):
        if "transformers" in block:  # tests/model runs it, where torch is
            continue
        code = compile(block.replace(ADDRESS, server.address), f"README block {number}", "exec")
        exec(code, namespace)  # noqa: S102 (the README's own)
    assert namespace["result"].length == 2950


def test_shell_blocks_run(server: Server, tmp_path: Path) -> None:
    """pip as it stands, with what is installed here already: no network, and into a folder of the test's own."""
    environment = {
        **os.environ,
        "CTKVR_ADDRESS": server.address,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say that there is none
        "PIP_NO_DEPS": "1",
        "PIP_TARGET": str(tmp_path),
    }
    for block in blocks("sh"):
        here = block.replace("positions.png", f"{tmp_path}/positions.png")
        subprocess.run(["bash", "-euo", "pipefail", "-c", here], cwd=ROOT, env=environment, check=True)
    assert (tmp_path / "positions.png").is_file()
    assert (tmp_path / "ctkvr/v1/cache_pb2.py").is_file()
