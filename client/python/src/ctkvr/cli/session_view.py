# SPDX-License-Identifier: Apache-2.0
"""What `ctkvr inspect` shows of a session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from google.protobuf import json_format
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ctkvr import codec
from ctkvr.cli.top_view import NONE, needle_share_of, printable, recall_of, share
from ctkvr.v1 import session_pb2, tensor_pb2


def render(info: session_pb2.SessionInfo) -> RenderableType:
    """Facts, memory, layers."""
    return Group(_facts(info), _memory(info.memory), _layers(info))


def _facts(info: session_pb2.SessionInfo) -> RenderableType:
    options, geometry = info.options, info.options.geometry
    table = Table.grid(padding=(0, 2))
    rows = {
        "session": printable(info.session_id),
        "epoch": str(info.epoch),
        "geometry": f"{geometry.layers} layers, {geometry.q_heads} query heads on {geometry.kv_heads} KV heads, "
        f"head_dim {geometry.head_dim}, value_dim {geometry.value_dim or geometry.head_dim}, "
        f"{_name(tensor_pb2.DType, 'DTYPE_', geometry.dtype)}",
        "format": _name(tensor_pb2.Format, "FORMAT_", options.format),
        "token limit": f"{options.token_limit:,}",
        "lease": f"{info.lease_remaining_seconds} of {options.lease_seconds} s",
        "selection": _settings(asdict(codec.decode_selection(options.selection))),
        "policies": _settings(json_format.MessageToDict(options.policies, preserving_proto_field_name=True)) or "none",
        "traffic": f"{info.appended_tokens:,} tokens appended, {info.retrievals:,} positions answered, over layers",
        "quality": f"recall {share(recall_of(info.truth))}, needle share {share(needle_share_of(info.truth))}, "
        f"attention kept {share(info.truth.mass if info.truth.samples else None)}, of {info.truth.samples:,} repeated",
    }
    for name, text in rows.items():
        table.add_row(Text(name, style="bold"), Text(text))
    return table


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)


def _memory(memory: session_pb2.SessionMemory) -> RenderableType:
    table = Table(title="memory", title_justify="left")
    columns = {
        "reserved": memory.reserved_bytes,
        "held": memory.held_bytes,
        "pages": memory.page_bytes,
        "not coded": memory.raw_bytes,
        "index": memory.index_bytes,
        "state": memory.state_bytes,
        "slot tables": memory.slot_table_bytes,
        "tags": memory.tag_bytes,
    }
    for name in (*columns, "a token and head", "of float32"):
        table.add_column(name, justify="right")
    sizes = (decimal(value) for value in columns.values())
    table.add_row(*sizes, f"{memory.bytes_per_token_head:.1f} bytes", share(memory.share_of_f32))
    return table


def _layers(info: session_pb2.SessionInfo) -> RenderableType:
    table = Table(title="layers", title_justify="left")
    for name in ("layer", "tokens", "in lists", "in clusters", "centroids", "served", "because", "recall"):
        table.add_column(name, justify="left" if name in ("served", "because") else "right")
    for name in ("needle share", "worst head", "strength"):
        table.add_column(name, justify="right")
    for layer in info.layers:
        if layer.absent:
            table.add_row(str(layer.layer), "absent")
            continue
        truth = layer.truth
        worst = f"{truth.worst_head}: {truth.worst_head_share:.3f}" if truth.HasField("worst_head") else NONE
        table.add_row(
            str(layer.layer),
            f"{layer.length:,}",
            f"{layer.indexed_length:,}",
            f"{layer.clustered_length:,}",
            f"{layer.query_centroids:,}",
            _name(session_pb2.Source, "SOURCE_", layer.served),
            _name(session_pb2.SelectionReason, "SELECTION_REASON_", layer.reason).replace("_", " "),
            share(recall_of(truth)),
            share(needle_share_of(truth)),
            worst,
            str(layer.strength),
        )
    return table


def _name(enum: Any, prefix: str, number: int) -> str:
    return codec.enum_name(enum, prefix, number) if number else NONE
