# SPDX-License-Identifier: Apache-2.0
"""How far an append has come: a function of the caller's, or a bar in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

__all__ = ["Progress"]

# Called with (tokens sent, tokens in all) from any thread, it must not raise; True: a bar; None and False: nothing.
Progress: TypeAlias = Callable[[int, int], object] | Literal[True, False] | None


@contextmanager
def open_progress(progress: Progress, total: int) -> Iterator[Callable[[int], None]]:
    """Gives the function to be called with the tokens sent so far. ModuleNotFoundError: no rich for the bar."""
    if progress is True:
        with _open_bar(total) as report:
            yield report
    elif callable(progress):
        function = progress
        yield lambda done: _ignore(function(done, total))
    else:
        yield _ignore


def _ignore(_: object) -> None: ...


@contextmanager
def _open_bar(total: int) -> Iterator[Callable[[int], None]]:
    try:
        from rich.progress import Progress as Bar
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("progress=True needs rich: pip install ctkvr[progress]", name="rich") from error
    with Bar() as bar:
        task = bar.add_task("append", total=total)
        yield lambda done: bar.update(task, completed=done)
