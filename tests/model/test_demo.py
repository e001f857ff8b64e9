# SPDX-License-Identifier: Apache-2.0
"""The demo, with a small model of the test's own, and what it says where something is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tokenizers
from ctkvr import demo
from transformers import PreTrainedTokenizerFast

from models import VOCABULARY, make
from server import Server


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with a model and a tokenizer whose words are numbers."""
    words = {"[pad]": 0, "[unk]": 1, "[end]": 2, **{str(number): number for number in range(3, VOCABULARY)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[unk]"))  # noqa: S106 (no secret)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[unk]", eos_token="[end]").save_pretrained(folder)  # noqa: S106
    make("gemma3", initializer_range=0.08).save_pretrained(folder)
    return str(folder)


def test_it_compares_both_ways(
    model: str, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "text").write_text(" ".join(str(3 + number * 7 % 200) for number in range(900)))
    given = ["--model", model, "--text", str(tmp_path / "text"), "--address", server.address, "--tokens", "700"]
    asked = ["--question", "30 31 32", "--question", "90", "--answer-tokens", "12", "--k", "64", "--threads", "1"]
    assert demo.main([*given, *asked]) == 0
    shown = capsys.readouterr().out
    assert "reading 700 of 700 tokens" in shown
    for question in ("30 31 32", "90"):
        assert re.search(rf"│ {question} +│ [\d ]+│ [\d ]+│ (yes|to token \d+)", shown)
    # Two layers of 2 KV heads of 16 dimensions hold everything, two slide over 32 tokens; in float32.
    held = 2 * 2 * (700 * 2 + 31 * 2) * 16 * 4 / 1e3
    found = re.search(r"keys and values in the model +│ +([\d.]+) kB │ +([\d.]+) kB", shown)
    assert found is not None
    assert float(found[1]) == pytest.approx(held, rel=0.02)
    assert float(found[2]) < held / 5
    for figure in ("tokens a second", "read to attend, a token", "over the wire, a token", "on the server"):
        assert figure in shown


def test_without_a_question_the_text_goes_on(
    model: str, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("3 4 5 6 7 8 9 " * 40)
    assert demo.main(["--model", model, "--text", str(tmp_path / "text"), "--address", server.address]) == 0
    assert "(goes on)" in capsys.readouterr().out


def test_it_says_what_is_missing(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--model", model, "--text", str(tmp_path / "none"), "--address", "127.0.0.1:1"]) == 1
    assert "FileNotFoundError" in capsys.readouterr().out
    (tmp_path / "text").write_text("3 4 5")
    assert demo.main(["--model", model, "--text", str(tmp_path / "text"), "--address", "127.0.0.1:1"]) == 1
    assert "Unavailable" in capsys.readouterr().out
