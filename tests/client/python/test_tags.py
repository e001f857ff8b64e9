# SPDX-License-Identifier: Apache-2.0
"""Taggers: what they say of a text, over the offsets of a real tokenizer, and what a server then chooses."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import ctkvr
import numpy as np
import numpy.typing as npt
import pytest
import tokenizers
from ctkvr import tags
from ctkvr.tags import Modality, Syntax
from ctkvr.v1 import session_pb2

from conftest import GEOMETRY, HEAD_DIM, KV_HEADS, Tokens

PROGRAM = '''"""Über words."""
import os.path as path

@cache.keep(3)
class Reader(Base):
    """Reads."""

    async def read(self, name: str, *rest, limit=1.5, **more) -> bytes:
        # of a file
        return self.open(name, mode=f"r{limit}").data + b"\\xe9" + path.join("é", name)
'''
# Every name once, by hand; in order of the text.
EXPECTED = {
    '"""Über words."""': Syntax.DOCSTRING,
    "import": Syntax.KEYWORD,
    "os": Syntax.IMPORT,
    "path": Syntax.IMPORT,
    "as": Syntax.KEYWORD,
    "@": Syntax.OPERATOR,
    "cache": Syntax.NAME,
    "keep": Syntax.CALL,
    "3": Syntax.NUMBER,
    "class": Syntax.KEYWORD,
    "Reader": Syntax.DEFINITION,
    "Base": Syntax.NAME,
    '"""Reads."""': Syntax.DOCSTRING,
    "async": Syntax.KEYWORD,
    "def": Syntax.KEYWORD,
    "read": Syntax.DEFINITION,
    "self": Syntax.PARAMETER,
    "name": Syntax.PARAMETER,
    "str": Syntax.NAME,
    "rest": Syntax.PARAMETER,
    "limit": Syntax.PARAMETER,
    "1.5": Syntax.NUMBER,
    "more": Syntax.PARAMETER,
    "->": Syntax.OPERATOR,
    "bytes": Syntax.NAME,
    "# of a file": Syntax.COMMENT,
    "return": Syntax.KEYWORD,
    "open": Syntax.CALL,
    "mode": Syntax.PARAMETER,
    '"r': Syntax.STRING,
    "data": Syntax.ATTRIBUTE,
    'b"\\xe9"': Syntax.STRING,
    "join": Syntax.CALL,
    '"é"': Syntax.STRING,
}


def spans_of(program: str, expected: dict[str, Syntax]) -> list[tuple[int, int]]:
    spans, begin = [], 0
    for text in expected:
        begin = program.index(text, begin)
        spans.append((begin, begin + len(text)))
        begin += len(text)
    return spans


def test_every_class_of_syntax_is_found_by_characters() -> None:
    spans = spans_of(PROGRAM, EXPECTED)
    assert dict(zip(EXPECTED, tags.python_ast(PROGRAM, spans), strict=True)) == EXPECTED
    assert set(EXPECTED.values()) == set(Syntax) - {Syntax.OTHER}


@pytest.mark.parametrize("newline", ["\r\n", "\r"])
def test_lines_may_end_in_any_way(newline: str) -> None:
    program = PROGRAM.replace("\n", newline)
    spans = spans_of(program, EXPECTED)
    assert dict(zip(EXPECTED, tags.python_ast(program, spans), strict=True)) == EXPECTED


def test_a_token_takes_the_class_of_most_of_its_characters() -> None:
    text = "x =  name.call(x) # y"
    assert tags.python_ast(text, [(3, 9), (9, 15), (14, 15), (17, 21), (3, 5), (6, 6)]).tolist() == [
        Syntax.NAME,  # though spaces come first
        Syntax.CALL,
        Syntax.OPERATOR,
        Syntax.COMMENT,
        Syntax.OTHER,  # nothing but space
        Syntax.OTHER,  # a special token
    ]
    assert tags.python_ast("a.b", [(0, 2)]).tolist() == [Syntax.OPERATOR]  # one each: the lower class


def test_a_text_that_does_not_parse_has_its_lexical_classes() -> None:
    cut = PROGRAM[: PROGRAM.index('", name)')]
    spans = [(cut.index(word), cut.index(word) + len(word)) for word in ("Reader", "3", "# of", "name", "open")]
    assert tags.python_ast(cut, spans).tolist() == [
        Syntax.DEFINITION,
        Syntax.NUMBER,
        Syntax.COMMENT,
        Syntax.NAME,
        Syntax.NAME,
    ]
    for text in ("a \0 b", "(" * 500 + "1", "\tx\n  y"):
        assert tags.python_ast(text, [(0, 1)]).shape == (1,)


def test_of_a_chat_only_what_is_fenced_is_python() -> None:
    chat = "if I call f\n```python\nf(1)\n```\nor\n```\ng(2)\n```\nthen ```py\nh(3)\n```"
    words = ["if", "f(", "1", "g", "2", "h"]
    spans = [(chat.index(word), chat.index(word) + len(word.rstrip("("))) for word in words]
    assert tags.python_ast(chat, spans, fenced=True).tolist() == [0, Syntax.CALL, Syntax.NUMBER, 0, 0, 0]


def test_offsets_that_do_not_fit_are_refused() -> None:
    assert tags.python_ast("x", []).tolist() == []
    for offsets in ([(0, 2)], [(-1, 1)], [(1, 0)]):
        with pytest.raises(ValueError, match="within the text's 1 characters"):
            tags.python_ast("x", offsets)
    for given in ([0, 1], [[(0, 1)]], [(0.0, 1.0)]):
        with pytest.raises(ValueError, match=r"integers \[tokens, 2\]"):
            tags.python_ast("x", given)


def tokenizer_of(text: str) -> Any:
    """A byte-level tokenizer as those of Llama and Qwen, trained on the text."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=400, show_progress=False)
    return tokenizer


def test_a_real_tokenizers_offsets_fit() -> None:
    encoded = tokenizer_of(PROGRAM).encode(PROGRAM)
    classes = tags.python_ast(PROGRAM, encoded.offsets)
    assert classes.shape == (len(encoded.ids),)
    assert classes.dtype == np.uint32
    for word, syntax in (("Reader", Syntax.DEFINITION), ("# of a file", Syntax.COMMENT), ("join", Syntax.CALL)):
        begin = PROGRAM.index(word)
        of_word = [begin <= b and e <= begin + len(word) and b < e for b, e in encoded.offsets]
        assert any(of_word)
        assert set(classes[of_word]) == {syntax}


def test_term_weights_are_those_of_counting(rng: np.random.Generator) -> None:
    ids = rng.integers(0, 40, 700) ** 2 // 40
    pieces = [ids[begin : begin + 100].tolist() for begin in range(0, 700, 100)]
    counts = [Counter(piece) for piece in pieces]
    raw = [
        (1 + math.log(count[term])) * math.log(8 / (1 + sum(term in other for other in counts)))
        for piece, count in zip(pieces, counts, strict=True)
        for term in piece
    ]
    weights = tags.tfidf(ids, 100)
    np.testing.assert_allclose(weights, np.array(raw) / max(raw), rtol=1e-6)
    assert weights.dtype == np.float32
    assert weights.max() == 1
    corpus = tags.TfIdf(ids, 100)
    np.testing.assert_array_equal(corpus.weights(ids), weights)
    new = corpus.weights([int(ids[0]), 10**6])  # generated later: one term is known, one is not
    np.testing.assert_allclose(new[1], math.log(8) / max(raw), rtol=1e-6)
    found_in = sum(ids[0] in count for count in counts)
    np.testing.assert_allclose(new[0], math.log(8 / (1 + found_in)) / max(raw), rtol=1e-6)


def test_what_is_everywhere_weighs_nothing() -> None:
    assert tags.tfidf([1, 2, 1, 3], 2).tolist() == [0.0, 1.0, 0.0, 1.0]
    assert tags.tfidf([1, 2, 3]).tolist() == [0.0, 0.0, 0.0]  # one segment tells nothing apart
    assert tags.tfidf([]).tolist() == []
    with pytest.raises(ValueError, match="segment_tokens is 0"):
        tags.tfidf([1], 0)
    with pytest.raises(ValueError, match=r"token_ids has dims \[1, 2\]"):
        tags.tfidf([[1, 2]])


def test_segments_are_numbered_and_no_more_than_there_are_classes() -> None:
    assert tags.segments(4, 6, first_position=2).tolist() == [0, 0, 1, 1, 1, 1]
    assert tags.segments(1024, 256 * 1024)[-1] == 255
    with pytest.raises(ValueError, match="segments of 1025 do not"):
        tags.segments(1024, 256 * 1024 + 1)
    with pytest.raises(ValueError, match="segment_tokens is 0"):
        tags.segments(0, 1)


def test_modalities_come_from_placeholders() -> None:
    found = tags.modality([5, 9, 9, 7, 8, 5], {Modality.IMAGE: 9, Modality.AUDIO: (7, 8)})
    assert found.tolist() == [0, 1, 1, 2, 2, 0]
    with pytest.raises(ValueError, match="9 stands for IMAGE and for VIDEO"):
        tags.modality([9], {Modality.IMAGE: 9, Modality.VIDEO: [8, 9]})


def test_quotas_have_the_servers_limits() -> None:
    made = tags.quotas({Syntax.CALL: 3, 255: 1})
    assert [(quota.token_class, quota.tokens) for quota in made] == [(11, 3), (255, 1)]
    for wrong, text in (({256: 1}, "class is 256"), ({-1: 1}, "class is -1"), ({1: 0}, "quota of class 1 is 0")):
        with pytest.raises(ValueError, match=text):
            tags.quotas(wrong)
    with pytest.raises(ValueError, match="17 classes; at most 16"):
        tags.quotas(dict.fromkeys(range(17), 1))


# ---- Against the server ----------------------------------------------------------------------------------------------

K = 32
PLAIN = ctkvr.Selection(k=K, source="exact", sink_tokens=0, window_tokens=0, dense_below_tokens=0)


def opened(client: Any, policies: session_pb2.Policies) -> Any:
    options = session_pb2.SessionOptions(tags=True, policies=policies)
    return client.open_session(**GEOMETRY, format="f32", selection=PLAIN, options=options)


def logits_of(tokens: Tokens, position: int) -> npt.NDArray[np.float64]:
    """[q_heads, tokens], scaled."""
    keys = np.repeat(tokens.keys.astype(np.float64), 2, axis=1)
    logits: npt.NDArray[np.float64] = np.einsum("hd,thd->ht", tokens.queries[position], keys) / math.sqrt(HEAD_DIM)
    return logits


def ranking(logits: npt.NDArray[np.float64], kv_head: int, factors: Any = 1) -> list[int]:
    """Tokens by the summed softmax of the KV head's two query heads, times `factors` [tokens], best first."""
    own = logits[2 * kv_head : 2 * kv_head + 2]
    shares = np.exp(own - own.max(axis=1, keepdims=True))
    order: list[int] = np.argsort(-(shares / shares.sum(axis=1, keepdims=True)).sum(axis=0) * factors).tolist()
    return order


def test_a_quota_of_a_syntax_class_is_filled_first(client: Any, rng: np.random.Generator) -> None:
    text = PROGRAM * 4
    encoded = tokenizer_of(PROGRAM).encode(text)
    classes = tags.python_ast(text, encoded.offsets)
    tokens = Tokens(rng, len(encoded.ids))
    wanted = {Syntax.DEFINITION: 5, Syntax.NUMBER: 3}
    with opened(client, session_pb2.Policies(class_quotas=tags.quotas(wanted))) as session:
        session.append(0, tokens.keys, tokens.values, tags=ctkvr.Tags(classes=classes))
        last = len(encoded.ids) - 1
        answer = session.retrieve(0, tokens.queries[last], answer="ids")
        moved = False
        for kv_head in range(KV_HEADS):
            order = ranking(logits_of(tokens, last), kv_head)
            first = [token for kind, n in wanted.items() for token in [t for t in order if classes[t] == kind][:n]]
            rest = [token for token in order if token not in first][: K - len(first)]
            assert set(answer.ids[0, kv_head].tolist()) == {*first, *rest}
            moved = moved or not set(first) <= set(order[:K])
        assert moved  # else the plain ranking would pass too


@pytest.mark.parametrize("boost", [0.5, 100.0])
def test_term_weights_move_the_ranking(client: Any, rng: np.random.Generator, boost: float) -> None:
    weights = tags.tfidf(rng.integers(0, 30, 600) ** 2 // 30, 64)
    tokens = Tokens(rng, 600)
    with opened(client, session_pb2.Policies(tag_weight_boost=boost)) as session:
        session.append(0, tokens.keys, tokens.values, tags=ctkvr.Tags(weights=weights))
        answer = session.retrieve(0, tokens.queries[599], answer="ids")
        logits = logits_of(tokens, 599)
        factors = 1 + boost * weights.astype(np.float64)  # a term of log(1 + boost * weight)
        boosted = [set(ranking(logits, kv_head, factors)[:K]) for kv_head in range(KV_HEADS)]
        assert [set(ids.tolist()) for ids in answer.ids] == boosted
        assert boosted != [set(ranking(logits, kv_head)[:K]) for kv_head in range(KV_HEADS)]


def test_segments_and_modalities_get_their_share(client: Any, rng: np.random.Generator) -> None:
    tokens = Tokens(rng, 700)
    image = tags.modality(np.where(np.arange(700) % 90 < 5, 9, 1), {Modality.IMAGE: 9})
    for classes, number in ((tags.segments(100, 700), 0), (image, Modality.IMAGE)):
        with opened(client, session_pb2.Policies(class_quotas=tags.quotas({number: 20}))) as session:
            session.append(0, tokens.keys, tokens.values, tags=ctkvr.Tags(classes=classes))
            for ids in session.retrieve(0, tokens.queries[699], answer="ids").ids:
                assert np.count_nonzero(classes[ids] == number) >= 20
