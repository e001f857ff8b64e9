# SPDX-License-Identifier: Apache-2.0
"""What `tests/eval/run` runs when nothing is named."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """A method on a text; text "": on those that are named."""

    text: str
    method: str
    k: int


# What the default is judged by, and what it is judged against.
_COMPARED = (
    ("sliding_window", 0),
    ("exact", 256),
    ("exact", 128),
    ("exact", 64),
    ("ctkvr-dense@f16", 256),
    ("ctkvr-dense@k8v8", 256),
    ("ctkvr-dense@k8v4", 256),
    ("ctkvr-dense@k6v4", 256),
    ("ctkvr", 256),
    ("ctkvr+remainder", 256),
    ("ctkvr+remainder", 128),
    ("ctkvr+remainder", 64),
    ("ctkvr-sketch", 256),
    ("ctkvr-sketch+remainder", 256),
    ("ctkvr-sketch:first_planes=1", 256),
    ("ctkvr-sketch:first_planes=1+remainder", 256),
    ("ctkvr-sketch@k6v4+remainder", 256),
    ("ctkvr-query_centroids", 256),
    ("ctkvr-query_centroids+remainder", 256),
)
EVERYTHING = [Run(text, method, k) for text in ("records", "code", "prose", "topics") for method, k in _COMPARED]
