# SPDX-License-Identifier: Apache-2.0
"""Rows decoded by torch: the contract's test vectors bit for bit, and a server's rows as numpy decodes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ctkvr
import numpy as np
import pytest
import torch
from ctkvr import LayerShape, RowDecoder
from ctkvr.v1 import tensor_pb2

from server import Server

ROOT = Path(__file__).parents[2]
CASES: list[dict[str, Any]] = json.loads((ROOT / "tests/golden/rows.json").read_text())["cases"]
DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def decoder_of(case: dict[str, Any]) -> RowDecoder:
    codec = tensor_pb2.RowCodec(
        format="FORMAT_" + case["format"].upper(),
        code_generation=case["code_generation"],
        rotation_seed=int(case["rotation_seed"]),
        key_row_bytes=len(case["tokens"][0]["key_row"]) // 2,
        value_row_bytes=len(case["tokens"][0]["value_row"]) // 2,
    )
    if case["mean"]:
        mean = tensor_pb2.Tensor(dtype="DTYPE_F32", dims=[1, case["head_dim"]], data=bytes.fromhex(case["mean"]))
        codec.key_mean.CopyFrom(mean)
    return RowDecoder(codec, LayerShape(2, 1, case["head_dim"], case["value_dim"], DTYPES[case["raw_dtype"]]))


def rows_of(case: dict[str, Any], name: str, device: str) -> torch.Tensor:
    data = bytearray(b"".join(bytes.fromhex(token[name]) for token in case["tokens"]))
    return torch.frombuffer(data, dtype=torch.uint8).reshape(len(case["tokens"]), -1).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_rows_decode_to_the_very_bits(case: dict[str, Any], device: str) -> None:
    decoder = decoder_of(case)
    keys = decoder.keys(rows_of(case, "key_row", device), 0)
    values = decoder.values(rows_of(case, "value_row", device))
    assert keys.dtype == values.dtype == torch.float32
    assert keys.device.type == values.device.type == device
    for row, token in enumerate(case["tokens"]):
        assert keys[row].cpu().numpy().tobytes().hex() == token["decoded_key"], token["note"]
        assert values[row].cpu().numpy().tobytes().hex() == token["decoded_value"], token["note"]
    assert decoder.keys(rows_of(case, "key_row", device)[:0], 0).shape == (0, case["head_dim"])


def test_what_does_not_fit_is_refused() -> None:
    decoder = decoder_of(CASES[0])
    rows = torch.zeros(decoder.key_row_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="kv_head is 1; the layer has 1"):
        decoder.keys(rows, 1)
    with pytest.raises(ValueError, match="key rows have"):
        decoder.keys(rows[1:], 0)
    with pytest.raises(ValueError, match="key rows have"):
        decoder.keys(rows.float(), 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("row_format", ["k8v8", "k8v4", "k6v4", "f32", "f16", "bf16"])
def test_a_servers_rows_come_as_stored_and_decode_alike(server: Server, row_format: str, dtype: Any) -> None:
    torch.manual_seed(5)
    keys, values = torch.randn(2, 700, 2, 80).to(getattr(torch, dtype)).unbind()
    queries = torch.randn(4, 80).to(getattr(torch, dtype))
    with (
        ctkvr.connect(server.address) as client,
        client.open_session(
            layers=1, q_heads=4, kv_heads=2, head_dim=80, dtype=dtype, token_limit=1024, format=row_format
        ) as session,
    ):
        session.append(0, keys, values)
        here: Any = session.retrieve(0, queries, k=64, row_format="storage")
        assert here.decoder is None
        answer: Any = session.retrieve(0, queries, k=64, row_format="storage", decode_rows=False)
        assert answer.decoder is not None
        for head in range(2):
            stored = [ctkvr.to_torch(sets[0, head], share=True) for sets in (answer.keys, answer.values)]
            assert stored[0].shape == (len(answer.ids[0, head]), answer.decoder.key_row_bytes)
            np.testing.assert_array_equal(answer.decoder.keys(stored[0], head).numpy(), here.keys[0, head])
            np.testing.assert_array_equal(answer.decoder.values(stored[1]).numpy(), here.values[0, head])
        heads = np.repeat([0, 1], answer.counts[0])
        flat = answer.decoder.keys(ctkvr.to_torch(answer.keys.flat, share=True), heads)
        np.testing.assert_array_equal(flat.numpy(), here.keys.flat)
        with session.decode(k=64, row_format="storage", decode_rows=False) as stream:
            step: Any = stream.step(0, keys[0], values[0], queries).answer
            assert step.keys.flat.dtype == np.uint8
            assert step.decoder is not None


def test_tensors_share_an_answers_memory_where_they_are_asked_to() -> None:
    for dtype, kind in ((np.float16, torch.float16), (np.uint16, torch.bfloat16), (np.float32, torch.float32)):
        array = np.frombuffer(np.arange(8, dtype=dtype).tobytes(), dtype)
        shared, copied = ctkvr.to_torch(array, share=True), ctkvr.to_torch(array)
        assert shared.dtype == copied.dtype == kind
        assert shared.data_ptr() == array.ctypes.data
        assert copied.data_ptr() != array.ctypes.data
        assert torch.equal(shared, copied)
        del array
        assert torch.equal(shared, copied)  # the memory lives on
