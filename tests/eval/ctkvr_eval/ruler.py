# SPDX-License-Identifier: Apache-2.0
"""Texts shaped as those of RULER (Hsieh et al., COLM 2024), from a seed; the tasks are made easier for small models.

    python -m ctkvr_eval.ruler [--tasks niah_single,...] [--methods full,quest,...] [--k 256] [--tokens 7168]

niah_single    one needle ("The special magic number for KEY is NUMBER.") in noise that repeats
niah_multikey  24 needles with other keys and numbers between sentences of real prose
niah_multivalue  12 keys with four numbers each, apart from each other, between sentences of real prose
variables      variable tracking: chains of assignments; which variables hold a value
common_words   a list of words of which a few are frequent: name those
qa             questions about documents, which are package records of this machine

RULER asks one question a prompt and the model reads it with full attention; so it is here with `--read-densely`. Else
questions follow each other in the tail, answers between them: one prompt serves several, and the selector reads the
questions too, as it does in a new turn, which is harder. A
value is right when its every token is the likeliest one after the right text before it: what greedy decoding would have
written; accuracy is the share of values that are right. RULER's qa are crowd-sourced questions on encyclopaedia
articles, which no Debian machine has.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pydoc_data.topics import topics

import ctkvr
import numpy as np

from ctkvr_eval import methods, texts
from ctkvr_eval.capture import LanguageModel
from ctkvr_eval.evaluate import evaluate, make_task
from ctkvr_eval.metrics import Scores
from ctkvr_eval.selectors.base import Selector
from ctkvr_eval.selectors.comparison import PAPERS, ComparisonSelector
from ctkvr_eval.selectors.server import Daemon, find_program
from ctkvr_eval.texts import Encode, Text

DEFAULT_METHODS = (
    "full,exact,sliding_window,quest,quest_paper,infllm,magicpig_paper,retrieval_attention,retroinfer,query_centroids,"
    "ctkvr,ctkvr+remainder"
)
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"

# What stands before the answer, the values of the answer, and what stands between them.
Question = tuple[str, list[str], str]
Count = Callable[[str], int]


def names() -> list[str]:
    """Of the tasks, as build() takes them."""
    return [*_TASKS, "qa"]


def build(
    task: str, encode: Encode, tokens: int, seed: int, questions: int = 16, *, read_densely: bool = False
) -> Text:
    """A prompt of at most `tokens` tokens and a tail of questions. ValueError: no such task.

    read_densely: the first question ends the prompt, and the tail is its answer.
    """
    if task == "qa":
        if read_densely:
            raise ValueError("read_densely: not with task 'qa', whose questions are one text")
        text = texts.build("records", encode, tokens, 40 * questions, seed)
        return Text("ruler-qa", text.prompt, text.tail, text.answers)
    if task not in _TASKS:
        raise ValueError(f"task is {task!r}; it is one of {', '.join(names())}")
    draw = random.Random(f"{task} {seed}")
    prompt, asked = _TASKS[task](draw, lambda text: len(encode(text)[0]), tokens)
    tail: list[int] = []
    answers: list[int] = []
    value = 0
    for question, values, between in asked[: 1 if read_densely else questions]:
        found, spans = encode(f"{question} {between.join(values)}\n\n")
        marks = np.full(len(found), -1)
        begin = len(question)
        for one in values:
            begin += len(between) if begin > len(question) else 1
            end = begin + len(one)
            marks[[first < end and begin < last for first, last in spans]] = value
            begin, value = end, value + 1
        tail += found
        answers += marks.tolist()
    held = encode(prompt)[0]
    if read_densely:
        fed = next(at for at, value in enumerate(answers) if value >= 0) - 1
        held, tail, answers = held + tail[:fed], tail[fed:], answers[fed:]
    return Text(f"ruler-{task}", held, tail, np.array(answers[1:]))


def _word(draw: random.Random, syllables: int = 3) -> str:
    return "".join(draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(syllables))


def _words(draw: random.Random, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[_word(draw)] = None
    return list(found)


def _number(draw: random.Random) -> str:
    return str(draw.randrange(10000, 100000))


def _prose(draw: random.Random) -> Iterator[str]:
    """Paragraphs of the texts that Python's help() shows."""
    every = [part for name in sorted(topics) for part in topics[name].split("\n\n") if 80 < len(part) < 600]
    draw.shuffle(every)
    yield from every


def _noise(_: random.Random) -> Iterator[str]:
    while True:
        yield _NOISE


def _hidden(needles: list[str], parts: Iterator[str], count: Count, tokens: int) -> str:
    """Needles evenly among the parts, so that all are `tokens` tokens at most."""
    room = tokens - sum(count(needle) + 2 for needle in needles)
    hay: list[str] = []
    while room > 0:
        part = next(parts)
        room -= count(part) + 2
        if room > 0:
            hay.append(part)
    for at, needle in enumerate(needles):
        hay.insert((at + 1) * len(hay) // (len(needles) + 1), needle)
    return "\n\n".join(hay) + "\n\n"


def _needle(key: str, number: str) -> str:
    return f"The special magic number for {key} is {number}."


def _single(draw: random.Random, count: Count, tokens: int) -> tuple[str, list[Question]]:
    (key,), number = _words(draw, 1), _number(draw)
    shifted = draw.randrange(12)
    # The needle's depth is drawn: empty needles move it.
    needles = [_NOISE] * shifted + [_needle(key, number)] + [_NOISE] * (11 - shifted)
    return _hidden(needles, _noise(draw), count, tokens), [(f"The special magic number for {key} is", [number], "")]


def _multikey(draw: random.Random, count: Count, tokens: int) -> tuple[str, list[Question]]:
    pairs = [(key, _number(draw)) for key in _words(draw, 24)]
    prompt = _hidden([_needle(*pair) for pair in pairs], _prose(draw), count, tokens)
    asked = draw.sample(pairs, len(pairs))
    return prompt, [(f"The special magic number for {key} is", [number], "") for key, number in asked]


def _multivalue(draw: random.Random, count: Count, tokens: int) -> tuple[str, list[Question]]:
    held = {key: [_number(draw) for _ in range(4)] for key in _words(draw, 12)}
    order = [(key, number) for at in range(4) for key, number in ((key, held[key][at]) for key in held)]
    prompt = _hidden([_needle(*pair) for pair in order], _prose(draw), count, tokens)
    asked = draw.sample(sorted(held), len(held))
    return prompt, [(f"The special magic numbers for {key} are", held[key], ", ") for key in asked]


def _variables(draw: random.Random, count: Count, tokens: int) -> tuple[str, list[Question]]:
    chains = [[word.upper() for word in _words(draw, 3)] for _ in range(10)]
    values = [_number(draw) for _ in chains]
    lines = [f"VAR {chain[0]} = {value}." for chain, value in zip(chains, values, strict=True)]
    for hop in (1, 2):
        lines += [f"VAR {chain[hop]} = VAR {chain[hop - 1]}." for chain in chains]
    asked = [
        (f"Question: which variables hold the value {value}?\nAnswer: VAR", chain, ", VAR ")
        for chain, value in zip(chains, values, strict=True)
    ]
    draw.shuffle(asked)
    return _hidden(lines, _prose(draw), count, tokens), asked


def _common_words(draw: random.Random, count: Count, tokens: int) -> tuple[str, list[Question]]:
    words = _words(draw, tokens // 4)
    common, rare = words[:8], words[8:]
    size = tokens // 4
    while True:
        # Numbered as RULER's lists are; a quarter of the lines hold the common words.
        listed = common * (size // 32)
        listed += rare[: size - len(listed)]
        draw.shuffle(listed)
        prompt = "".join(f"{at + 1}. {word}\n" for at, word in enumerate(listed)) + "\n"
        if count(prompt) <= tokens:
            break
        size = size * 19 // 20
    end = "The most common words of the list, in alphabetical order, are:"
    return prompt, [(end, sorted(common), ", ")]


_TASKS: dict[str, Callable[[random.Random, Callable[[str], int], int], tuple[str, list[Question]]]] = {
    "niah_single": _single,
    "niah_multikey": _multikey,
    "niah_multivalue": _multivalue,
    "variables": _variables,
    "common_words": _common_words,
}


def accuracy(text: Text, scores: Scores) -> float:
    """Share of the values whose every token was the likeliest."""
    right = [bool(scores.correct[text.answers == value].all()) for value in range(int(text.answers.max()) + 1)]
    return float(np.mean(right))


def main(arguments: Sequence[str] | None = None, model: LanguageModel | None = None) -> int:
    """Prints a row a method: accuracy of each task, their mean, and that against full attention's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(names()))
    parser.add_argument("--methods", default=DEFAULT_METHODS)
    parser.add_argument("--k", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=7168)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--read-densely", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(arguments)
    tasks, wanted = given.tasks.split(","), given.methods.split(",")
    if model is None:
        import torch

        from ctkvr_eval.model import Model

        torch.set_num_threads(given.threads)
        model = Model(given.model)
    found: dict[str, dict[str, list[float]]] = {method: {task: [] for task in tasks} for method in wanted}
    with _server(wanted) as client:
        for seed in range(given.seed, given.seed + given.seeds):
            for task in tasks:
                text = build(task, model.encode, given.tokens, seed, given.questions, read_densely=given.read_densely)
                capture = model.capture(text.prompt)
                for method in wanted:
                    selector = make(method, given.k, client)
                    run = make_task(capture, seed, observe_every=0)
                    share = accuracy(text, evaluate(model, capture, text, selector, run, given.k).scores)
                    found[method][task].append(share)
                    sys.stderr.write(f"{task} seed {seed} {method}: {share:.3f} of {int(text.answers.max()) + 1}\n")
    sys.stdout.write(_table(found, tasks))
    return 0


def make(method: str, k: int, client: ctkvr.Client | None = None) -> Selector:
    """As methods.make, and settings of papers."""
    if method in PAPERS:
        name, dense_layers = PAPERS[method]
        return ComparisonSelector(name, k, dense_layers=dense_layers)
    return methods.make(method, k, client)


@contextmanager
def _server(wanted: Sequence[str]) -> Iterator[ctkvr.Client | None]:
    """A ctkvrd where a method asks it."""
    if not any(methods.needs_server(method) for method in wanted):
        yield None
        return
    daemon = Daemon(find_program())
    try:
        with ctkvr.connect(daemon.address, timeout=600) as client:
            yield client
    finally:
        daemon.stop()


def _table(found: dict[str, dict[str, list[float]]], tasks: Sequence[str]) -> str:
    lines = [f"| method | {' | '.join(tasks)} | mean |", "|---" * (len(tasks) + 2) + "|"]
    for method, by_task in found.items():
        shares = [float(np.mean(by_task[task])) for task in tasks]
        cells = " | ".join(f"{100 * share:.1f}" for share in [*shares, float(np.mean(shares))])
        lines.append(f"| {method} | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
