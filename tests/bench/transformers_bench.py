# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of a transformers model through ctkvr and with full attention, and the attention part at 96K.

    CTKVRD=build/release/server/ctkvrd PYTHONPATH=tests/client/python:tests/model:tests/eval PYTHON
        tests/bench/transformers_bench.py [--smoke]

PYTHON is that of the environment which tests/model/check makes, with the client installed. Ways take turns, a few
tokens each, so that a noisy neighbour meets them alike; medians, 10th and 90th percentiles of the rounds.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctkvr
import torch
from ctkvr.sequences import Question, Sequences
from ctkvr.torch import attend
from ctkvr.transformers import CtkvrCache
from models import make, text
from reading import load, prompt_of
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from server import Server

LLAMA: dict[str, Any] = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "value_dim": 128}


class InPlaceLayer(DynamicLayer):  # type: ignore[misc]
    """Full attention's cache without the copy of everything that DynamicCache makes at each token."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, room: int) -> None:
        super().__init__()
        self._held = keys.shape[2]
        self._buffers = [torch.nn.functional.pad(tensor, (0, 0, 0, room)) for tensor in (keys, values)]
        self.is_initialized = True
        self._show()

    def _show(self) -> None:
        self.keys, self.values = (buffer[:, :, : self._held] for buffer in self._buffers)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        end = self._held + key_states.shape[2]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._held : end] = new
        self._held = end
        self._show()
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        self._held += tokens_to_remove
        self._show()


def spread(seconds: list[float]) -> str:
    """Milliseconds: median, 10th and 90th percentile."""
    ordered = sorted(1e3 * value for value in seconds)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return f"{statistics.median(ordered):7.2f} [{low:.2f}, {high:.2f}]"


def take_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round; the first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if number:
                found[name].append(time.perf_counter() - start)
    return found


def stretched(cache: DynamicCache, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer, repeated to a length, with a little noise: no two alike."""
    found = []
    for layer in cache.layers:
        times = -(-tokens // layer.keys.shape[2])
        pair = [tensor.repeat(1, 1, times, 1)[:, :, :tokens] for tensor in (layer.keys, layer.values)]
        found.append((pair[0] + 0.05 * pair[0].std() * torch.randn_like(pair[0]), pair[1]))
    return found


def measure_model(model: Any, read: DynamicCache, client: ctkvr.Client, tokens: int, rounds: int, each: int) -> None:
    """Steps of the whole model behind so many tokens."""
    layers = stretched(read, tokens)
    copying, in_place = DynamicCache(config=model.config), DynamicCache(config=model.config)
    copying.layers = [_dynamic(*pair) for pair in layers]
    in_place.layers = [InPlaceLayer(*pair, room=each + 2) for pair in layers]
    with CtkvrCache(model, client, tokens + 64, keep=False) as served:
        served.adopt(copying)
        one = torch.tensor([[5]])

        def steps(cache: Any) -> Callable[[], None]:
            def run() -> None:
                with torch.no_grad():
                    for _ in range(each):
                        model(one, cache=cache)
                cache.crop(-each)

            return run

        with torch.no_grad():
            for _ in range(2):  # sends what was adopted, then has it indexed
                model(one, cache=served)
        served.crop(-2)
        ways: dict[str, Callable[[], object]] = {
            "full, DynamicCache": steps(copying),
            "full, in place": steps(in_place),
            "ctkvr": steps(served),
        }
        traffic = served.traffic
        before = (traffic.read_bytes, traffic.wait_seconds, traffic.answers)
        found = take_turns(ways, rounds)
        asked = traffic.answers - before[2]
        print(f"\n{model.config.num_hidden_layers} layers, {tokens} tokens, {rounds} rounds of {each} tokens")
        for name, seconds in found.items():
            a_token = [value / each for value in seconds]
            print(f"  {name:20} {spread(a_token)} ms a token, {1 / statistics.median(a_token):6.2f} tokens/s")
        for name in list(found)[:2]:
            ratios = [full / ours for full, ours in zip(found[name], found["ctkvr"], strict=True)]
            between = f"[{min(ratios):.2f}, {max(ratios):.2f}]"
            print(f"  ctkvr is {statistics.median(ratios):.2f} times as fast as {name} {between}")
        held = sum(tensor.nbytes for pair in layers for tensor in pair)
        chosen = (traffic.read_bytes - before[0]) / asked * len(layers)
        kept = served.sessions[0].info().memory.held_bytes
        print(f"  full attention holds and reads {held / 1e6:.0f} MB; ctkvr holds {kept / 1e6:.0f} MB, reads", end="")
        wait = 1e3 * (traffic.wait_seconds - before[1]) / asked
        print(f" {chosen / 1e6:.1f} MB a token to choose, waits {wait:.2f} ms a layer", flush=True)


def _dynamic(keys: torch.Tensor, values: torch.Tensor) -> DynamicLayer:
    layer = DynamicLayer()
    layer.update(keys, values)
    return layer


def measure_attention(client: ctkvr.Client, tokens: int, rounds: int) -> None:
    """The attention of one layer and step of Llama-3-8B's sizes: torch over everything, and ctkvr with its parts."""
    torch.manual_seed(1)
    keys, values = (torch.randn((1, LLAMA["kv_heads"], tokens, LLAMA["head_dim"])) for _ in range(2))
    query = 3 * torch.randn((1, LLAMA["q_heads"], 1, LLAMA["head_dim"]))
    scale = LLAMA["head_dim"] ** -0.5
    # A token that the query points at, in each group, so that attention is not flat.
    keys[0, :, tokens // 3] = query[0, :: LLAMA["q_heads"] // LLAMA["kv_heads"], 0]
    sequences = Sequences(
        client,
        lambda: client.open_session(
            layers=1,
            dtype="float32",
            token_limit=tokens + 4096,
            k=1024,
            selection=ctkvr.Selection(candidate_tokens=2048),
            format="k8v4",
            tokens_per_cluster=16,
            maintenance="manual",
            **LLAMA,
        ),
        1,
        [0],
        keep=False,
        answer="attention",
        remainder=True,
    )
    rows = [tensor[0].transpose(0, 1).contiguous() for tensor in (keys, values)]
    for begin in range(0, tokens, 8192):
        sequences.append(0, 0, *(tensor[begin : begin + 8192] for tensor in rows))
        sequences.flush()
    start = time.perf_counter()
    sequences.maintain()
    print(
        f"\none layer of Llama-3-8B's sizes, {tokens} tokens, K = 1024; indexed in {time.perf_counter() - start:.1f} s"
    )
    window = [tensor[:, :, -64:].contiguous() for tensor in (keys, values)]
    own: list[float] = []

    def served() -> None:
        def here() -> Any:
            begun = time.perf_counter()
            found = attend(query, *window, scale=scale)
            own.append(time.perf_counter() - begun)
            return found[0].transpose(1, 2), found[1].transpose(1, 2)

        new = rows[0][:1], rows[1][:1]
        held = sequences.length(0, 0)
        ((answer,),), local = sequences.ask(0, [Question(0, *new, query[0, :, 0][None], held - 64)], 64, here)
        parts = [(answer.output, answer.log_sum_exp), (answer.remainder_output, answer.remainder_log_sum_exp)]
        ctkvr.merge_attention([(local[0][0], local[1][0]), *parts])

    def full() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True)

    half = [tensor.to(torch.bfloat16) for tensor in (query, keys, values)]

    def full_half() -> None:
        torch.nn.functional.scaled_dot_product_attention(*half, scale=scale, enable_gqa=True)

    waited, answers = sequences.traffic.wait_seconds, sequences.traffic.answers
    found = take_turns({"full, float32": full, "full, bfloat16": full_half, "ctkvr": served}, rounds)
    for name, seconds in found.items():
        print(f"  {name:20} {spread(seconds)} ms")
    for name in ("full, float32", "full, bfloat16"):
        ratio = statistics.median(a / b for a, b in zip(found[name], found["ctkvr"], strict=True))
        print(f"  attention through ctkvr is {ratio:.2f} times as fast as {name}")
    wait = (sequences.traffic.wait_seconds - waited) / (sequences.traffic.answers - answers)
    print(f"  of ctkvr's: own window {spread(own)} ms, waiting for the server behind it {1e3 * wait:.2f} ms")
    sequences.close()


def machine() -> str:
    """What ran this."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown processor")
    load = Path("/proc/loadavg").read_text().split()[0]
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{cpu}, torch on {torch.get_num_threads()} threads, load {load}, {versions}, commit {commit}"


def main() -> None:
    """Runs all of it; --smoke: small sizes, to see that it works."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="of torch; the server has a lane")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    with Server("--arena_bytes=3GiB") as server, ctkvr.connect(server.address, timeout=600) as client:
        if options.smoke:
            model, ids = make("llama"), text(200)
        else:
            model, tokenizer = load()
            ids = torch.tensor([prompt_of(tokenizer, 2048)])
        read = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, cache=read, logits_to_keep=1)
        for tokens in (600, 900) if options.smoke else (8192, 32768):
            measure_model(model, read, client, tokens, options.rounds, 4)
        measure_attention(client, 2000 if options.smoke else 98304, options.rounds)


if __name__ == "__main__":
    main()
