# SPDX-License-Identifier: Apache-2.0
"""Both clients behind the blocking one's interface, so that each test holds for both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import ctkvr
import ctkvr.aio

Connect = Callable[..., Any]


class Blocked:
    """Calls the methods of an object of ctkvr.aio and waits for them."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop

    def _wrap(self, value: Any) -> Any:
        if inspect.isawaitable(value):
            value = self._loop.run_until_complete(value)
        if isinstance(value, (ctkvr.aio.Client, ctkvr.aio.Session, ctkvr.aio.DecodeStream)):
            return Blocked(value, self._loop)
        return value

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value
        return lambda *args, **kwargs: self._wrap(value(*args, **kwargs))

    def __enter__(self) -> Blocked:
        self._wrap(self._inner.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._wrap(self._inner.__aexit__(*error))


def connector(kind: str, loop: asyncio.AbstractEventLoop) -> Connect:
    """`connect` of the client of that kind: "blocking" or "asyncio"."""
    if kind == "blocking":
        return ctkvr.connect
    return lambda *args, **kwargs: Blocked(loop.run_until_complete(ctkvr.aio.connect(*args, **kwargs)), loop)
