# SPDX-License-Identifier: Apache-2.0
"""Small random models of each family, and what plain transformers generate with them."""

from __future__ import annotations

import os
import random
from typing import Any

import torch
import transformers
from transformers import DynamicCache

SEED = int(os.environ.get("CTKVR_TEST_SEED") or random.SystemRandom().getrandbits(31))
VOCABULARY = 211
WINDOW = 16  # of CtkvrCache: small, so that most of a text is on the server

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # so that attention is peaked, and what it reads decides the next token
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# Where attention slides in every other layer, and where the softmax has a softcap or a scale of its own.
_GEMMA = {"sliding_window": 32, "query_pre_attn_scalar": 40}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": (
        "Gemma2",
        {**_GEMMA, "attn_logit_softcapping": 3.0, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gemma3": ("Gemma3Text", {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2}),
}


def make(family: str, attn_implementation: str = "ctkvr", **changes: Any) -> Any:
    """A model of FAMILIES; the same weights for a seed, whatever attends."""
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **settings, **changes})
    config._attn_implementation = attn_implementation
    torch.manual_seed(SEED)
    kind = {"Gemma3Text": "Gemma3ForCausalLM"}.get(name, f"{name}ForCausalLM")
    return getattr(transformers, kind)(config).eval()


def text(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Random ids [rows, tokens] without those that mean padding, begin and end."""
    generator = torch.Generator().manual_seed(SEED + seed)
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)


def generate(model: Any, ids: torch.Tensor, tokens: int, **settings: Any) -> torch.Tensor:
    """Greedy; prompt and what follows."""
    settings.setdefault("attention_mask", torch.ones_like(ids))
    found: torch.Tensor = model.generate(ids, max_new_tokens=tokens, do_sample=False, use_cache=True, **settings)
    return found


def plain_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[tokens, vocabulary] of one sequence, by transformers' own eager attention and no cache."""
    attending = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            found: torch.Tensor = model(ids, use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(attending)
    return found


def step_logits(model: Any, ids: torch.Tensor, prompt: int, cache: Any) -> torch.Tensor:
    """[tokens, vocabulary]: the prompt at once, the rest token by token through the cache."""
    with torch.no_grad():
        found = [model(ids[:, :prompt], cache=cache).logits[0]]
        for at in range(prompt, ids.shape[1]):
            found.append(model(ids[:, at : at + 1], cache=cache).logits[0])
    return torch.cat(found)


def dynamic(model: Any) -> DynamicCache:
    """What transformers use by themselves."""
    return DynamicCache(config=model.config)
