# SPDX-License-Identifier: Apache-2.0
"""The RULER-shaped texts: what is hidden can be found, what is marked is the answer, and greedy right is right."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import toy
from ctkvr_eval import ruler
from ctkvr_eval.metrics import Scores
from ctkvr_eval.texts import Text

TOKENS = 3000
TASKS = [name for name in ruler.names() if name != "qa"]


class Words:
    """Words, spaces and other characters are tokens."""

    def __init__(self) -> None:
        self.held: list[str] = []

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids are places in `held`."""
        found = list(re.finditer(r" ?\w+|\W", text))
        known = {word: at for at, word in enumerate(self.held)}
        for match in found:
            if match[0] not in known:
                known[match[0]] = len(self.held)
                self.held.append(match[0])
        return [known[match[0]] for match in found], [match.span() for match in found]

    def text(self, ids: list[int]) -> str:
        """What they stand for."""
        return "".join(self.held[one] for one in ids)


def values_of(words: Words, text: Text) -> list[str]:
    """The marked values."""
    targets = np.array(text.tail[1:])
    return [words.text(targets[text.answers == value].tolist()).strip() for value in range(text.answers.max() + 1)]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("read_densely", [False, True])
def test_prompt_holds_the_answers(task: str, read_densely: bool) -> None:
    words = Words()
    text = ruler.build(task, words.encode, TOKENS, 7, read_densely=read_densely)
    prompt, tail = words.text(text.prompt), words.text(text.tail)
    assert 0.8 * TOKENS < len(text.prompt) <= TOKENS + 40 * read_densely
    assert len(text.answers) == text.scored
    values = values_of(words, text)
    assert len(set(values)) == len(values) > 0
    for value in values:
        assert value in prompt
        assert f" {value}" in tail
    again = ruler.build(task, words.encode, TOKENS, 7, read_densely=read_densely)
    assert again.prompt == text.prompt
    assert ruler.build(task, words.encode, TOKENS, 8).prompt != text.prompt


def test_needles_are_those_of_their_keys() -> None:
    words = Words()
    for task in ("niah_single", "niah_multikey", "niah_multivalue"):
        text = ruler.build(task, words.encode, TOKENS, 3)
        needles = re.findall(r"The special magic number for (\w+) is (\d+)\.", words.text(text.prompt))
        asked = re.findall(r"for (\w+) (?:is|are) ([\d, ]+)", words.text(text.tail))
        assert asked
        for key, numbers in asked:
            assert [number for name, number in needles if name == key] == numbers.strip().split(", ")


def test_variables_follow_from_the_assignments() -> None:
    words = Words()
    text = ruler.build("variables", words.encode, TOKENS, 3)
    held: dict[str, str] = {}
    for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", words.text(text.prompt)):
        held[name] = held.get(value, value)
    for value, names in re.findall(r"hold the value (\d+)\?\nAnswer: ([\w, ]+)", words.text(text.tail)):
        assert {name for name in held if held[name] == value} == set(names.replace("VAR ", "").split(", "))


def test_common_words_are_the_most_common() -> None:
    words = Words()
    text = ruler.build("common_words", words.encode, TOKENS, 3)
    listed = re.findall(r"\d+\. (\w+)", words.text(text.prompt))
    counts = sorted(((listed.count(word), word) for word in set(listed)), reverse=True)
    assert {word for _, word in counts[:8]} == set(values_of(words, text))
    assert counts[7][0] >= 2 * counts[8][0]


def test_read_densely_leaves_only_the_answer_to_the_tail() -> None:
    words = Words()
    text = ruler.build("niah_multikey", words.encode, TOKENS, 3, read_densely=True)
    asked = ruler.build("niah_multikey", words.encode, TOKENS, 3, questions=1)
    assert words.text(text.prompt + text.tail) == words.text(asked.prompt + asked.tail)
    assert text.answers[0] == 0
    assert words.text(text.prompt + text.tail[:1]).endswith(" is")


def test_a_value_is_right_when_all_its_tokens_are() -> None:
    text = Text("x", [], [0] * 7, np.array([-1, 0, 0, -1, 1, 1]))
    right = Scores(np.zeros(6), np.array([False, True, True, False, True, False]))
    assert ruler.accuracy(text, right) == 0.5


def test_names_the_tasks_that_there_are() -> None:
    with pytest.raises(ValueError, match="task is 'none'; it is one of niah_single"):
        ruler.build("none", Words().encode, 100, 1)
    with pytest.raises(ValueError, match="read_densely"):
        ruler.build("qa", Words().encode, 100, 1, read_densely=True)


def test_prints_each_method_against_full_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tasks", "niah_single,variables", "--methods", "full,exact,quest_paper", "--tokens", "1500"]
    assert ruler.main([*arguments, "--k", "2000", "--questions", "1"], toy.Toy(tmp_path, 3)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["method", "---", "full", "exact", "quest_paper"]
    # With K beyond the prompt all are full attention.
    assert len({line.split("|", 2)[2] for line in lines[2:]}) == 1
