# SPDX-License-Identifier: Apache-2.0
"""The connector for vLLM with a paged cache of torch, which shares the memory of the stand-in's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from server import Server
from test_vllm_connector import BLOCK, PROMPT, STORAGE, Engine


def as_torch(array: Any) -> torch.Tensor:
    return (
        torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == np.uint16
        else torch.from_numpy(array)
    )


@pytest.mark.parametrize("layout", ["blocks first", "keys first"])
@pytest.mark.parametrize("dtype", list(STORAGE))
def test_a_prompt_comes_back_bit_for_bit(server: Server, dtype: str, layout: str) -> None:
    engine = Engine(server.address, dtype, layout)
    engine.show({name: as_torch(cache) for name, cache in engine.caches.items()})
    assert engine.prefill(PROMPT) == (0, set(), True)
    assert engine.prefill(PROMPT) == (8 * BLOCK, set(), True)
