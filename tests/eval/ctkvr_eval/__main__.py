# SPDX-License-Identifier: Apache-2.0
"""The command line: see tests/eval/README.md, or --help."""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ctkvr
import numpy as np

from ctkvr_eval import methods, plan, plots, results, texts
from ctkvr_eval.capture import Capture, LanguageModel
from ctkvr_eval.evaluate import Full, evaluate, make_task
from ctkvr_eval.metrics import Scores
from ctkvr_eval.selectors.server import Daemon, find_program

_HERE = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None, model: LanguageModel | None = None) -> int:
    """Runs what is asked for; one line a run. model None: the one of the arguments."""
    options = _parser().parse_args(arguments)
    if options.report:
        _report(options.out)
        return 0
    runs = _runs(options)
    model = model or _load(options)
    with _server(options, runs) as client:
        for seed in range(options.seed, options.seed + options.seeds):
            for text in _texts(options, model, runs, seed):
                capture = _captured(model, text)
                base = _full(model, capture, text)
                for method, k in [(run.method, run.k) for run in runs if run.text in (text.name, "")]:
                    _run(options, model, capture, text, base, (method, k, seed), client)
    if not options.only:
        _report(options.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests/eval/run", description="Measures what selectors do to a model's loss.")
    parser.add_argument("--only", action="append", metavar="METHOD", help="a method (again: another) in place of all")
    parser.add_argument("--text", action="append", metavar="NAME", help=f"{', '.join(texts.NAMES)}, or a file of yours")
    parser.add_argument("--k", type=int, action="append", metavar="TOKENS", help="tokens chosen a KV head; default 256")
    parser.add_argument("--model", metavar="PATH", help="folder or GGUF file; default SmolLM2-135M-Instruct")
    parser.add_argument("--prompt", type=int, default=7168, metavar="TOKENS", help="default 7168")
    parser.add_argument("--tail", type=int, default=512, metavar="TOKENS", help="scored behind the prompt; default 512")
    parser.add_argument("--seed", type=int, default=1, help="of texts, rotations and samples; default 1")
    parser.add_argument("--seeds", type=int, default=1, help="how many from --seed on; default 1")
    parser.add_argument("--blind", action="store_true", help="loss alone: no needles, mass and recall")
    parser.add_argument(
        "--every", type=int, default=4, metavar="N", help="needles, mass and recall of every Nth position; default 4"
    )
    parser.add_argument("--address", metavar="HOST:PORT", help="a running ctkvrd; default: one is started")
    parser.add_argument("--arena", default="4GiB", help="of the ctkvrd that is started; default 4GiB")
    parser.add_argument("--threads", type=int, default=2, help="of the model; default 2")
    parser.add_argument("--out", type=Path, default=_HERE, metavar="FOLDER", help="for results.csv and plots")
    parser.add_argument("--report", action="store_true", help="only tables and plots, from results.csv")
    return parser


def _load(options: argparse.Namespace) -> LanguageModel:
    # torch takes seconds to load, and nothing else here needs it.
    import torch

    from ctkvr_eval.model import Model

    torch.set_num_threads(options.threads)
    return Model(options.model)


def _runs(options: argparse.Namespace) -> list[plan.Run]:
    if not options.only:
        return [run for run in plan.EVERYTHING if not options.text or run.text in options.text]
    return [plan.Run("", method, k) for method in options.only for k in options.k or [256]]


@contextmanager
def _server(options: argparse.Namespace, runs: Sequence[plan.Run]) -> Iterator[ctkvr.Client | None]:
    if not any(methods.needs_server(run.method) for run in runs):
        yield None
        return
    daemon = None if options.address else Daemon(find_program(), arena=options.arena)
    try:
        with ctkvr.connect(options.address or (daemon.address if daemon else ""), timeout=600) as client:
            yield client
    finally:
        if daemon:
            daemon.stop()


def _texts(
    options: argparse.Namespace, model: LanguageModel, runs: Sequence[plan.Run], seed: int
) -> Iterator[texts.Text]:
    wanted = options.text or list(dict.fromkeys(run.text or "records" for run in runs))
    for name in wanted:
        if name in texts.NAMES:
            yield texts.build(name, model.encode, options.prompt, options.tail, seed)
        else:
            yield texts.from_file(Path(name), model.encode, options.prompt, options.tail)


def _captured(model: LanguageModel, text: texts.Text) -> Capture:
    start = time.perf_counter()
    capture = model.capture(text.prompt)
    _say(f"{text.name}: prompt of {len(text.prompt)} tokens, {time.perf_counter() - start:.1f} s")
    return capture


def _full(model: LanguageModel, capture: Capture, text: texts.Text) -> Scores:
    """Of full attention: kept beside the capture."""
    path = capture.folder / f"full-{zlib.crc32(np.array(text.tail).tobytes()):08x}.npz"
    if path.is_file():
        held = np.load(path)
        return Scores(held["nll"], held["correct"])
    found = evaluate(model, capture, text, Full(), make_task(capture, 1, observe_every=0), 1).scores
    np.savez(path, nll=found.nll, correct=found.correct)
    return found


def _run(
    options: argparse.Namespace,
    model: LanguageModel,
    capture: Capture,
    text: texts.Text,
    base: Scores,
    what: tuple[str, int, int],
    client: ctkvr.Client | None,
) -> None:
    method, k, seed = what
    start = time.perf_counter()
    selector = methods.make(method, k, client)
    outcome = evaluate(
        model, capture, text, selector, make_task(capture, seed, 0 if options.blind else options.every), k
    )
    candidates = getattr(selector, "candidates", 0)
    row = results.make_row(text, model.name, method, k, candidates, seed, outcome, base)
    results.add(options.out / "results.csv", [row])
    results.add(options.out / "heads.csv", results.head_rows(row, outcome))
    plots.keep_curve(options.out, row, outcome)
    _say(
        f"{text.name} {method} k={k} seed={seed}: dNLL {row.dnll:+.4f} [{row.dnll_low:+.4f}, {row.dnll_high:+.4f}], "
        f"answers {row.dnll_answers:+.4f}, accuracy {row.accuracy:.3f}, needle {row.needle:.4f}, "
        f"worst {row.worst_head:.3f}, read {100 * row.share_read:.1f} %, {time.perf_counter() - start:.0f} s"
    )


def _report(folder: Path) -> None:
    rows = results.read(folder / "results.csv")
    (folder / "results.md").write_text(results.table(rows))
    for path in plots.draw(folder, rows):
        _say(f"wrote {path}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
