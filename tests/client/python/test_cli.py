# SPDX-License-Identifier: Apache-2.0
"""The program `ctkvr`, run as a user runs it against a real server; and the arithmetic of its pictures."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ctkvr
import matplotlib.image
import numpy as np
import pytest
from ctkvr.cli import plots, top_view
from ctkvr.cli.app import app
from ctkvr.cli.looks import looks_of_trace
from ctkvr.cli.trace import RecordedAnswer, Trace, read_trace
from ctkvr.v1 import session_pb2
from typer.testing import CliRunner

from conftest import GEOMETRY, HEAD_DIM, KV_HEADS, Q_HEADS, Tokens
from server import Server

PROGRAM = str(Path(sys.executable).parent / "ctkvr")
TRACE = Path(__file__).parents[2] / "traces/records-layer07"
STEPS, PROMPT = 40, 660
K = 48


class Serving:
    """A server with a metrics page that records, and a client's session on it."""

    def __init__(self, folder: Path, rng: np.random.Generator) -> None:
        self.records = folder
        self.server = Server(
            "--metrics_address=127.0.0.1:0", f"--record={folder}", "--truth_share=1", "--truth_budget=1"
        )
        self.metrics = f"http://{self.server.await_event('serving')['metrics_address']}/metrics"
        self.client = ctkvr.connect(self.server.address)
        self.tokens = Tokens(rng, PROMPT + STEPS)

    def open(self, session_id: str, **settings: Any) -> ctkvr.Session:
        selection = ctkvr.Selection(k=K, sink_tokens=2, window_tokens=8, dense_below_tokens=0, candidate_tokens=128)
        return self.client.open_session(
            **GEOMETRY, format="k8v8", selection=selection, session_id=session_id, lease_seconds=300, **settings
        )

    def decode(self, session: ctkvr.Session) -> None:
        """A prompt and some steps, on both layers."""
        tokens = self.tokens
        for layer in range(2):
            session.append(layer, tokens.keys[:PROMPT], tokens.values[:PROMPT])
        with session.decode(answer="ids") as stream:
            for token in range(PROMPT, PROMPT + STEPS):
                for layer in range(2):
                    stream.step(layer, tokens.keys[token], tokens.values[token], tokens.queries[token])

    def run(self, *arguments: str, code: int = 0) -> str:
        """What the program printed, run in this process. Wide, so that no table folds."""
        environment = {"COLUMNS": "200", "NO_COLOR": "1", "CTKVR_ADDRESS": self.server.address}
        done = CliRunner().invoke(app, arguments, env=environment)
        assert done.exit_code == code, done.output
        return done.output


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    from conftest import SEED

    made = Serving(tmp_path_factory.mktemp("records"), np.random.default_rng(SEED))
    with made.server, made.client:
        yield made


@pytest.fixture(scope="module")
def record(serving: Serving) -> Path:
    """A session that was recorded and has ended; its folder."""
    with serving.open("recorded one", options=session_pb2.SessionOptions(record=True)) as session:
        serving.decode(session)
    return Path(serving.server.await_event("recorded")["folder"])


def test_top_shows_sessions_throughput_quality_and_memory(serving: Serving) -> None:
    with serving.open("top one") as session, serving.open("empty one"):
        serving.decode(session)
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                session.retrieve(0, serving.tokens.queries[-1], answer="ids")

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            text = serving.run("top", "--once", "--interval", "0.3", "--metrics", serving.metrics, "--detail")
        finally:
            stop.set()
            asking.join()
        info = serving.client.server_info()
        assert f"ctkvr {ctkvr.__version__} at {serving.server.address}" in text
        assert f"{info.header.boot_id:016x}" in text
        assert "of 67.1 MB" in text
        assert "2 sessions" in text
        (row,) = re.findall(r"│ top one +│(.*)│", text)
        tokens, limit, rate, held, _, lease, retrievals, recall, _ = (cell.strip() for cell in row.split("│"))
        assert (tokens, limit, rate) == ("700", "4,096", "0.0")
        assert float(held.split()[0]) > 0
        assert 290 <= int(lease.split()[0]) <= 300
        assert int(retrievals.replace(",", "")) > 2 * STEPS
        assert 0.5 < float(recall) <= 1
        (asked,) = re.findall(r"retrievals +([0-9.,]+)/s over layers", text)
        assert float(asked.replace(",", "")) > 0
        (quality,) = re.findall(r" recall +([0-9.]+)", text)
        assert 0.5 < float(quality) <= 1


def test_top_without_detail_leaves_leases_alone_and_does_without_a_page(serving: Serving) -> None:
    with serving.open("left alone") as session:
        before = serving.run("top", "--once", "--interval", "1.1", "--metrics", "")
        (row,) = re.findall(r"│ left alone +│(.*)│", before)
        assert int(row.split("│")[5].strip().split()[0]) < 300  # not renewed by being looked at
        assert "recall" not in before
        text = serving.run("top", "--once", "--interval", "0.1", "--metrics", "http://127.0.0.1:9/metrics")
        assert "no metrics page at http://127.0.0.1:9/metrics" in text
        assert session.id in text


def test_rates_are_differences_over_time(serving: Serving) -> None:
    view = top_view.View(serving.server.address, serving.metrics, rows=1, detail=False)
    with serving.open("rates") as session:
        session.append(0, serving.tokens.keys[:100], serving.tokens.values[:100])
        view.look(serving.client)
        assert view.tokens_rate("rates") is None  # one look has no rate
        session.append(0, serving.tokens.keys[100:400], serving.tokens.values[100:400])
        view.look(serving.client)
        assert view.now is not None
        assert view.before is not None
        seconds = view.now.seconds - view.before.seconds
        assert view.tokens_rate("rates") == pytest.approx(300 / seconds)
    page = top_view.read_page(serving.metrics)
    assert page["ctkvr_retrievals_total"] > 0  # summed over sources
    assert page["ctkvr_rpc_seconds_count{Append}"] >= 2


def test_top_goes_on_in_a_terminal_until_it_is_interrupted(serving: Serving) -> None:
    command = [PROGRAM, "--address", serving.server.address, "top", "--interval", "0.05", "--metrics", serving.metrics]
    ours, its = pty.openpty()
    with subprocess.Popen(command, stdin=its, stdout=its, env={**os.environ, "TERM": "xterm"}) as running:
        os.close(its)
        seen = b""
        while seen.count(b"queued") < 3:  # looks; a program that ended is an OSError
            seen += os.read(ours, 1 << 16)
        running.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the end
            while True:
                os.read(ours, 1 << 16)
        assert running.wait(timeout=60) == 0
    os.close(ours)


def test_inspect_shows_a_session_and_its_layers(serving: Serving) -> None:
    with serving.open("inspected") as session:
        serving.decode(session)
        info = session.info()
        text = serving.run("inspect", "inspected")
        for part in ("2 layers, 4 query heads on 2 KV heads", "head_dim 32, value_dim 16, f32", "k8v8", f"k {K}"):
            assert part in text
        rows = re.findall(r"^│ +(\d) │ +(\d+) │ .*│ +(\w+) +│ +asked", text, re.MULTILINE)
        assert rows == [("0", "700", "sketch"), ("1", "700", "sketch")]
        found = json.loads(serving.run("inspect", "inspected", "--json"))
        assert found["session_id"] == "inspected"
        assert int(found["memory"]["held_bytes"]) == info.memory.held_bytes
        assert [layer["length"] for layer in found["layers"]] == [700, 700]


def test_a_sessions_name_is_text_and_no_command(serving: Serving, tmp_path: Path) -> None:
    name = "\x1b[2J [red] $x_$ \\"
    np.save(tmp_path / "q.npy", serving.tokens.queries[:3])
    with serving.open(name) as session:
        session.append(0, serving.tokens.keys, serving.tokens.values)
        for arguments in (["top", "--once", "--interval", "0.1", "--metrics="], ["inspect", name]):
            text = serving.run(*arguments)
            assert "?[2J [red] $x_$ \\" in text
            assert "\x1b" not in text
        out = tmp_path / "named.svg"
        serving.run("plot", "positions", "--session", name, "--queries", str(tmp_path / "q.npy"), "-o", str(out))
        assert out.exists()


def test_what_goes_wrong_is_a_line(serving: Serving, tmp_path: Path) -> None:
    out = str(tmp_path / "out.png")
    for arguments, text, code in (
        (["inspect", "nobody"], "SESSION_UNKNOWN", 1),
        (["top"], "needs a terminal", 2),
        (["plot", "recall", "--trace", str(TRACE), "-o", out], "no answers.jsonl", 1),
        (["plot", "positions", "-o", out], "give --trace or --session", 2),
        (["plot", "positions", "--session", "a", "-o", out], "needs --queries", 2),
        (["--tls-key", str(Path(__file__)), "top"], "go together", 2),
        (["top", "--metrics", "file:///etc/passwd", "--once"], "begins with http", 0),
    ):
        if code:
            assert text in serving.run(*arguments, code=code)
        else:
            assert text in serving.run(*arguments)
    assert not Path(out).exists()


def test_the_installed_program_reports_and_exits_as_a_program(serving: Serving) -> None:
    for address, code, text in ((serving.server.address, 0, "0 sessions"), ("127.0.0.1:9", 1, "ctkvr: UNAVAILABLE")):
        command = [PROGRAM, "--address", address, "top", "--once", "--interval", "0.1", "--metrics="]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert text in (done.stderr if code else done.stdout)
        assert "Traceback" not in done.stderr


def test_without_its_packages_the_program_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('No module named typer', name='typer')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([PROGRAM, "top"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "ctkvr: there is no package typer; pip install 'ctkvr[cli]' brings it\n"


# ---- Pictures --------------------------------------------------------------------------------------------------------


def is_drawn(path: Path) -> bool:
    pixels = matplotlib.image.imread(path)
    return bool(np.ptp(pixels[..., :3]) > 0.5)


def test_a_record_is_drawn(serving: Serving, record: Path, tmp_path: Path) -> None:
    for command in ("positions", "recall"):
        png, svg = tmp_path / f"{command}.png", tmp_path / f"{command}.svg"
        serving.run("plot", command, "--trace", str(record), "--layer", "1", "-o", str(png))
        assert is_drawn(png)
        serving.run("plot", command, "--trace", str(record / "layer01"), "--every", "3", "-o", str(svg))
        assert "<svg" in svg.read_text()[:2000]
    assert "holds 2 traces" in serving.run("plot", "recall", "--trace", str(record), "-o", "x.png", code=1)


def test_a_live_session_is_drawn(serving: Serving, tmp_path: Path) -> None:
    np.save(tmp_path / "q.npy", serving.tokens.queries[-STEPS:])
    out = tmp_path / "live.png"
    with serving.open("live") as session:
        serving.decode(session)
        asked = ["plot", "positions", "--session", "live", "--queries", str(tmp_path / "q.npy"), "--layer", "1"]
        serving.run(*asked, "-o", str(out))
        np.save(tmp_path / "q.npy", serving.tokens.queries[:, :1])
        assert "has 700 positions" not in serving.run(*asked, "-o", str(out), code=1)
    assert is_drawn(out)


def test_recall_of_a_record_is_that_of_brute_force(record: Path, serving: Serving) -> None:
    trace = read_trace(record, 0)
    assert trace.decoded(1) == list(range(PROMPT, PROMPT + STEPS))
    tokens = serving.tokens
    expected = []
    for position in trace.decoded(1):
        logits = np.einsum(
            "hd,thd->ht", tokens.queries[position], np.repeat(tokens.keys[: position + 1], Q_HEADS // KV_HEADS, axis=1)
        ) / np.sqrt(HEAD_DIM)
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        for kv_head, chosen in enumerate(trace.answers[position].chosen):
            summed = shares[2 * kv_head : 2 * kv_head + 2].sum(axis=0)
            free = range(2, position - 7)  # between sinks and window
            best = sorted(free, key=(-summed).tolist().__getitem__)[:K]
            expected.append(len(set(best) & set(chosen.tolist())) / K)
    found = plots.recall_of(trace, 1)
    assert np.mean(found.recall) == pytest.approx(np.mean(expected), abs=0.01)  # the record's numbers are binary16
    assert np.mean(expected) > 0.5


def made_trace(answers: dict[int, RecordedAnswer]) -> Trace:
    """One KV head of two query heads, 8 tokens, two decoded; head 0 looks at token 3 alone, head 1 at 3 and 5."""
    keys = np.zeros((1, 8, 8), np.float32)
    keys[0, 3, 0] = keys[0, 5, 1] = 100
    queries = np.zeros((2, 2, 8), np.float32)
    queries[0, :, 0] = queries[1, :, 0] = queries[1, :, 1] = 1
    return Trace("made", queries, keys, first_position=6, prompt_tokens=6, scale=1.0, answers=answers)


def answer_of(*chosen: int) -> RecordedAnswer:
    return RecordedAnswer(k_tokens=2, sink_tokens=1, window_tokens=1, chosen=[np.array(chosen)])


def test_recall_and_needles_are_those_counted_by_hand() -> None:
    found = plots.recall_of(made_trace({6: answer_of(0, 3, 5, 6), 7: answer_of(0, 1, 5, 7)}), 1)
    assert found.positions == [6, 7]
    assert found.recall == [1.0, 0.5]
    # Each head has a needle: at 6 both are found; at 7 token 3 is missed, of two equal ones the first for head 1.
    assert (found.needles_found, found.needles_missed) == ([2, 0], [0, 2])
    assert found.needle_share == 0.5


def test_pictures_hold_the_mean_shares() -> None:
    by_position, by_head = plots.images_of(looks_of_trace(made_trace({}), 1))
    np.testing.assert_allclose(by_head[:, [3, 5]], np.array([[1.0, 0.0], [0.5, 0.5]]), atol=1e-9)
    np.testing.assert_allclose(by_position[:, [3, 5]], [[0.75, 0.25], [0.75, 0.25]], atol=1e-9)
    chosen = looks_of_trace(made_trace({6: answer_of(0, 3, 6), 7: answer_of(0, 5, 7)}), 1)
    by_position, _ = plots.images_of(chosen)
    np.testing.assert_allclose(by_position[:, [3, 5]], [[0.75, 0], [0, 0.25]], atol=1e-9)


def test_long_texts_are_binned(tmp_path: Path) -> None:
    trace = read_trace(TRACE, None)
    by_position, by_head = plots.images_of(looks_of_trace(trace, 64))
    assert by_position.shape == (16, -(-8042 // 32))
    assert by_head.shape == (3, by_position.shape[1])
    np.testing.assert_allclose(by_head.sum(axis=1), 1, rtol=1e-6)
    plots.save(plots.draw_positions(looks_of_trace(trace, 256)), tmp_path / "trace.png")
    assert is_drawn(tmp_path / "trace.png")
