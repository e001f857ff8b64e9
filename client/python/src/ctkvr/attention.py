# SPDX-License-Identifier: Apache-2.0
"""Merges parts of an attention, by the one formula of the contract (AnswerOptions.remainder). numpy or torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["merge_attention"]


def merge_attention(
    parts: Sequence[tuple[Any, Any]], sink_logits: npt.ArrayLike | Any | None = None
) -> tuple[Any, Any]:
    """Attention over the tokens of all parts, no token in two of them: (output, log_sum_exp), float32.

    A part is (output [..., q_heads, value_dim], log_sum_exp [..., q_heads]): values weighted by the softmax over the
    part's tokens alone, and the natural log of their sum of exp(logit); -infinity where there are none. sink_logits
    [q_heads] enter once, as a part whose values are 0. Tensors of torch where a part is one, on its device, and arrays
    of numpy else. Nowhere a token: zeros and -infinity.

    ValueError: no part, sizes that differ, or a log_sum_exp that is NaN or +infinity.
    """
    if not parts:
        raise ValueError("parts is empty; at least one is needed")
    tensors = _torch_parts(parts)
    if tensors is not None:
        xp: Any = sys.modules["torch"]
        outputs, sums = tensors
        sinks = None if sink_logits is None else xp.as_tensor(sink_logits, dtype=sums[0].dtype, device=sums[0].device)
    else:
        xp = np
        outputs = [np.asarray(output, np.float64) for output, _ in parts]
        sums = [np.asarray(log_sum_exp, np.float64) for _, log_sum_exp in parts]
        sinks = None if sink_logits is None else np.asarray(sink_logits, np.float64)
    _check(outputs, sums, sinks, xp)
    if sinks is not None:
        sums = [*sums, xp.zeros_like(sums[0]) + sinks]
    top = sums[0]
    for log_sum_exp in sums[1:]:
        top = xp.maximum(top, log_sum_exp)
    finite = xp.where(xp.isinf(top), xp.zeros_like(top), top)
    weights = [xp.exp(log_sum_exp - finite) for log_sum_exp in sums]
    total = sum(weights)
    # A weight of 0 does not undo an infinity or NaN in the output of a part without tokens: it is not read.
    shares = [weight / xp.where(total > 0, total, xp.ones_like(total)) for weight in weights]
    output = sum(
        xp.where((share > 0)[..., None], part, xp.zeros_like(part)) * share[..., None]
        for share, part in zip(shares, outputs, strict=False)  # sinks have no output
    )
    with np.errstate(divide="ignore"):
        log_sum_exp = finite + xp.log(total)
    if tensors is not None:
        return output, log_sum_exp
    return np.asarray(output, np.float32), np.asarray(log_sum_exp, np.float32)


def _torch_parts(parts: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]] | None:
    """The parts as float32 tensors on the device of the first tensor among them; None: there is none."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    found = [array for part in parts for array in part if isinstance(array, torch.Tensor)]
    if not found:
        return None

    def as_tensor(array: Any) -> Any:
        if isinstance(array, np.ndarray) and not array.flags.writeable:  # what torch warns of
            array = array.copy()
        return torch.as_tensor(array, dtype=torch.float32, device=found[0].device)

    return [as_tensor(output) for output, _ in parts], [as_tensor(log_sum_exp) for _, log_sum_exp in parts]


def _check(outputs: list[Any], sums: list[Any], sinks: Any | None, xp: Any) -> None:
    for index, (output, log_sum_exp) in enumerate(zip(outputs, sums, strict=True)):
        if output.shape != outputs[0].shape or output.shape[:-1] != log_sum_exp.shape:
            raise ValueError(
                f"parts[{index}] has an output of dims {list(output.shape)} and a log_sum_exp of "
                f"{list(log_sum_exp.shape)}; parts[0] has an output of {list(outputs[0].shape)}"
            )
        if bool(xp.any(xp.isnan(log_sum_exp))) or bool(xp.any(log_sum_exp == np.inf)):
            raise ValueError(f"the log_sum_exp of parts[{index}] has a NaN or +infinity; -infinity says empty")
    if sinks is not None and tuple(sinks.shape) != tuple(sums[0].shape[-1:]):
        raise ValueError(f"sink_logits has dims {list(sinks.shape)}; [{sums[0].shape[-1]}] is expected")
