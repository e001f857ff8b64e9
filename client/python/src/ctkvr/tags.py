# SPDX-License-Identifier: Apache-2.0
"""Taggers: weights and classes of tokens for Session.append(tags=...), from what a tokenizer says of a text.

    encoded = tokenizer(text, return_offsets_mapping=True)  # any fast tokenizer of Hugging Face
    classes = ctkvr.tags.python_ast(text, encoded["offset_mapping"])
    policies = Policies(class_quotas=ctkvr.tags.quotas({ctkvr.tags.Syntax.DEFINITION: 32}))
    session.append(layer, keys, values, tags=ctkvr.Tags(classes=classes))

The session is opened with SessionOptions.tags and the policies that read them. Each tagger returns an array of as many
elements as there are tokens: classes uint32 below 256, weights float32 of 0 or more.
"""

from __future__ import annotations

import ast
import enum
import keyword
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ctkvr.v1 import session_pb2

__all__ = ["Modality", "Syntax", "TfIdf", "modality", "python_ast", "quotas", "segments", "tfidf"]

CLASSES_MAX = 256  # of Chunk.classes
QUOTAS_MAX = 16  # of Policies.class_quotas

Classes = npt.NDArray[np.uint32]
Weights = npt.NDArray[np.float32]
Class = TypeVar("Class", bound=int)


def quotas(tokens: Mapping[Class, int]) -> list[session_pb2.ClassQuota]:
    """Policies.class_quotas: of each class, so many of the k tokens are chosen before all others.

    ValueError: more than 16 classes, a class above 255, or a quota below 1.
    """
    if len(tokens) > QUOTAS_MAX:
        raise ValueError(f"tokens has {len(tokens)} classes; at most {QUOTAS_MAX} may have quotas")
    for token_class, quota in tokens.items():
        if not 0 <= token_class < CLASSES_MAX:
            raise ValueError(f"class is {int(token_class)}; classes are 0 to {CLASSES_MAX - 1}")
        if quota < 1:
            raise ValueError(f"the quota of class {int(token_class)} is {quota}; it is at least 1")
    return [session_pb2.ClassQuota(token_class=int(number), tokens=quota) for number, quota in tokens.items()]


# ---- Syntax ----------------------------------------------------------------------------------------------------------


class Syntax(enum.IntEnum):
    """Classes of python_ast."""

    OTHER = 0  # whitespace, special tokens, what is no Python
    COMMENT = 1
    DOCSTRING = 2
    STRING = 3
    NUMBER = 4
    KEYWORD = 5
    OPERATOR = 6  # and brackets
    NAME = 7  # that is none of the following
    ATTRIBUTE = 8
    PARAMETER = 9  # of a definition, and the keyword of an argument
    IMPORT = 10  # every name of an import statement
    CALL = 11  # the name that is called, of a decorator too
    DEFINITION = 12  # the name of a function or class where it is defined


_FENCE = re.compile(r"^[ \t]*```[ \t]*(?:python|py|python3)\b[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_LEXICAL = {
    tokenize.COMMENT: Syntax.COMMENT,
    tokenize.STRING: Syntax.STRING,
    tokenize.NUMBER: Syntax.NUMBER,
    tokenize.OP: Syntax.OPERATOR,
    # Parts of an f-string, tokens of their own from Python 3.12 on.
    **{
        getattr(tokenize, name): Syntax.STRING
        for name in ("FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END")
        if hasattr(tokenize, name)
    },
}


def python_ast(text: str, offsets: npt.ArrayLike, *, fenced: bool = False) -> Classes:
    """The Syntax class of each token of a Python text, [tokens].

    offsets [tokens, 2]: begin and end of each token in characters of `text`; begin == end for special tokens. A token
    has the class of most of its characters, whitespace left out; of as many, the lower one. Where the text does not
    parse, as when it is cut, classes come from its lexical tokens alone, as far as those go. fenced: only
    what stands in Markdown blocks ```python is Python, each block for itself.

    ValueError: offsets of another shape, or outside the text.
    """
    bounds = np.asarray(offsets)
    if bounds.size == 0:
        return np.zeros(0, np.uint32)
    if bounds.ndim != 2 or bounds.shape[1] != 2 or bounds.dtype.kind not in "iu":
        raise ValueError(f"offsets has dims {list(bounds.shape)} of {bounds.dtype}; integers [tokens, 2] are expected")
    begins, ends = bounds[:, 0].astype(np.int64), bounds[:, 1].astype(np.int64)
    if begins.min() < 0 or ends.max() > len(text) or np.any(begins > ends):
        raise ValueError(f"offsets are not all begin <= end within the text's {len(text)} characters")
    characters = np.zeros(len(text), np.uint8)
    spans = [match.span(1) for match in _FENCE.finditer(text)] if fenced else [(0, len(text))]
    for begin, end in spans:
        _Source(text[begin:end], characters[begin:end]).tag()
    counts = np.zeros((len(Syntax), len(bounds)), np.int64)
    for syntax in Syntax:
        if syntax != Syntax.OTHER:  # has no vote
            upto = np.concatenate(([0], np.cumsum(characters == syntax)))
            counts[syntax] = upto[ends] - upto[begins]
    classes: Classes = np.argmax(counts, axis=0).astype(np.uint32)
    return classes


class _Source:
    """One Python text, and a class for each of its characters, which tag() writes to a view of the caller's."""

    def __init__(self, text: str, characters: npt.NDArray[np.uint8]) -> None:
        self._text = text
        self._characters = characters
        self._lines: list[str] = _LINE.findall(text)
        self._begins: list[int] = [0, *np.cumsum([len(line) for line in self._lines], dtype=np.int64).tolist()]

    def tag(self) -> None:
        self._tag_lexically()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that are none: it is not our program
            try:
                tree = ast.parse(self._text)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                return
        for node in ast.walk(tree):
            self._refine(node)

    def _tag_lexically(self) -> None:
        defines = False
        try:
            for token in tokenize.generate_tokens(iter([*self._lines, ""]).__next__):
                syntax = _LEXICAL.get(token.type)
                if token.type == tokenize.NAME:
                    name = Syntax.DEFINITION if defines else Syntax.NAME
                    syntax = Syntax.KEYWORD if keyword.iskeyword(token.string) else name
                    defines = token.string in ("def", "class")
                if syntax is not None:
                    begin, end = self._place(*token.start), self._place(*token.end)
                    self._characters[begin:end] = syntax
        except (tokenize.TokenError, SyntaxError):
            return

    def _refine(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                self._replace(*self._span(node.body[0]), Syntax.STRING, Syntax.DOCSTRING)
            if not isinstance(node, ast.Module):
                for decorator in node.decorator_list:
                    self._name(decorator, Syntax.CALL)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._replace(*self._span(node), Syntax.NAME, Syntax.IMPORT)
        elif isinstance(node, ast.Call):
            self._name(node.func, Syntax.CALL)
        elif isinstance(node, ast.Attribute):
            self._name(node, Syntax.ATTRIBUTE)
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg is not None:
            begin, _ = self._span(node)
            self._replace(begin, begin + len(node.arg), Syntax.NAME, Syntax.PARAMETER)

    def _name(self, node: ast.expr, syntax: Syntax) -> None:
        """Classes the name that an expression ends with, unless something outer has classed it."""
        if isinstance(node, (ast.Name, ast.Attribute)):
            _, end = self._span(node)
            begin = end - len(node.id if isinstance(node, ast.Name) else node.attr)
            self._replace(begin, end, Syntax.NAME, syntax)

    def _replace(self, begin: int, end: int, old: Syntax, new: Syntax) -> None:
        part = self._characters[begin:end]
        part[part == old] = new

    def _span(self, node: Any) -> tuple[int, int]:
        """In characters of the text; ast counts columns in bytes of UTF-8."""
        return self._byte_place(node.lineno, node.col_offset), self._byte_place(node.end_lineno, node.end_col_offset)

    def _byte_place(self, line: int, column: int) -> int:
        text = self._lines[line - 1]
        return self._place(line, column if text.isascii() else len(text.encode()[:column].decode()))

    def _place(self, line: int, column: int) -> int:
        """The last line's end counts as a line of its own, as tokenize has it."""
        begin = self._begins[min(line, len(self._begins)) - 1]
        return min(begin + column, len(self._text))


# ---- Terms -----------------------------------------------------------------------------------------------------------


class TfIdf:
    """Term weights of tokens; a term is a token id, a document a segment of the text.

    A term that occurs n times in its segment, and in d of the corpus's N segments, weighs
    (1 + ln n) * ln((1 + N) / (1 + d)), over the largest such weight of the corpus: 0 for what is everywhere. (Salton
    and Buckley, 1988, with logarithmic frequencies, and one smoothing segment that holds every term.) scikit-learn has
    the like, and would bring scipy along for these few lines.
    """

    def __init__(self, token_ids: npt.ArrayLike, segment_tokens: int = 1024) -> None:
        """The corpus, as token ids [tokens]. ValueError: segment_tokens below 1, or ids that are no row of integers."""
        if segment_tokens < 1:
            raise ValueError(f"segment_tokens is {segment_tokens}; it is at least 1")
        self.segment_tokens = segment_tokens
        ids = _ids(token_ids)
        parts = list(self._segments(ids))
        self._count = len(parts)
        self._terms, self._found_in = np.unique(
            np.concatenate([np.unique(part) for part in parts]) if parts else ids, return_counts=True
        )
        self._largest = 1.0
        self._largest = float(self.weights(ids).max(initial=0.0)) or 1.0

    def weights(self, token_ids: npt.ArrayLike) -> Weights:
        """Of tokens [tokens] of the corpus, from 0 to 1; or of others, generated ones say, which may weigh more."""
        found = [self._weights(part) for part in self._segments(_ids(token_ids))]
        return np.concatenate(found).astype(np.float32) if found else np.zeros(0, np.float32)

    def _segments(self, ids: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        return (ids[begin : begin + self.segment_tokens] for begin in range(0, len(ids), self.segment_tokens))

    def _weights(self, segment: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        terms, places, counts = np.unique(segment, return_inverse=True, return_counts=True)
        known = np.isin(terms, self._terms)
        found_in = np.zeros(len(terms), np.int64)
        found_in[known] = self._found_in[np.searchsorted(self._terms, terms[known])]
        weights = (1 + np.log(counts)) * np.log((1 + self._count) / (1 + found_in)) / self._largest
        return np.asarray(weights[places.reshape(-1)], np.float64)


def tfidf(token_ids: npt.ArrayLike, segment_tokens: int = 1024) -> Weights:
    """TfIdf of a text by itself: token ids [tokens], weights [tokens] from 0 to 1."""
    return TfIdf(token_ids, segment_tokens).weights(token_ids)


def _ids(token_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"token_ids has dims {list(ids.shape)} of {ids.dtype.name}; integers [tokens] are expected")
    return ids.astype(np.int64)


# ---- Segments and modalities -----------------------------------------------------------------------------------------


def segments(segment_tokens: int, tokens: int, first_position: int = 0) -> Classes:
    """The number of each token's segment as its class, [tokens]: quotas then give a segment its share.

    The server does not search segments first (Chunk.segments is refused, because it lost needles): this is for
    segments that must not be forgotten, instructions at the beginning say. There are 256 classes, so `segment_tokens`
    of a text is at least a 256th of it.

    ValueError: segment_tokens below 1, or so small that a token's segment would have a number above 255.
    """
    if segment_tokens < 1:
        raise ValueError(f"segment_tokens is {segment_tokens}; it is at least 1")
    end = first_position + tokens
    if end > CLASSES_MAX * segment_tokens:
        raise ValueError(
            f"{end} tokens in segments of {segment_tokens} need more than {CLASSES_MAX} classes; "
            f"segments of {-(-end // CLASSES_MAX)} do not"
        )
    return (np.arange(first_position, end) // segment_tokens).astype(np.uint32)


class Modality(enum.IntEnum):
    """Classes of modality."""

    TEXT = 0
    IMAGE = 1
    AUDIO = 2
    VIDEO = 3


def modality(token_ids: npt.ArrayLike, placeholders: Mapping[Modality, int | Iterable[int]]) -> Classes:
    """The Modality of each token [tokens], by the ids that stand for what is no text.

    placeholders: {Modality.IMAGE: config.image_token_id}, an id or several each. ValueError: an id of two modalities.
    """
    ids = _ids(token_ids)
    classes = np.full(len(ids), Modality.TEXT, np.uint32)
    seen: dict[int, Modality] = {}
    for kind, given in placeholders.items():
        for token_id in [given] if isinstance(given, (int, np.integer)) else given:
            if seen.setdefault(int(token_id), kind) != kind:
                raise ValueError(f"token id {token_id} stands for {seen[int(token_id)].name} and for {kind.name}")
            classes[ids == token_id] = kind
    return classes
