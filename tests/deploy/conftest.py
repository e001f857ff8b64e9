# SPDX-License-Identifier: Apache-2.0
"""Programs and a server that the tests share."""

import shutil
from collections.abc import Iterator

import pytest

from tools import Server, program, run


@pytest.fixture(scope="session")
def promtool() -> str:
    """The path of promtool; `check` puts it there."""
    path = shutil.which("promtool")
    assert path, "promtool is not on PATH"
    return path


@pytest.fixture(scope="session")
def kubectl() -> str:
    """The path of kubectl. Debian 12 has none that is new enough, so a machine without cannot run these tests."""
    path = shutil.which("kubectl")
    if not path:
        pytest.skip("kubectl is not on PATH")
    return path


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that answered some retrievals."""
    server = Server(tmp_path_factory.mktemp("server"), "--truth_share=1", "--truth_budget=1")
    load(server)
    yield server
    server.stop()


def load(server: Server) -> None:
    """Some work: appends and retrievals of one layer."""
    run(program("CTKVR_CLI"), "--address", server.address, "bench", "--tokens", "4096", "--retrievals", "50")
