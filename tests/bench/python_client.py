# SPDX-License-Identifier: Apache-2.0
"""What a step costs through the Python client with torch, against the C++ client, at the same bytes.

    PYTHONPATH=... python3 tests/bench/python_client.py build/release/server/ctkvrd build/release/client/ctkvr-cli

A step asks one layer for the rows of the K tokens that matter and waits for them; in torch it begins with a tensor and
ends with two. C++ client (ctkvr-cli bench) and Python take turns in rounds of random order against one server over
loopback, and the engine inside the Python process takes its turn too. Printed: the median over rounds of each round's
median step, with the least and the greatest; the median of the ratios within a round; processor time of the client's
own process a step (embedded: of the calling thread, without the engine's), which a noisy neighbour moves less. Needs the
package ctkvr with its engine, and torch.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import ctkvr
import numpy as np
import torch

SINKS, WINDOW = 4, 64
SLICE = 4096  # tokens appended at a time


class Case:
    """One shape and length, with a session on the server and one in this process."""

    def __init__(self, flags: argparse.Namespace, address: str, head_dim: int, tokens: int) -> None:
        self.flags, self.address, self.head_dim, self.tokens = (
            flags,
            address,
            head_dim,
            tokens,
        )
        rng = np.random.default_rng(1)
        self.queries = [
            torch.from_numpy(rng.standard_normal((flags.q_heads, head_dim), np.float32)).to(torch.float16)
            for _ in range(64)
        ]
        self.remote = self._open(ctkvr.connect(address), rng)
        self.local = self._open(ctkvr.connect("embedded://bench?arena_bytes=2GiB"), rng)

    def _open(self, client: ctkvr.Client, rng: np.random.Generator) -> tuple[ctkvr.Client, ctkvr.Session]:
        flags = self.flags
        selection = ctkvr.Selection(
            source="sketch",
            sink_tokens=SINKS,
            window_tokens=WINDOW,
            dense_below_tokens=0,
        )
        session = client.open_session(
            layers=1,
            q_heads=flags.q_heads,
            kv_heads=flags.kv_heads,
            head_dim=self.head_dim,
            dtype="float16",
            token_limit=self.tokens,
            format="k8v4",
            k=flags.k,
            selection=selection,
        )
        shape = (min(SLICE, self.tokens), flags.kv_heads, self.head_dim)
        for begin in range(0, self.tokens, SLICE):
            rows = rng.standard_normal(shape, np.float32).astype(np.float16)[: self.tokens - begin]
            session.append(0, rows, rows)
        session.maintain()
        return client, session

    def python(self, session: ctkvr.Session, clock: Callable[[], float]) -> tuple[float, float]:
        """(seconds of the median step, processor seconds a step by `clock`)."""
        took = []
        with session.decode(answer="rows") as stream:
            stream.step(0, queries=self.queries[0])
            before = clock()
            for number in range(self.flags.steps):
                begin = time.perf_counter()
                answer = stream.step(0, queries=self.queries[number % len(self.queries)]).answer
                keys, values = (ctkvr.to_torch(rows.flat, share=True) for rows in (answer.keys, answer.values))
                took.append(time.perf_counter() - begin)
            spent = clock() - before
        assert keys.shape == values.shape == (self.flags.kv_heads * (self.flags.k + SINKS + WINDOW), self.head_dim)
        return statistics.median(took), spent / self.flags.steps

    def cplusplus(self) -> tuple[float, float]:
        """The same of ctkvr-cli; processor time is what a run of all steps takes beyond one of a single step."""
        command = [
            self.flags.cli,
            "bench",
            "--address",
            self.address,
            "--json",
            "--in-flight=1",
            "--tokens",
        ]
        command += [
            str(self.tokens),
            "--head-dim",
            str(self.head_dim),
            "--k",
            str(self.flags.k),
        ]
        command += [
            "--q-heads",
            str(self.flags.q_heads),
            "--kv-heads",
            str(self.flags.kv_heads),
        ]
        found = json.loads(spend([*command, "--retrievals", str(self.flags.steps)])[0])["runs"][0]
        short = list(command)
        short[short.index("--tokens") + 1] = "4096"
        few, many = (spend([*short, "--retrievals", str(count)])[1] for count in (1, self.flags.steps))
        return found["latency_us_p50"] / 1e6, (many - few) / max(self.flags.steps - 1, 1)

    def close(self) -> None:
        for client, session in (self.remote, self.local):
            session.close()
            client.close()


def spend(command: list[str]) -> tuple[str, float]:
    """What a program prints, and the processor time it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return printed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:6.3f} ({min(seconds) * 1e3:.3f} to {max(seconds) * 1e3:.3f})"


def measure(case: Case) -> None:
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "C++": case.cplusplus,
        "torch": lambda: case.python(case.remote[1], time.process_time),
        "embedded": lambda: case.python(case.local[1], time.thread_time),
    }
    rounds: list[dict[str, tuple[float, float]]] = []
    for _ in range(case.flags.rounds):
        names = list(ways)
        random.shuffle(names)
        rounds.append({name: ways[name]() for name in names})
    for name in ways:
        step = [found[name][0] for found in rounds]
        ratio = statistics.median(found[name][0] / found["C++"][0] for found in rounds)
        processor = statistics.median(found[name][1] for found in rounds) * 1e6
        shape = f"{case.head_dim:4} {case.tokens:7}"
        print(
            f"{shape}  {name:9} {spread(step):32} {ratio:6.2f} {processor:9.0f}",
            flush=True,
        )  # noqa: T201


def serve(ctkvrd: str) -> tuple[subprocess.Popen[str], str]:
    command = [
        ctkvrd,
        "--listen_address=127.0.0.1:0",
        "--metrics_address=",
        "--log_format=json",
        "--noaccess_log",
    ]
    server = subprocess.Popen([*command, "--arena_bytes=2GiB"], stderr=subprocess.PIPE, text=True)  # noqa: S603
    line: dict[str, Any] = {}
    while line.get("event") != "serving":
        line = json.loads(server.stderr.readline() if server.stderr else "")
    return server, line["listen_address"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ctkvrd")
    parser.add_argument("cli")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 98304])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--k", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    flags = parser.parse_args()
    server, address = serve(flags.ctkvrd)
    print(f"{'dim':>4} {'tokens':>7}  {'client':9} {'ms a step (least to greatest)':32} {'ratio':>6} {'us of it':>9}")  # noqa: T201
    try:
        for head_dim in flags.head_dims:
            for tokens in flags.tokens:
                case = Case(flags, address, head_dim, tokens)
                measure(case)
                case.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
