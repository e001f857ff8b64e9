# SPDX-License-Identifier: Apache-2.0
"""The service as gRPC sees it: its calls, read from the contract, and how a channel to it is set up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory
from google.protobuf.message import Message

from ctkvr.v1 import cache_pb2

# gRPC's own default of 4 MiB is too small for rows; the server's limit on the rows of a reply is 256 MiB, this leaves
# room beside them.
_RECEIVE_BYTES_MAX = 320 << 20

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", _RECEIVE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),  # the server's limit is the one that counts
    # gRPC waits a second before it dials again, longer than all attempts of a retried call together.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
    ("grpc.use_local_subchannel_pool", 1),  # two clients of one process are two connections
]


@dataclass(frozen=True)
class Method:
    """One call of the service."""

    path: str
    serialize: Callable[[Message], bytes]
    deserialize: Callable[[bytes], Any]


def _methods() -> dict[str, Method]:
    service = cache_pb2.DESCRIPTOR.services_by_name["Cache"]
    return {
        method.name: Method(
            f"/{service.full_name}/{method.name}",
            lambda message: message.SerializeToString(),
            message_factory.GetMessageClass(method.output_type).FromString,
        )
        for method in service.methods
    }


METHODS = _methods()
