# SPDX-License-Identifier: Apache-2.0
"""Arrays of every kind reach the wire as they are, without copies where that is possible, or are refused by name."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import ctkvr
import ml_dtypes
import numpy as np
import pytest
from ctkvr.arrays import elements


def shares_memory(a: Any, b: Any) -> bool:
    return bool(np.shares_memory(a, b))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numpy_arrays_are_taken_as_they_are(dtype: str) -> None:
    array = np.arange(24, dtype=dtype).reshape(2, 3, 4)
    assert shares_memory(elements(array, dtype, "keys"), array)
    assert shares_memory(elements(array[1:], dtype, "keys"), array)
    turned = elements(array.T, dtype, "keys")
    assert turned.flags.c_contiguous
    np.testing.assert_array_equal(turned, array.T)


def test_bfloat16_comes_as_bits_or_as_ml_dtypes_has_it() -> None:
    array = np.arange(8, dtype=np.float32).astype(ml_dtypes.bfloat16)
    taken = elements(array, "bfloat16", "keys")
    assert taken.dtype == np.uint16
    assert shares_memory(taken, array)
    assert shares_memory(elements(taken, "bfloat16", "keys"), taken)
    np.testing.assert_array_equal(ctkvr.from_bfloat16(taken), np.arange(8, dtype=np.float32))


def test_buffers_and_dlpack_are_taken_without_a_copy() -> None:
    array = np.arange(6, dtype=np.float32).reshape(1, 2, 3)

    class Capsule:
        """Of another library: no array interface."""

        def __dlpack__(self, **_: Any) -> Any:
            return array.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return array.__dlpack_device__()

    assert shares_memory(elements(Capsule(), "float32", "keys"), array)
    assert shares_memory(elements(array.data, "float32", "keys"), array)


@pytest.mark.parametrize(
    ("array", "dtype", "text"),
    [
        (np.zeros(2, np.float64), "float32", r"keys is float64; the session takes float32: keys\.astype"),
        (np.zeros(2, np.float32), "bfloat16", r"keys is float32; .* bfloat16: ctkvr\.to_bfloat16\(keys\)"),
        (np.zeros(2, np.uint16), "float16", "keys is uint16; the session takes float16"),
        (np.zeros(2, ">f4"), "float32", "keys is float32; the session takes float32"),
        ([1.0, 2.0], "float32", "keys is float64"),
        (object(), "float32", "keys is object; an array of numbers is expected"),
    ],
)
def test_nothing_is_converted_behind_the_callers_back(array: Any, dtype: str, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        elements(array, dtype, "keys")


def test_bfloat16_conversions_are_those_of_ml_dtypes(rng: np.random.Generator) -> None:
    bits = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    bits[:8] = [0x00000000, 0x80000000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x00000001]
    floats = bits.view(np.float32)
    numbers = ~np.isnan(floats)
    ours = ctkvr.to_bfloat16(floats)
    np.testing.assert_array_equal(ours[numbers], floats[numbers].astype(ml_dtypes.bfloat16).view(np.uint16))
    assert np.isnan(ctkvr.from_bfloat16(ours)[~numbers]).all()
    all_bits = np.arange(1 << 16, dtype=np.uint16)
    back = ctkvr.from_bfloat16(all_bits)
    np.testing.assert_array_equal(back.view(np.uint32), all_bits.astype(np.uint32) << 16)


# ---- torch -----------------------------------------------------------------------------------------------------------


class Tensor:
    """As much of torch.Tensor as the client may use: on a device, without bfloat16 in numpy()."""

    def __init__(self, array: Any, dtype: str, device: str = "cpu") -> None:
        self.array, self.dtype, self.device = array, dtype, device

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self if self.device == "cpu" else Tensor(self.array.copy(), self.dtype)

    def contiguous(self) -> Tensor:
        return Tensor(np.ascontiguousarray(self.array), self.dtype, self.device)

    def view(self, dtype: str) -> Tensor:
        return Tensor(self.array, dtype, self.device)

    def numpy(self) -> Any:
        if self.device != "cpu" or self.dtype == "bfloat16":
            raise TypeError(f"can't convert {self.device} {self.dtype} tensor to numpy")
        return self.array


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for torch, which is too large to install for a test."""
    module = types.ModuleType("torch")
    tensor = type("Tensor", (Tensor,), {"__module__": "torch"})
    attributes = {
        "Tensor": tensor,
        "bfloat16": "bfloat16",
        "int16": "int16",
        "from_numpy": lambda array: tensor(array, str(array.dtype)),
    }
    for name, value in attributes.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def test_torch_tensors_share_their_memory(torch: Any) -> None:
    array = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    assert shares_memory(elements(torch.Tensor(array, "float32"), "float32", "keys"), array)
    bits = np.arange(6, dtype=np.int16).reshape(1, 2, 3)
    taken = elements(torch.Tensor(bits, "bfloat16"), "bfloat16", "keys")
    assert taken.dtype == np.uint16
    assert shares_memory(taken, bits)
    parameter = type("Parameter", (torch.Tensor,), {"__module__": "model"})
    assert shares_memory(elements(parameter(array, "float32"), "float32", "keys"), array)


def test_torch_tensors_of_a_device_are_copied(torch: Any) -> None:
    array = np.arange(6, dtype=np.float32)
    taken = elements(torch.Tensor(array, "float32", "cuda:0"), "float32", "keys")
    np.testing.assert_array_equal(taken, array)


def test_answers_become_tensors(torch: Any) -> None:
    writable = np.zeros(3, np.float32)
    assert shares_memory(ctkvr.to_torch(writable).array, writable)
    read_only = np.frombuffer(bytes(4), np.uint16)
    tensor = ctkvr.to_torch(read_only)
    assert tensor.dtype == "bfloat16" == torch.bfloat16
    assert tensor.array.flags.writeable
    shared = ctkvr.to_torch(read_only, share=True)
    assert shares_memory(shared.array, read_only)
    assert not read_only.flags.writeable  # as before
    ids = ctkvr.to_torch(np.array([7], np.uint32))
    assert ids.dtype == "int64"
    assert ids.array[0] == 7


def test_torch_and_rich_and_ml_dtypes_stay_unimported() -> None:
    program = (
        "import sys, numpy, ctkvr, ctkvr.aio, ctkvr.rows\n"
        "from ctkvr.arrays import elements\n"
        "elements(numpy.zeros(3, numpy.uint16), 'bfloat16', 'keys')\n"
        "print(sorted({'torch', 'rich', 'ml_dtypes'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_torch_to_torch_says_so() -> None:
    assert "torch" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="torch"):
        ctkvr.to_torch(np.zeros(1, np.float32))
