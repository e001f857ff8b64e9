# SPDX-License-Identifier: Apache-2.0
"""Rows are cut out of replies and nothing else is: what is left, with the rows put back, is the message."""

from __future__ import annotations

import numpy as np
import pytest
from ctkvr.v1 import cache_pb2, session_pb2
from ctkvr.wire import reader
from google.protobuf.message import DecodeError

from conftest import SEED


def random_reply(rng: np.random.Generator, large: bool) -> cache_pb2.DecodeReply:
    reply = cache_pb2.DecodeReply(sequence=int(rng.integers(1 << 40)))
    reply.header.boot_id = int(rng.integers(1 << 62))
    for _ in range(int(rng.integers(1, 5))):
        item = reply.items.add(length=int(rng.integers(1 << 31)), session_epoch=int(rng.integers(1 << 62)))
        if rng.random() < 0.2:
            item.status.code = 5
            item.status.metadata["key"] = "value"
            continue
        size = int(rng.integers(1, 70000)) if large else 10
        item.answer.counts.extend(rng.integers(0, 300, 16).tolist())
        item.answer.ids = rng.bytes(100)
        if rng.random() < 0.9:
            item.answer.keys, item.answer.values = rng.bytes(size), rng.bytes(size + 1)
        item.answer.used.CopyFrom(session_pb2.Selection(top_p=0.5, k_tokens=300))
        item.answer.cache_version = int(rng.integers(1 << 62))
        item.answer.output.data = rng.bytes(200)
    return reply


@pytest.mark.parametrize("large", [False, True])
def test_what_is_left_and_the_rows_are_the_message(rng: np.random.Generator, large: bool) -> None:
    read = reader(cache_pb2.DecodeReply)
    cut = 0
    for _ in range(200):
        reply = random_reply(rng, large)
        found = read(reply.SerializeToString())
        cut += found.rows is not None
        assert found.header == reply.header
        for number, item in enumerate(reply.items):
            keys, values = found.rows_of(number)
            assert (bytes(keys), bytes(values)) == (item.answer.keys, item.answer.values), f"seed {SEED}"
            if found.rows is not None:
                assert found.message.items[number].answer.keys == b""
                if item.HasField("answer"):
                    found.message.items[number].answer.keys = item.answer.keys
                    found.message.items[number].answer.values = item.answer.values
        assert found.message == reply
    assert cut > 100 if large else cut == 0


def test_rows_are_not_copied(rng: np.random.Generator) -> None:
    reply = cache_pb2.RetrieveReply()
    reply.items.add().answer.keys = rng.bytes(1 << 16)
    data = reply.SerializeToString()
    keys, values = reader(cache_pb2.RetrieveReply)(data).rows_of(0)
    assert np.shares_memory(np.frombuffer(keys, np.uint8), np.frombuffer(data, np.uint8))
    assert len(values) == 0


def test_bytes_that_are_no_reply_are_refused(rng: np.random.Generator) -> None:
    read = reader(cache_pb2.DecodeReply)
    data = bytearray(random_reply(rng, large=True).SerializeToString() + bytes(1 << 16))
    for damaged in (
        data[: len(data) // 2],
        b"\x1a\xff\xff\xff\xff\x0f" + data,
        b"\x0b" * (1 << 16),
        b"\xff" * (1 << 16),
    ):
        with pytest.raises(DecodeError):
            read(bytes(damaged))
