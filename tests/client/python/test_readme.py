# SPDX-License-Identifier: Apache-2.0
"""Every block of the README is run as it stands, with a service of this test's in place of the address."""

from __future__ import annotations

import csv
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ctkvr import errors

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


def test_python_blocks_run_from_top_to_bottom(address: str) -> None:
    namespace: dict[str, Any] = {}
    for number, block in enumerate(blocks("python")):
        if "transformers" in block:  # tests/model runs it, where torch is
            continue
        code = compile(block.replace(ADDRESS, address), f"README block {number}", "exec")
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
    assert (tmp_path / "ctkvr/_engine.abi3.so").is_file()


def rows_below(header: str) -> list[list[str]]:
    """The cells of the table whose first line begins so."""
    lines = README[README.index(f"\n{header}") + 1 :].splitlines()[2:]
    table = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in re.split(r" ?\| ?", line)[1:-1]] for line in table]


def test_every_reason_and_code_is_explained_with_its_error() -> None:
    explained = {
        name: error.strip("`")
        for names, error, means, cure in rows_below("| reason or code |")
        for name in re.findall(r"`(\w+)`", names)
        if means and cure
    }
    expected = {name: kind.__name__ for name, kind in {**errors._BY_CODE, **errors._BY_REASON}.items()}
    assert explained == expected, "the table 'reason or code' of README.md has a line for every reason and code"
    assert {name for name in expected.values() if name not in errors.__all__} == set()


def test_the_figures_are_the_evaluations() -> None:
    with (ROOT / "tests/eval/results.csv").open() as file:
        measured = {(row["method"], int(row["k"])): row for row in csv.DictReader(file) if row["text"] == "records"}
    names = {"full attention": "full", "`exact`": "exact", "`sketch`": "ctkvr-sketch"}
    names["`sketch`, remainder"] = "ctkvr-sketch+remainder"
    rows = rows_below("| method | k | keys read |")
    assert len(rows) == 7
    for name, k, read, loss, answers, needles in rows:
        row = measured[names[name], int(k or 256)]
        assert read == f"{float(row['bytes_read']) / float(row['bytes_fp16_scan']):.0%}".replace("%", " %")
        assert float(loss) == pytest.approx(float(row["dnll"]), abs=5e-4)
        assert float(answers) == pytest.approx(float(row["accuracy"]), abs=5e-4)
        assert needles == (f"{float(row['needle']):.3f}" if row["needle"] else "")


def test_what_is_linked_is_there() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / "client/python" / link).exists(), link
