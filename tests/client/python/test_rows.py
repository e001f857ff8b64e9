# SPDX-License-Identifier: Apache-2.0
"""RowDecoder against the test vectors of the contract, bit for bit, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ctkvr import LayerShape, RowDecoder
from ctkvr.v1 import tensor_pb2

ROOT = Path(__file__).parents[3]
CASES: list[dict[str, Any]] = json.loads((ROOT / "tests/golden/rows.json").read_text())["cases"]
DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def codec_of(case: dict[str, Any], kv_heads: int = 1) -> tensor_pb2.RowCodec:
    mean = bytes.fromhex(case["mean"])
    codec = tensor_pb2.RowCodec(
        format="FORMAT_" + case["format"].upper(),
        code_generation=case["code_generation"],
        rotation_seed=int(case["rotation_seed"]),
        key_row_bytes=len(case["tokens"][0]["key_row"]) // 2,
        value_row_bytes=len(case["tokens"][0]["value_row"]) // 2,
    )
    if mean:
        codec.key_mean.CopyFrom(
            tensor_pb2.Tensor(
                dtype=tensor_pb2.DTYPE_F32,
                dims=[kv_heads, case["head_dim"]],
                data=bytes(len(mean)) * (kv_heads - 1) + mean,
            )
        )
    return codec


def shape_of(case: dict[str, Any], kv_heads: int = 1) -> LayerShape:
    return LayerShape(2 * kv_heads, kv_heads, case["head_dim"], case["value_dim"], DTYPES[case["raw_dtype"]])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_rows_decode_to_the_very_bits(case: dict[str, Any]) -> None:
    decoder = RowDecoder(codec_of(case), shape_of(case))
    tokens = case["tokens"]
    keys = decoder.keys(b"".join(bytes.fromhex(token["key_row"]) for token in tokens), 0)
    values = decoder.values(b"".join(bytes.fromhex(token["value_row"]) for token in tokens))
    assert keys.dtype == values.dtype == np.float32
    for row, token in enumerate(tokens):
        assert keys[row].tobytes().hex() == token["decoded_key"], token["note"]
        assert values[row].tobytes().hex() == token["decoded_value"], token["note"]


def test_every_row_takes_the_mean_of_its_own_head() -> None:
    case = CASES[0]
    decoder = RowDecoder(codec_of(case, kv_heads=2), shape_of(case, kv_heads=2))  # a zero mean, then the case's
    token = case["tokens"][0]
    rows = bytes.fromhex(token["key_row"]) * 2
    keys = decoder.keys(rows, np.array([0, 1]))
    assert keys[1].tobytes().hex() == token["decoded_key"]
    np.testing.assert_array_equal(keys[0], decoder.keys(rows, 0)[1])
    assert keys[0].tobytes() != keys[1].tobytes()


def test_no_rows_decode_to_no_rows() -> None:
    for case in CASES:
        decoder = RowDecoder(codec_of(case), shape_of(case))
        assert decoder.keys(b"", 0).shape == (0, case["head_dim"])
        assert decoder.values(b"").shape == (0, case["value_dim"])


@pytest.mark.parametrize("field", ["key_row_bytes", "value_row_bytes"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_sizes_that_the_format_does_not_give_are_refused(case: dict[str, Any], field: str) -> None:
    for change in (-1, 1):
        codec = codec_of(case)
        setattr(codec, field, getattr(codec, field) + change)
        with pytest.raises(ValueError, match=rf"codec\.{field} is {getattr(codec, field)}; .* give"):
            RowDecoder(codec, shape_of(case))


def test_what_else_is_refused() -> None:
    case = CASES[0]
    codec = codec_of(case)
    codec.format = 99  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"codec\.format is 99"):
        RowDecoder(codec, shape_of(case))
    codec = codec_of(case)
    codec.key_mean.data = codec.key_mean.data[:-4]
    with pytest.raises(ValueError, match=r"codec\.key_mean has 252 bytes; float32 \[1, 64\]"):
        RowDecoder(codec, shape_of(case))
    with pytest.raises(ValueError, match="head_dim is 12 and value_dim 64"):
        RowDecoder(codec_of(case), LayerShape(1, 1, 12, 64, "float32"))
    decoder = RowDecoder(codec_of(case), shape_of(case))
    rows = bytes(decoder.key_row_bytes)
    for head in (-1, 1):
        with pytest.raises(ValueError, match=f"kv_head is {head}; the layer has 1"):
            decoder.keys(rows, head)
    with pytest.raises(ValueError, match="key rows have 65 bytes; a row has 66"):
        decoder.keys(rows[1:], 0)
    with pytest.raises(ValueError, match="value rows have 1 bytes; a row has 40"):
        decoder.values(b"x")
