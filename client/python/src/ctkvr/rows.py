# SPDX-License-Identifier: Apache-2.0
"""Decodes rows that travel in storage form to float32, as proto/README.md, section "Rows", defines them.

Every operation is one rounded float32 operation in the order given there, so results are the reference's bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ctkvr.arrays import STORAGE, from_bfloat16
from ctkvr.v1 import tensor_pb2

__all__ = ["LayerShape", "RowDecoder"]

_GROUP = 32  # dimensions of a value that share a scale and a zero
_HEADER_BYTES = 4  # of a group: scale and zero, binary16
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class LayerShape:
    """One layer of a session, as its options resolve. Query head h reads KV head h // group_heads."""

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str  # of the arrays that calls carry: "float32", "float16" or "bfloat16"
    absent: bool = False

    @property
    def group_heads(self) -> int:
        """Query heads that share a KV head."""
        return self.q_heads // self.kv_heads


@dataclass(frozen=True)
class _Facts:
    planes: int  # bits of a key's dimension; 0: not coded
    value_bits: int
    dtype: str  # of formats that are not coded


_FORMATS = {
    tensor_pb2.FORMAT_F32: _Facts(0, 0, "float32"),
    tensor_pb2.FORMAT_F16: _Facts(0, 0, "float16"),
    tensor_pb2.FORMAT_BF16: _Facts(0, 0, "bfloat16"),
    tensor_pb2.FORMAT_K8V8: _Facts(8, 8, ""),
    tensor_pb2.FORMAT_K8V4: _Facts(8, 4, ""),
    tensor_pb2.FORMAT_K6V4: _Facts(6, 4, ""),
}


class RowDecoder:
    """Decodes the rows of one layer while its code generation stays. Thread-safe: not changed after it is made."""

    def __init__(self, codec: tensor_pb2.RowCodec, shape: LayerShape) -> None:
        """ValueError: an unknown format, or sizes in `codec` other than format and shape demand."""
        facts = _FORMATS.get(codec.format)
        if facts is None:
            raise ValueError(f"codec.format is {codec.format}; this client does not know it")
        coded = facts.planes > 0 and codec.code_generation > 0
        self.shape = shape
        self.code_generation = codec.code_generation
        self.key_row_bytes = codec.key_row_bytes
        self.value_row_bytes = codec.value_row_bytes
        self._planes = facts.planes if coded else 0
        self._value_bits = facts.value_bits
        self._key_dtype = shape.dtype if facts.planes else facts.dtype
        self._value_dtype = facts.dtype
        self._check_sizes()
        if coded:
            self._mean = _mean_of(codec.key_mean, shape)
            self._signs = _signs(shape.head_dim, codec.rotation_seed)

    def _check_sizes(self) -> None:
        dim, value_dim = self.shape.head_dim, self.shape.value_dim
        if dim <= 0 or dim % 8 or value_dim <= 0 or value_dim % 8:
            raise ValueError(f"head_dim is {dim} and value_dim {value_dim}; both are positive multiples of 8")
        if self._planes:
            key_bytes = dim // 8 * self._planes + 2
        else:
            key_bytes = dim * STORAGE[self._key_dtype].itemsize
        if self._value_bits:
            value_bytes = -(-value_dim // _GROUP) * _HEADER_BYTES + value_dim * self._value_bits // 8
        else:
            value_bytes = value_dim * STORAGE[self._value_dtype].itemsize
        for name, given, expected in (
            ("key_row_bytes", self.key_row_bytes, key_bytes),
            ("value_row_bytes", self.value_row_bytes, value_bytes),
        ):
            if given != expected:
                raise ValueError(f"codec.{name} is {given}; format and shape give {expected}")

    def keys(self, rows: Any, kv_head: int | npt.NDArray[np.intp]) -> npt.NDArray[np.float32]:
        """Keys [n, head_dim] of rows [n, key_row_bytes] (bytes or uint8). kv_head: of all rows, or [n]."""
        packed = _rows_of(rows, self.key_row_bytes, "key")
        heads = np.asarray(kv_head)
        if np.any(heads < 0) or np.any(heads >= self.shape.kv_heads):
            raise ValueError(f"kv_head is {kv_head}; the layer has {self.shape.kv_heads}")
        if not self._planes:
            return _floats(packed, self._key_dtype)
        x = self._rotated_keys(packed)
        for round_ in reversed(range(len(self._signs))):
            for begin, size in _blocks(self.shape.head_dim, round_):
                x[:, begin : begin + size] = _hadamard(x[:, begin : begin + size])
            x *= self._signs[round_]
        x += self._mean[heads]
        return x

    def _rotated_keys(self, packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        dim, count = self.shape.head_dim, self._planes
        plane_bytes = dim // 8 * count
        planes = packed[:, :plane_bytes].reshape(-1, count, dim // 8)
        bits = np.unpackbits(planes, axis=2, bitorder="little")
        codes = np.zeros((len(packed), dim), np.uint8)
        for plane in range(count):
            codes |= bits[:, plane] << np.uint8(count - 1 - plane)
        scale = np.ascontiguousarray(packed[:, plane_bytes:]).view("<f2").astype(np.float32)
        centred = codes.astype(np.float32) + np.float32(0.5 - (1 << (count - 1)))
        return np.asarray(scale * centred, np.float32)

    def values(self, rows: Any) -> npt.NDArray[np.float32]:
        """Values [n, value_dim] of rows [n, value_row_bytes] (bytes or uint8)."""
        packed = _rows_of(rows, self.value_row_bytes, "value")
        if not self._value_bits:
            return _floats(packed, self._value_dtype)
        dim = self.shape.value_dim
        header_bytes = -(-dim // _GROUP) * _HEADER_BYTES
        headers = np.ascontiguousarray(packed[:, :header_bytes]).view("<f2").astype(np.float32)
        scale = np.repeat(headers[:, 0::2], _GROUP, axis=1)[:, :dim]
        zero = np.repeat(headers[:, 1::2], _GROUP, axis=1)[:, :dim]
        codes = packed[:, header_bytes:]
        if self._value_bits == 4:
            codes = np.stack((codes & 15, codes >> 4), axis=2).reshape(len(packed), dim)
        return zero + scale * codes.astype(np.float32)


def _mean_of(tensor: tensor_pb2.Tensor, shape: LayerShape) -> npt.NDArray[np.float32]:
    expected = (shape.kv_heads, shape.head_dim)
    if tensor.dtype != tensor_pb2.DTYPE_F32 or len(tensor.data) != 4 * expected[0] * expected[1]:
        raise ValueError(f"codec.key_mean has {len(tensor.data)} bytes; float32 {list(expected)} is expected")
    return np.frombuffer(tensor.data, "<f4").reshape(expected)


def _rows_of(rows: Any, row_bytes: int, name: str) -> npt.NDArray[np.uint8]:
    packed = rows if isinstance(rows, np.ndarray) else np.frombuffer(rows, np.uint8)
    if packed.dtype != np.uint8 or packed.size % row_bytes:
        raise ValueError(f"{name} rows have {packed.nbytes} bytes; a row has {row_bytes}")
    return packed.reshape(-1, row_bytes)


def _floats(packed: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    stored = np.ascontiguousarray(packed).view(STORAGE[dtype])
    return from_bfloat16(stored) if dtype == "bfloat16" else stored.astype(np.float32)


def _split_mix(seed: int) -> Iterator[int]:
    """SplitMix64."""
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        yield z ^ (z >> 31)


def _signs(dim: int, seed: int) -> npt.NDArray[np.float32]:
    """[rounds, dim]: the rotation's signs, divided by the root of their block's size: one multiplication does both."""
    rounds = 1 if dim.bit_count() == 1 else 2
    words = [word for word, _ in zip(_split_mix(seed), range(-(-rounds * dim // 64)), strict=False)]
    bits = np.unpackbits(np.array(words, "<u8").view(np.uint8), bitorder="little")[: rounds * dim]
    signs = np.where(bits == 1, np.float32(-1), np.float32(1)).reshape(rounds, dim)
    for round_ in range(rounds):
        for begin, size in _blocks(dim, round_):
            signs[round_, begin : begin + size] *= np.float32(1 / np.sqrt(np.float64(size)))
    return signs


def _blocks(dim: int, round_: int) -> Iterator[tuple[int, int]]:
    """(first dimension, size) of the blocks of the binary expansion, large ones first in round 0, last in round 1."""
    sizes = [1 << bit for bit in range(dim.bit_length()) if dim >> bit & 1]
    begin = 0
    for size in reversed(sizes) if round_ == 0 else sizes:
        yield begin, size
        begin += size


def _hadamard(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Walsh-Hadamard transform of each row in natural order, not normalised."""
    rows, size = x.shape
    x = np.ascontiguousarray(x)
    stride = 1
    while stride < size:
        pairs = x.reshape(rows, size // (2 * stride), 2, stride)
        x = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), axis=2).reshape(rows, size)
        stride *= 2
    return x
