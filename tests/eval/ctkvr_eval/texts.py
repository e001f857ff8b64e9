# SPDX-License-Identifier: Apache-2.0
"""Long texts that a Debian machine with Python has, cut into a prompt and a scored tail. The same ones for a seed.

records  package records of dpkg, then questions about them: every answer must be looked up
code     source of the Python standard library
prose    the reference texts that Python's help() shows
topics   records, then code, then prose, then questions about the records: the topic changes and comes back
"""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import numpy.typing as npt

# Token ids of a text, and the characters [begin, end) of each.
Encode = Callable[[str], tuple[list[int], list[tuple[int, int]]]]

NAMES = ("records", "code", "prose", "topics")
# Another machine's, where results are to be compared with what came of that.
_STATUS = Path(os.environ.get("CTKVR_EVAL_STATUS") or "/var/lib/dpkg/status")
_FIELDS = {"Version": "version", "Section": "section", "Installed-Size": "installed size", "Maintainer": "maintainer"}
# Of these; a maintainer's name is often another package's too, and would be guessed.
_ASKED = ("Version", "Section", "Installed-Size")


@dataclass(frozen=True)
class Text:
    """Tokens. tail[i] for i < P is fed, tail[i + 1] is the target that is scored."""

    name: str
    prompt: list[int]
    tail: list[int]  # P + 1
    answers: npt.NDArray[np.int64]  # [P]: which question the target answers; -1: it is no answer's

    @property
    def scored(self) -> int:
        """P."""
        return len(self.tail) - 1


def build(name: str, encode: Encode, prompt_tokens: int, tail_tokens: int, seed: int) -> Text:
    """One of NAMES. ValueError: no such text, or the machine has too little of it."""
    draw = random.Random(f"{name} {seed}")
    if name == "code":
        return _cut(
            name, _joined(_sources(draw), 8 * (prompt_tokens + tail_tokens)), encode, prompt_tokens, tail_tokens
        )
    if name == "prose":
        return _cut(name, _joined(_topics(draw), 8 * (prompt_tokens + tail_tokens)), encode, prompt_tokens, tail_tokens)
    if name == "records":
        return _questioned(name, encode, prompt_tokens, tail_tokens, draw, between="")
    if name == "topics":
        third = prompt_tokens // 3
        between = _first(_joined(_sources(draw), 12 * third), encode, third)
        between += _first(_joined(_topics(draw), 12 * third), encode, third)
        return _questioned(name, encode, prompt_tokens - 2 * third, tail_tokens, draw, between)
    raise ValueError(f"text is {name!r}; it is one of {', '.join(NAMES)}")


def from_file(path: Path, encode: Encode, prompt_tokens: int, tail_tokens: int) -> Text:
    """Anyone's own: its first tokens are the prompt, those behind them are scored."""
    return _cut(path.stem, path.read_text(), encode, prompt_tokens, tail_tokens)


def _cut(name: str, text: str, encode: Encode, prompt_tokens: int, tail_tokens: int) -> Text:
    tokens, _ = encode(text)
    if len(tokens) <= prompt_tokens + tail_tokens:
        raise ValueError(f"{name} has {len(tokens)} tokens; {prompt_tokens + tail_tokens + 1} are needed")
    tail = tokens[prompt_tokens : prompt_tokens + tail_tokens + 1]
    return Text(name, tokens[:prompt_tokens], tail, np.full(tail_tokens, -1))


def _first(text: str, encode: Encode, tokens: int) -> str:
    _, spans = encode(text)
    if len(spans) < tokens:
        raise ValueError(f"a part has {len(spans)} tokens; {tokens} are needed")
    return text[: spans[tokens - 1][1]] + "\n\n"


def _joined(parts: Iterator[str], characters: int) -> str:
    """Parts until there are so many characters."""
    found: list[str] = []
    length = 0
    for part in parts:
        found.append(part)
        length += len(part)
        if length >= characters:
            break
    return "\n\n".join(found)


def _sources(draw: random.Random) -> Iterator[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    draw.shuffle(files)
    for file in files:
        yield file.read_text(errors="replace")


def _topics(draw: random.Random) -> Iterator[str]:
    names = sorted(topics)
    draw.shuffle(names)
    for name in names:
        yield topics[name]


# ---- Records ---------------------------------------------------------------------------------------------------------


def _records() -> list[dict[str, str]]:
    """Installed packages, from dpkg."""
    if not _STATUS.is_file():
        raise ValueError(f"there is no {_STATUS}: records need a Debian machine")
    found = []
    for block in _STATUS.read_text(errors="replace").split("\n\n"):
        fields: dict[str, str] = {}
        for line in block.splitlines():
            key, colon, value = line.partition(": ")
            if colon and not line.startswith(" "):
                fields[key] = value
        if all(key in fields for key in ("Package", "Description", *_FIELDS)):
            found.append(fields)
    return sorted(found, key=lambda fields: fields["Package"])


def _record(fields: dict[str, str]) -> str:
    lines = [f"{key}: {fields[key]}" for key in ("Package", *_FIELDS, "Description")]
    return "\n".join(lines) + "\n\n"


def _questioned(
    name: str, encode: Encode, prompt_tokens: int, tail_tokens: int, draw: random.Random, between: str
) -> Text:
    """Records until there are prompt_tokens, `between`, then questions about any of them."""
    records = _records()
    draw.shuffle(records)
    kept: list[dict[str, str]] = []
    used = 0
    for fields in records:
        size = len(encode(_record(fields))[0])
        if used + size > prompt_tokens:
            break
        kept.append(fields)
        used += size
    else:
        raise ValueError(f"{name} has {used} tokens of records; {prompt_tokens} are needed")
    prompt, _ = encode("".join(map(_record, kept)) + between)
    tail: list[int] = []
    answers: list[int] = []
    for question in range(tail_tokens):
        fields, key = draw.choice(kept), draw.choice(_ASKED)
        asked = f"Question: What is the {_FIELDS[key]} of the package {fields['Package']}?\nAnswer:"
        tokens, spans = encode(f"{asked} {fields[key]}\n\n")
        end = len(asked) + 1 + len(fields[key])
        tail += tokens
        answers += [question if len(asked) < stop and begin < end else -1 for begin, stop in spans]
        if len(tail) > tail_tokens:
            break
    return Text(name, prompt, tail[: tail_tokens + 1], np.array(answers[1 : tail_tokens + 1]))
