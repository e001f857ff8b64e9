# SPDX-License-Identifier: Apache-2.0
"""Decodes rows that travel in storage form to float32, as proto/README.md, section "Rows", defines them.

numpy here, torch in ctkvr.rows_torch. Every operation is one rounded float32 operation in the order given there, so
results are the reference's bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from ctkvr.arrays import STORAGE, from_bfloat16, is_torch, to_torch
from ctkvr.v1 import tensor_pb2

if TYPE_CHECKING:
    from ctkvr.rows_torch import TorchRows

__all__ = ["LayerShape", "RowDecoder"]

GROUP = 32  # dimensions of a value that share a scale and a zero
HEADER_BYTES = 4  # of a group: scale and zero, binary16
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


@dataclass(frozen=True)
class Layout:
    """How the rows of one layer and code generation lie; what the two decoders share."""

    head_dim: int
    value_dim: int
    planes: int  # of keys; 0: elements of key_dtype
    value_bits: int  # 0: elements of value_dtype
    key_dtype: str
    value_dtype: str
    mean: npt.NDArray[np.float32]  # [kv_heads, head_dim]; empty where keys are not coded
    signs: npt.NDArray[np.float32]  # [rounds, head_dim]; the same


class RowDecoder:
    """Decodes the rows of one layer while its code generation stays. Thread-safe.

    Rows are numpy arrays or bytes, which give numpy arrays, or tensors of torch, which give tensors on their device;
    the bits are the same.
    """

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
        none = np.empty((0, 0), np.float32)
        self._layout = Layout(
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            planes=facts.planes if coded else 0,
            value_bits=facts.value_bits,
            key_dtype=shape.dtype if facts.planes else facts.dtype,
            value_dtype=facts.dtype,
            mean=none,
            signs=none,
        )
        self._check_sizes()
        if coded:
            mean, signs = _mean_of(codec.key_mean, shape), _signs(shape.head_dim, codec.rotation_seed)
            self._layout = replace(self._layout, mean=mean, signs=signs)
        self._on_devices: dict[Any, TorchRows] = {}  # by torch.device

    def _check_sizes(self) -> None:
        layout = self._layout
        dim, value_dim = layout.head_dim, layout.value_dim
        if dim <= 0 or dim % 8 or value_dim <= 0 or value_dim % 8:
            raise ValueError(f"head_dim is {dim} and value_dim {value_dim}; both are positive multiples of 8")
        if layout.planes:
            key_bytes = dim // 8 * layout.planes + 2
        else:
            key_bytes = dim * STORAGE[layout.key_dtype].itemsize
        if layout.value_bits:
            value_bytes = -(-value_dim // GROUP) * HEADER_BYTES + value_dim * layout.value_bits // 8
        else:
            value_bytes = value_dim * STORAGE[layout.value_dtype].itemsize
        for name, given, expected in (
            ("key_row_bytes", self.key_row_bytes, key_bytes),
            ("value_row_bytes", self.value_row_bytes, value_bytes),
        ):
            if given != expected:
                raise ValueError(f"codec.{name} is {given}; format and shape give {expected}")

    @overload
    def keys(self, rows: bytes | npt.NDArray[np.uint8], kv_head: Any) -> npt.NDArray[np.float32]: ...
    @overload
    def keys(self, rows: Any, kv_head: Any) -> Any: ...
    def keys(self, rows: Any, kv_head: Any) -> Any:
        """Keys, float32 [n, head_dim], of rows, uint8 [n, key_row_bytes]. kv_head: of all rows, or integers [n].

        ValueError: sizes that do not fit, or a KV head that is not there.
        """
        layout = self._layout
        packed = _rows_of(rows, self.key_row_bytes, "key")
        heads = np.asarray(kv_head)
        if np.any(heads < 0) or np.any(heads >= self.shape.kv_heads):
            raise ValueError(f"kv_head is {kv_head}; the layer has {self.shape.kv_heads}")
        if is_torch(packed):
            return self._on(packed.device).keys(packed, to_torch(np.array(heads, np.int64)).to(packed.device))
        if not layout.planes:
            return _floats(packed, layout.key_dtype)
        x = self._rotated_keys(packed)
        for round_ in reversed(range(len(layout.signs))):
            for begin, size in blocks(layout.head_dim, round_):
                x[:, begin : begin + size] = _hadamard(x[:, begin : begin + size])
            x *= layout.signs[round_]
        x += layout.mean[heads]
        return x

    def _on(self, device: Any) -> TorchRows:
        if device not in self._on_devices:
            from ctkvr.rows_torch import TorchRows

            self._on_devices[device] = TorchRows(self._layout, device)
        return self._on_devices[device]

    def _rotated_keys(self, packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        dim, count = self._layout.head_dim, self._layout.planes
        plane_bytes = dim // 8 * count
        planes = packed[:, :plane_bytes].reshape(-1, count, dim // 8)
        bits = np.unpackbits(planes, axis=2, bitorder="little")
        codes = np.zeros((len(packed), dim), np.uint8)
        for plane in range(count):
            codes |= bits[:, plane] << np.uint8(count - 1 - plane)
        scale = np.ascontiguousarray(packed[:, plane_bytes:]).view("<f2").astype(np.float32)
        centred = codes.astype(np.float32) + np.float32(0.5 - (1 << (count - 1)))
        return np.asarray(scale * centred, np.float32)

    @overload
    def values(self, rows: bytes | npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]: ...
    @overload
    def values(self, rows: Any) -> Any: ...
    def values(self, rows: Any) -> Any:
        """Values, float32 [n, value_dim], of rows, uint8 [n, value_row_bytes]. ValueError: sizes that do not fit."""
        layout = self._layout
        packed = _rows_of(rows, self.value_row_bytes, "value")
        if is_torch(packed):
            return self._on(packed.device).values(packed)
        if not layout.value_bits:
            return _floats(packed, layout.value_dtype)
        dim = layout.value_dim
        header_bytes = -(-dim // GROUP) * HEADER_BYTES
        headers = np.ascontiguousarray(packed[:, :header_bytes]).view("<f2").astype(np.float32)
        scale = np.repeat(headers[:, 0::2], GROUP, axis=1)[:, :dim]
        zero = np.repeat(headers[:, 1::2], GROUP, axis=1)[:, :dim]
        codes = packed[:, header_bytes:]
        if layout.value_bits == 4:
            codes = np.stack((codes & 15, codes >> 4), axis=2).reshape(len(packed), dim)
        return zero + scale * codes.astype(np.float32)


def _mean_of(tensor: tensor_pb2.Tensor, shape: LayerShape) -> npt.NDArray[np.float32]:
    expected = (shape.kv_heads, shape.head_dim)
    if tensor.dtype != tensor_pb2.DTYPE_F32 or len(tensor.data) != 4 * expected[0] * expected[1]:
        raise ValueError(f"codec.key_mean has {len(tensor.data)} bytes; float32 {list(expected)} is expected")
    return np.frombuffer(tensor.data, "<f4").reshape(expected)


def _rows_of(rows: Any, row_bytes: int, name: str) -> Any:
    """uint8 [n, row_bytes], in place."""
    packed = rows if isinstance(rows, np.ndarray) or is_torch(rows) else np.frombuffer(rows, np.uint8)
    if str(packed.dtype).removeprefix("torch.") != "uint8" or packed.nbytes % row_bytes:
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
        for begin, size in blocks(dim, round_):
            signs[round_, begin : begin + size] *= np.float32(1 / np.sqrt(np.float64(size)))
    return signs


def blocks(dim: int, round_: int) -> Iterator[tuple[int, int]]:
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
