# SPDX-License-Identifier: Apache-2.0
"""Methods by name.

full              full attention over keys and values as they came
exact             the exact best k
sliding_window    the last k; with k = 0 sinks, window and tail alone
NAME              a comparison system: one of selectors.comparison.BUILDERS, its "ctkvr" as query_centroids
ctkvr             the server's default for a session, coded as k8v4
ctkvr-SOURCE      a source by name: ctkvr-sketch, ctkvr-exact, ctkvr-query_centroids, ...
...@FORMAT        stored otherwise: ctkvr-dense@f16, ctkvr-sketch@k6v4, ...
...+remainder     with what is not chosen estimated
...:NAME=VALUE    and a setting of ctkvr.Selection, ServerSettings or SessionOptions: ctkvr-sketch:candidate_tokens=1024
MODULE:CLASS      anyone's own Selector, made by CLASS(k): mine.selector:Strided (also a path: mine/selector.py:Strided)
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import ctkvr
from ctkvr.v1 import session_pb2

from ctkvr_eval.evaluate import Full
from ctkvr_eval.selectors.base import Selector
from ctkvr_eval.selectors.comparison import BUILDERS, ComparisonSelector
from ctkvr_eval.selectors.server import ServerSelector, ServerSettings

# The article's index in this process; the bare name is the server's.
_COMPARED = {name if name != "ctkvr" else "query_centroids": name for name in BUILDERS}
_SERVER = re.compile(
    r"ctkvr(-(?P<source>\w+))?(@(?P<format>\w+))?(?P<remainder>\+remainder)?(?P<settings>(:\w+=[\w.]+)*)"
)


def needs_server(name: str) -> bool:
    """Whether make() takes a client for it."""
    return _SERVER.fullmatch(name) is not None


def make(name: str, k: int, client: ctkvr.Client | None = None) -> Selector:
    """ValueError: no such method."""
    if name == "full":
        return Full()
    bare = name.removesuffix("+remainder")
    if bare in _COMPARED:
        return ComparisonSelector(_COMPARED[bare], k, remainder=bare != name)
    found = _SERVER.fullmatch(name)
    if found is not None:
        if client is None:
            raise ValueError(f"{name} needs a server")
        return ServerSelector(name, client, parse(found), k)
    module, colon, class_ = name.rpartition(":")
    if not colon or "=" in class_:
        raise ValueError(f"method is {name!r}; it is one of full, {', '.join(_COMPARED)}, ctkvr..., or MODULE:CLASS")
    selector: Selector = getattr(_module(module), class_)(k)
    return selector


def parse(found: re.Match[str]) -> ServerSettings:
    """The settings that a name's parts say. ValueError: an unknown one."""
    settings = ServerSettings(source=found["source"], remainder=found["remainder"] is not None)
    if found["format"]:
        settings = replace(settings, format=found["format"])
    selection: dict[str, Any] = {}
    for part in filter(None, found["settings"].split(":")):
        name, _, text = part.partition("=")
        value = _value(text)
        if name in {field.name for field in fields(ctkvr.Selection)}:
            selection[name] = value
        elif name in {field.name for field in fields(ServerSettings)}:
            settings = replace(settings, **{name: value})
        elif name in session_pb2.SessionOptions.DESCRIPTOR.fields_by_name:
            options = settings.options or session_pb2.SessionOptions()
            setattr(options, name, value)
            settings = replace(settings, options=options)
        else:
            raise ValueError(f"{name} is no setting of ctkvr.Selection, ServerSettings or SessionOptions")
    return replace(settings, selection=ctkvr.Selection(**selection))


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


def _module(name: str) -> Any:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    if spec is None or spec.loader is None:
        raise ValueError(f"{name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
