# SPDX-License-Identifier: Apache-2.0
"""Every source of ctkvr, through a running ctkvrd: it stores the prompt, chooses, attends and estimates the rest."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import ctkvr
import numpy as np
from ctkvr.answer import Source
from ctkvr.v1 import session_pb2

from ctkvr_eval import attention
from ctkvr_eval.attention import Floats, Part
from ctkvr_eval.selectors.base import Attended, Task, tail_part

_POSITIONS = 64  # a query message


class Daemon:
    """A ctkvrd process of our own, with the flags given behind those that an evaluation needs."""

    def __init__(self, program: Path, flags: Sequence[str] = (), arena: str = "4GiB") -> None:
        fixed = ("--listen_address=127.0.0.1:0", "--metrics_address=", "--log_format=json", f"--arena_bytes={arena}")
        self._process = subprocess.Popen([str(program), *fixed, *flags], stderr=subprocess.PIPE, text=True)
        self.address = self._serving()
        # Else its log would fill the pipe, and the server wait for room in it.
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        assert self._process.stderr is not None
        for _ in self._process.stderr:
            pass

    def _serving(self) -> str:
        assert self._process.stderr is not None
        lines = []
        for line in self._process.stderr:
            lines.append(line)
            if '"event":"serving"' in line:
                address: str = json.loads(line)["listen_address"]
                return address
        raise RuntimeError(f"ctkvrd ended: {''.join(lines)}")

    def stop(self) -> None:
        """Drains it."""
        self._process.terminate()
        self._process.wait()


def find_program() -> Path:
    """CTKVRD, or what a build of this repository made. FileNotFoundError: there is none."""
    given = os.environ.get("CTKVRD")
    root = Path(__file__).resolve().parents[4]
    candidates = [Path(given)] if given else [root / f"build/{name}/server/ctkvrd" for name in ("release", "debug")]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"no ctkvrd at {', '.join(map(str, candidates))}: build it, or name it in CTKVRD")


@dataclass(frozen=True)
class ServerSettings:
    """How a session is opened and asked. None: the server's default."""

    source: str | None = None
    format: str = "k8v4"
    remainder: bool = False
    selection: ctkvr.Selection = field(default_factory=ctkvr.Selection)
    tokens_per_cluster: int = 16  # kept where the remainder is asked for
    centroids: int = 256  # of source "query_centroids"
    list_tokens: int = 512
    options: session_pb2.SessionOptions | None = None  # laid under all this: settings that have no argument
    # The tail goes to the server too, so many positions at a time; 0: it holds the prompt, and the tail is attended
    # here. `maintain`: after each such block its tokens are taken into the index, else they stay always attended.
    live: int = 0
    maintain: bool = True


class ServerSelector:
    """Not thread-safe. Attention comes from the server; ids, for what is counted beside, by a second call."""

    def __init__(self, name: str, client: ctkvr.Client, settings: ServerSettings, k: int) -> None:
        self.name = name
        self.memory_bytes = 0
        self._client = client
        self._settings = settings
        self._k = k
        self._session: ctkvr.Session | None = None

    def begin(self, task: Task) -> None:
        """Opens a session."""
        settings = self._settings
        options = session_pb2.SessionOptions()
        if settings.options is not None:
            options.CopyFrom(settings.options)
        options.softmax.softmax_scale = task.scale
        sized: dict[str, Any] = {}
        if settings.source == "query_centroids":
            sized = {"centroids": settings.centroids, "list_tokens": settings.list_tokens}
        if settings.remainder and not options.HasField("key_clusters"):
            sized["tokens_per_cluster"] = settings.tokens_per_cluster
        self._task = task
        self._session = self._client.open_session(
            layers=task.layers,
            q_heads=task.q_heads,
            kv_heads=task.kv_heads,
            head_dim=task.head_dim,
            value_dim=task.value_dim,
            dtype="float32",
            format=settings.format,
            token_limit=task.prompt_tokens + 4096,
            k=self._k,
            source=cast("Source | None", settings.source),  # any that the server knows
            selection=settings.selection,
            rotation_seed=task.seed,
            maintenance="manual",
            options=options,
            **sized,
        )

    @property
    def session(self) -> ctkvr.Session:
        """The open one."""
        assert self._session is not None, "begin() comes first"
        return self._session

    def prepare(self, layer: int, keys: Floats, values: Floats, queries: Floats) -> None:
        """Appends, with the last queries for sources that keep some, and takes the tokens into the index."""
        arrays = (np.ascontiguousarray(array.transpose(1, 0, 2), np.float32) for array in (keys, values, queries))
        key_rows, value_rows, query_rows = arrays
        keeps_queries = self.session.core.keeps_queries
        self.session.append(layer, key_rows, value_rows, query_rows if keeps_queries else None)
        self.session.maintain([layer])
        if layer == self._task.layers - 1:
            self.memory_bytes = self.session.info().memory.held_bytes

    def attend(self, layer: int, queries: Floats, keys_new: Floats, values_new: Floats) -> Attended:
        """In messages of 64 positions, or of `live` ones with the tail going along."""
        task, step = self._task, self._settings.live or _POSITIONS
        found: list[Part] = []
        chosen: list[list[Any]] = []
        bytes_read = np.zeros(queries.shape[1], np.int64)
        always_from = np.full(queries.shape[1], task.free_end)
        seconds = 0.0
        for begin in range(0, queries.shape[1], step):
            block = slice(begin, min(begin + step, queries.shape[1]))
            asked = np.ascontiguousarray(queries[:, block].transpose(1, 0, 2))
            if self._settings.live:
                new = [np.ascontiguousarray(part[:, block].transpose(1, 0, 2)) for part in (keys_new, values_new)]
                self.session.append(layer, new[0], new[1], asked if self.session.core.keeps_queries else None)
            position = task.prompt_tokens + begin
            start = time.perf_counter()
            answer = self.session.retrieve(
                layer, asked, position, answer="attention", remainder=self._settings.remainder
            )
            seconds += time.perf_counter() - start
            bytes_read[block] = answer.bytes_read // len(asked)
            found.append(_merged(answer))
            if self._settings.live:
                # The tail that the index lacks, and the window before the query.
                ends = np.arange(position, position + len(asked)) + 1 - task.window
                always_from[block] = np.minimum(ends, answer.indexed_length or ends)
            chosen += self._chosen(layer, asked, position)
            if self._settings.live and self._settings.maintain:
                self.session.maintain([layer])
        whole = Part(
            np.concatenate([part.output for part in found], axis=1),
            np.concatenate([part.log_sum_exp for part in found], axis=1),
        )
        if not self._settings.live:
            whole = attention.merge([whole, tail_part(task, queries, keys_new, values_new)])
        return Attended(whole.output, bytes_read, chosen if task.observe_every else None, always_from, seconds)

    def _chosen(self, layer: int, asked: Floats, position: int) -> list[list[Any]]:
        """Ids for every Task.observe_every-th of the tail's positions among those asked from `position` on."""
        task = self._task
        if not task.observe_every:
            return []
        found: list[list[Any]] = []
        at = [p for p in range(len(asked)) if (position - task.prompt_tokens + p) % task.observe_every == 0]
        # Where only the prompt is held, all positions behind it see the same: any number go in one message.
        groups = [[p] for p in at] if self._settings.live else [at]
        for group in filter(None, groups):
            ids = self.session.retrieve(
                layer, asked[group], position + group[0], answer="ids", remainder=self._settings.remainder
            ).ids
            found += [[ids[p, set_].astype(np.int64) for set_ in range(ids.shape[1])] for p in range(len(group))]
        return found

    def end(self) -> None:
        """Closes the session."""
        if self._session is not None:
            self._session.close()
        self._session = None


def _merged(answer: ctkvr.Answer) -> Part:
    """What was attended and what was estimated, head-major."""
    parts: list[tuple[Any, Any]] = [(answer.output, answer.log_sum_exp)]
    if answer.remainder_output is not None:
        parts.append((answer.remainder_output, answer.remainder_log_sum_exp))
    output, log_sum_exp = ctkvr.merge_attention(parts)
    return Part(np.ascontiguousarray(output.transpose(1, 0, 2)), np.ascontiguousarray(log_sum_exp.T))
