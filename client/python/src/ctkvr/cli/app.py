# SPDX-License-Identifier: Apache-2.0
"""The commands and their options. typer makes them from the functions' signatures, and prints errors as rich does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import grpc
import typer
from google.protobuf import json_format
from rich.console import Console
from rich.live import Live

import ctkvr
from ctkvr.cli import session_view, top_view
from ctkvr.cli.looks import Looks, looks_of_session, looks_of_trace
from ctkvr.cli.trace import read_trace
from ctkvr.errors import CtkvrError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__, add_completion=False)
plot_app = typer.Typer(no_args_is_help=True, help="Pictures, as PNG or SVG.")
app.add_typer(plot_app, name="plot")


@dataclass(frozen=True)
class Target:
    """Which server, and how."""

    address: str
    tls_ca: Path | None
    tls_certificate: Path | None
    tls_key: Path | None

    def connect(self) -> ctkvr.Client:
        """BadParameter: files of TLS that do not go together."""
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise typer.BadParameter("--tls-certificate and --tls-key go together: give both or none")
        if self.tls_ca is None:
            if self.tls_key is not None:
                raise typer.BadParameter("--tls-key needs --tls-ca")
            return ctkvr.connect(self.address)
        key = self.tls_key.read_bytes() if self.tls_key else None
        certificate = self.tls_certificate.read_bytes() if self.tls_certificate else None
        credentials = grpc.ssl_channel_credentials(self.tls_ca.read_bytes(), key, certificate)
        return ctkvr.connect(self.address, credentials=credentials)


@app.callback()
def options(
    context: typer.Context,
    address: Annotated[str, typer.Option(envvar="CTKVR_ADDRESS", help="host:port of the server.")] = "127.0.0.1:7420",
    tls_ca: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, envvar="CTKVR_TLS_CA", help="PEM file of who signed the server's."),
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, envvar="CTKVR_CLIENT_CERTIFICATE", help="PEM file of this client."),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, envvar="CTKVR_CLIENT_KEY", help="PEM file of its private key."),
    ] = None,
) -> None:
    """Looks at a ctkvr server: sessions, throughput, recall, memory, and what heads look at."""
    context.obj = Target(address, tls_ca, tls_certificate, tls_key)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What can go wrong outside this program is a line and exit code 1."""
    try:
        yield
    except (CtkvrError, OSError, ValueError, IndexError) as error:
        typer.echo(f"ctkvr: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def top(
    context: typer.Context,
    metrics: Annotated[
        str, typer.Option(help="URL of the server's metrics page; empty: do without.", envvar="CTKVR_METRICS_URL")
    ] = "http://127.0.0.1:9464/metrics",
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 2.0,
    rows: Annotated[int, typer.Option(min=1, help="Sessions to show, the busiest first.")] = 20,
    detail: Annotated[
        bool, typer.Option("--detail", help="Recall and retrievals of each session too. This renews their leases.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print once, end.")] = False,
) -> None:
    """A live view: throughput, quality and memory of the server, and its busiest sessions. Ctrl-C ends it."""
    view = top_view.View(address=context.obj.address, metrics_url=metrics, rows=rows, detail=detail)
    with _told(), context.obj.connect() as client:
        view.look(client)
        if once:
            time.sleep(interval)
            view.look(client)
            Console().print(view.render())
            return
        if not Console().is_terminal:
            raise typer.BadParameter("the live view needs a terminal; --once does without")
        with contextlib.suppress(KeyboardInterrupt), Live(view.render(), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                view.try_look(client)
                live.update(view.render(), refresh=True)


@app.command()
def inspect(
    context: typer.Context,
    session: Annotated[str, typer.Argument(help="Id, as `ctkvr top` shows it.")],
    json: Annotated[bool, typer.Option("--json", help="The message SessionInfo as JSON.")] = False,
) -> None:
    """A session in detail: geometry, settings, memory, and each layer's lengths and quality. Renews its lease."""
    with _told(), context.obj.connect() as client:
        info = client.attach_session(session).info()
    if json:
        typer.echo(json_format.MessageToJson(info, preserving_proto_field_name=True))
    else:
        Console().print(session_view.render(info))


_Layer = Annotated[int | None, typer.Option(min=0, help="Of a trace: needed where it has several. Of a session: 0.")]
_Out = Annotated[Path, typer.Option("--out", "-o", help="Picture to write: .png, .svg or .pdf.")]
_Trace = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="Folder of a recorded session (ctkvrd --record), or of one layer."),
]
_Every = Annotated[int, typer.Option(min=1, help="Every n-th decoded position only.")]


@plot_app.command()
def positions(
    context: typer.Context,
    out: _Out,
    trace: _Trace = None,
    session: Annotated[str | None, typer.Option(help="Id of a live session. Renews its lease.")] = None,
    queries: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help=".npy [positions, q_heads, head_dim] of a session's last tokens."
        ),
    ] = None,
    layer: _Layer = None,
    every: _Every = 1,
) -> None:
    """Which positions heads look at: from a trace, or from a live session by asking it the given queries."""
    if (trace is None) == (session is None):
        raise typer.BadParameter("give --trace or --session, one of them")
    if (session is None) != (queries is None):
        raise typer.BadParameter("--session needs --queries: a server does not keep them")
    from ctkvr.cli import plots  # matplotlib takes longer to import than all else

    with _told():
        looks: Looks
        if trace is not None:
            looks = looks_of_trace(read_trace(trace, layer), every)
        else:
            assert session is not None  # noqa: S101 (for mypy)
            assert queries is not None  # noqa: S101
            with context.obj.connect() as client:
                looks = looks_of_session(client.attach_session(session), layer or 0, queries, every)
        plots.save(plots.draw_positions(looks), out)


@plot_app.command()
def recall(out: _Out, trace: _Trace = None, layer: _Layer = None, every: _Every = 1) -> None:
    """Recall of the exact best k over decode position, and the needles found and missed, from a recorded session."""
    if trace is None:
        raise typer.BadParameter("--trace is needed")
    from ctkvr.cli import plots

    with _told():
        plots.save(plots.draw_recall(plots.recall_of(read_trace(trace, layer), every)), out)
