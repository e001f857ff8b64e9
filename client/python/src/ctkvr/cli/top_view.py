# SPDX-License-Identifier: Apache-2.0
"""What `ctkvr top` looks at, and how it shows that."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

# Reads the text format of Prometheus, which is not as plain as it looks.
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import ctkvr
from ctkvr.errors import CtkvrError, SessionLost
from ctkvr.v1 import cache_pb2, session_pb2

_PAGE_SECONDS_MAX = 5.0
NONE = "-"


def read_page(url: str) -> dict[str, float]:
    """A metrics page: each name's values summed over its labels, and name{method}. OSError, ValueError: no page."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--metrics is {url!r}; it begins with http:// or https://")
    with urllib.request.urlopen(url, timeout=_PAGE_SECONDS_MAX) as page:  # noqa: S310 (the scheme is checked)
        text = page.read().decode()
    totals: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] += sample.value
            if "method" in sample.labels:
                totals[f"{sample.name}{{{sample.labels['method']}}}"] += sample.value
    return dict(totals)


@dataclass(frozen=True)
class Sample:
    """What one look found."""

    seconds: float  # monotonic
    info: cache_pb2.GetServerInfoReply
    entries: dict[str, cache_pb2.ListSessionsReply.Entry]  # by id
    page: dict[str, float]  # empty: there is none
    page_error: str = ""
    details: dict[str, session_pb2.SessionInfo] = field(default_factory=dict)


@dataclass
class View:
    """The last two looks, so that there are rates."""

    address: str
    metrics_url: str  # empty: none
    rows: int
    detail: bool
    before: Sample | None = None
    now: Sample | None = None
    error: str = ""  # of the last look; what is shown is older then

    def look(self, client: ctkvr.Client) -> None:
        """Asks the server and its metrics page. Raises CtkvrError."""
        info = client.server_info()
        entries = {entry.session_id: entry for entry in client.list_sessions()}
        page: dict[str, float] = {}
        page_error = ""
        if self.metrics_url:
            try:
                page = read_page(self.metrics_url)
            except (OSError, ValueError) as error:
                page_error = f"no metrics page at {self.metrics_url}: {error}"
        sample = Sample(time.monotonic(), info, entries, page, page_error)
        if self.now is not None and self.now.info.header.boot_id == info.header.boot_id:
            self.before = self.now
        else:
            self.before = None
        self.now = sample
        self.error = ""
        if self.detail:
            for entry in self._busiest():
                try:
                    sample.details[entry.session_id] = client.attach_session(entry.session_id).info()
                except SessionLost:  # ended meanwhile
                    continue

    def try_look(self, client: ctkvr.Client) -> None:
        """The same; what goes wrong is shown."""
        try:
            self.look(client)
        except CtkvrError as error:
            self.error = str(error)

    # ---- Rates -------------------------------------------------------------------------------------------------------

    def _seconds(self) -> float:
        return self.now.seconds - self.before.seconds if self.now and self.before else 0.0

    def _rate(self, name: str) -> float | None:
        """Of a counter of the page, a second; None: not known yet."""
        if self.now is None or self.before is None or name not in self.now.page or name not in self.before.page:
            return None
        return (self.now.page[name] - self.before.page[name]) / self._seconds()

    def _mean(self, name: str, method: str) -> float | None:
        """Of a histogram of seconds since the look before, in milliseconds; None: nothing was counted."""
        count, total = (self._rate(f"{name}_{part}{{{method}}}") for part in ("count", "sum"))
        return 1e3 * total / count if count and total is not None else None

    def _share(self, part: str, whole: str) -> float | None:
        page = self.now.page if self.now else {}
        return page.get(part, 0.0) / page[whole] if page.get(whole) else None

    def tokens_rate(self, session_id: str) -> float | None:
        """Of the longest layer, a second."""
        if self.now is None or self.before is None:
            return None
        now, before = (sample.entries.get(session_id) for sample in (self.now, self.before))
        if now is None or before is None or now.epoch != before.epoch:
            return None
        return (now.length_max - before.length_max) / self._seconds()

    def _busiest(self) -> list[cache_pb2.ListSessionsReply.Entry]:
        entries = self.now.entries.values() if self.now else ()
        return sorted(entries, key=lambda e: (-(self.tokens_rate(e.session_id) or 0.0), -e.held_bytes, e.session_id))[
            : self.rows
        ]

    # ---- Rendering ---------------------------------------------------------------------------------------------------

    def render(self) -> RenderableType:
        """The whole view."""
        if self.now is None:
            return Text("no look yet")
        parts: list[RenderableType] = [self._head(self.now), self._memory(self.now)]
        if self.now.page:
            parts.append(self._page_table())
        if self.now.page_error:
            parts.append(Text(self.now.page_error, style="yellow"))
        parts.append(self._sessions(self.now))
        if self.error:
            parts.append(Text(self.error, style="bold red"))
        return Group(*parts)

    def _head(self, now: Sample) -> RenderableType:
        info = now.info
        state = Text(" draining", style="bold red") if info.draining else Text("")
        head = Text.assemble(
            ("ctkvr ", "bold"),
            f"{info.version} at {self.address}: {info.backend}, {info.device}; {info.lanes} lanes, ",
            f"boot {info.header.boot_id:016x}",
        )
        return Text.assemble(head, state)

    def _memory(self, now: Sample) -> RenderableType:
        info = now.info
        held = sum(entry.held_bytes for entry in now.entries.values())
        reserved = info.arena_bytes - info.arena_free_bytes
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            "memory",
            ProgressBar(total=max(info.arena_bytes, 1), completed=reserved, width=30),
            f"{decimal(reserved)} reserved, {decimal(held)} held, of {decimal(info.arena_bytes)}",
        )
        return grid

    def _page_table(self) -> RenderableType:
        rate = self._rate
        table = Table.grid(padding=(0, 2))
        table.add_row(
            "tokens in",
            number(rate("ctkvr_appended_tokens_total"), "/s over layers"),
            "read to choose",
            size(rate("ctkvr_scanned_bytes_total"), "/s"),
            "recall",
            share(self._share("ctkvr_truth_best_chosen_total", "ctkvr_truth_best_tokens_total")),
        )
        table.add_row(
            "retrievals",
            number(rate("ctkvr_retrievals_total"), "/s over layers"),
            "rows out",
            size(rate("ctkvr_row_bytes_total"), "/s"),
            "needle share",
            share(self._share("ctkvr_truth_needles_found_total", "ctkvr_truth_needles_total")),
        )
        table.add_row(
            "a retrieval",
            number(self._mean("ctkvr_rpc_seconds", "Retrieve"), " ms"),
            "a decode step",
            number(self._mean("ctkvr_rpc_message_seconds", "Decode"), " ms"),
            "attention kept",
            share(self._share("ctkvr_truth_mass_total", "ctkvr_truth_heads_total")),
        )
        page = self.now.page if self.now else {}
        samples = page.get("ctkvr_truth_samples_total", 0.0)
        table.add_row(
            "queued", number(page.get("ctkvr_queue_items"), " calls"), "", "", f"of {samples:,.0f} retrievals repeated"
        )
        return Panel(table, title="server", title_align="left")

    def _sessions(self, now: Sample) -> RenderableType:
        shown = self._busiest()
        title = f"{len(now.entries)} sessions" + (
            f", the busiest {len(shown)}" if len(shown) < len(now.entries) else ""
        )
        columns: dict[str, Callable[[cache_pb2.ListSessionsReply.Entry], str]] = {
            "tokens": lambda e: f"{e.length_max:,}",
            "limit": lambda e: f"{e.token_limit:,}",
            "tokens/s": lambda e: number(self.tokens_rate(e.session_id)),
            "held": lambda e: decimal(e.held_bytes),
            "reserved": lambda e: decimal(e.reserved_bytes),
            "lease": lambda e: f"{e.lease_remaining_seconds} s",
        }
        if self.detail:
            columns |= {
                "retrievals": lambda e: f"{now.details[e.session_id].retrievals:,}",
                "recall": lambda e: share(recall_of(now.details[e.session_id].truth)),
                "needle share": lambda e: share(needle_share_of(now.details[e.session_id].truth)),
            }
        table = Table(title=title, title_justify="left")
        table.add_column("session", overflow="fold")
        for name in columns:
            table.add_column(name, justify="right")
        for entry in shown:
            if not self.detail or entry.session_id in now.details:
                table.add_row(Text(printable(entry.session_id)), *(column(entry) for column in columns.values()))
        return table


def printable(text: str) -> str:
    """Somebody else's text, without what a terminal would act upon."""
    return "".join(character if character.isprintable() else "?" for character in text)


def recall_of(truth: session_pb2.Truth) -> float | None:
    """None: nothing was repeated."""
    return truth.best_chosen / truth.best_tokens if truth.best_tokens else None


def needle_share_of(truth: session_pb2.Truth) -> float | None:
    """None: no needle was met."""
    return truth.needles_found / truth.needles if truth.needles else None


def number(value: float | None, unit: str = "") -> str:
    """12,345 or 1.2."""
    if value is None:
        return NONE
    return f"{value:,.0f}{unit}" if abs(value) >= 100 else f"{value:.1f}{unit}"


def size(value: float | None, unit: str = "") -> str:
    """1.2 MB."""
    return NONE if value is None else decimal(int(value)) + unit


def share(value: float | None) -> str:
    """0.987."""
    return NONE if value is None else f"{value:.3f}"
