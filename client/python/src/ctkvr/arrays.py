# SPDX-License-Identifier: Apache-2.0
"""Arrays in and out: numpy, torch, anything with a buffer or DLPack, as the bytes that travel.

Element types are those of a session: float32, float16 and bfloat16. numpy has no bfloat16 of its own, so arrays of it
are uint16 (the upper half of a float32), or ml_dtypes.bfloat16 where that is installed. Nothing is converted behind
the caller's back: another type is a TypeError that says how to convert. torch is not imported by this module: a tensor
that comes in shows that the caller has done so.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = ["DTypeName", "from_bfloat16", "to_bfloat16", "to_torch"]

DTypeName = Literal["float32", "float16", "bfloat16"]

# What an element is held as in numpy, little-endian as on the wire.
STORAGE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}


def to_bfloat16(array: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """float32 as bfloat16 bits: rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, dtype="<f4").view("<u4")
    rounded = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, (bits >> 16 | 0x40).astype("<u2"), rounded)


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """bfloat16 bits as float32, exactly."""
    return (np.ascontiguousarray(bits, dtype="<u2").astype("<u4") << 16).view("<f4")


def elements(array: Any, dtype: str, name: str) -> npt.NDArray[Any]:
    """`array` as a C-contiguous numpy array of STORAGE[dtype], of the same shape; without a copy where it is that.

    TypeError: another element type, or nothing that holds numbers. `name` is the argument's, for the message.
    """
    found = _as_numpy(array, name)
    if dtype == "bfloat16" and found.dtype.name in ("bfloat16", "int16"):
        found = found.view("<u2")
    if found.dtype != STORAGE[dtype]:
        raise TypeError(f"{name} is {found.dtype.name}; the session takes {dtype}: {_advice(dtype, name)}")
    return np.ascontiguousarray(found)


def _advice(dtype: str, name: str) -> str:
    if dtype == "bfloat16":
        return f"ctkvr.to_bfloat16({name}), or {name}.to(torch.bfloat16)"
    return f"{name}.astype(numpy.{dtype}), or {name}.to(torch.{dtype})"


def _as_numpy(array: Any, name: str) -> npt.NDArray[Any]:
    if isinstance(array, np.ndarray):
        return array
    if is_torch(array):
        return _torch_as_numpy(array)
    if hasattr(array, "__dlpack__"):
        try:
            return np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError):  # an element type or device that DLPack to numpy cannot carry
            pass
    found = np.asarray(array)
    if found.dtype == object:
        raise TypeError(f"{name} is {type(array).__name__}; an array of numbers is expected")
    return found


def is_torch(array: Any) -> bool:
    """A torch.Tensor, or of a class derived from it. Does not import torch."""
    return any(
        base.__module__.partition(".")[0] == "torch" and base.__name__ == "Tensor" for base in type(array).__mro__
    )


def _torch_as_numpy(tensor: Any) -> npt.NDArray[Any]:
    """Shares the memory of a tensor on the CPU; copies one from a device."""
    torch = sys.modules["torch"]
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:  # unknown to numpy
        tensor = tensor.view(torch.int16)
    found: npt.NDArray[Any] = tensor.numpy()
    return found


class _Shared:
    """An array whose memory may be written to, though the array itself says otherwise."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array  # keeps the memory
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def to_torch(array: npt.NDArray[Any], *, share: bool = False) -> Any:
    """A torch tensor of an answer's array: uint16 as bfloat16, uint32 (ids) as int64, anything else as it is.

    Shares the array's memory where that may be written to. Most arrays of an answer may not, for they are views of the
    message, and are copied; with `share` they are not: a tensor that is only read. torch knows no such thing, so what
    is written to it anyhow changes the answer.
    """
    torch = importlib.import_module("torch")

    if array.dtype == np.uint32:
        array = array.astype(np.int64)
    if not array.flags.writeable:
        array = np.asarray(_Shared(array)) if share else array.copy()
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
