# SPDX-License-Identifier: Apache-2.0
"""ctkvr.rows over torch: rows are decoded on the device where they lie, so a quarter of the bytes goes there.

The same operations in the same order, each rounded to float32: the bits are those of numpy. Imported by RowDecoder when
a tensor comes in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ctkvr.rows import GROUP, HEADER_BYTES, Layout, blocks

__all__ = ["TorchRows"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class TorchRows:
    """Decodes the rows of one layer and code generation on one device. Thread-safe: not changed after it is made."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        if layout.planes:
            self._mean = torch.from_numpy(np.array(layout.mean)).to(device)
            self._signs = torch.from_numpy(layout.signs).to(device)
            self._bits = torch.arange(8, dtype=torch.uint8, device=device)

    def keys(self, rows: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """float32 [n, head_dim] of uint8 rows [n, key_row_bytes]; heads: int64, of all rows or [n]."""
        layout = self._layout
        if not layout.planes:
            return _floats(rows, layout.key_dtype)
        dim, plane_bytes = layout.head_dim, layout.head_dim // 8 * layout.planes
        planes = rows[:, :plane_bytes].reshape(-1, layout.planes, dim // 8, 1)
        bits = (planes >> self._bits & 1).reshape(-1, layout.planes, dim)
        codes = torch.zeros((len(rows), dim), dtype=torch.uint8, device=rows.device)
        for plane in range(layout.planes):
            codes |= bits[:, plane] << (layout.planes - 1 - plane)
        scale = _floats(rows[:, plane_bytes:], "float16")
        x = scale * (codes.float() + (0.5 - (1 << (layout.planes - 1))))
        for round_ in reversed(range(len(self._signs))):
            parts = [_hadamard(x[:, begin : begin + size]) for begin, size in blocks(dim, round_)]
            x = torch.cat(parts, dim=1) * self._signs[round_]
        return x + self._mean[heads]

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [n, value_dim] of uint8 rows [n, value_row_bytes]."""
        layout = self._layout
        if not layout.value_bits:
            return _floats(rows, layout.value_dtype)
        dim = layout.value_dim
        header_bytes = -(-dim // GROUP) * HEADER_BYTES
        headers = _floats(rows[:, :header_bytes], "float16")
        scale = headers[:, 0::2].repeat_interleave(GROUP, dim=1)[:, :dim]
        zero = headers[:, 1::2].repeat_interleave(GROUP, dim=1)[:, :dim]
        codes = rows[:, header_bytes:]
        if layout.value_bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=2).reshape(len(rows), dim)
        return zero + scale * codes.float()


def _floats(rows: torch.Tensor, dtype: str) -> torch.Tensor:
    # view() of another size asks for aligned storage, which a slice of packed bytes is not.
    copy: Any = rows.contiguous() if rows.storage_offset() == 0 else rows.clone(memory_format=torch.contiguous_format)
    return copy.view(_DTYPES[dtype]).float()


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    """Walsh-Hadamard transform of each row in natural order, not normalised."""
    rows, size = x.shape
    stride = 1
    while stride < size:
        pairs = x.reshape(rows, size // (2 * stride), 2, stride)
        x = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2)
        stride *= 2
    return x.reshape(rows, size)
