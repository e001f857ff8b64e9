# SPDX-License-Identifier: Apache-2.0
"""Models of each family through a server, against plain transformers: tokens, logits, and what is refused."""

from __future__ import annotations

from typing import Any

import ctkvr
import pytest
import torch
from ctkvr.errors import TokenLimit
from ctkvr.transformers import CtkvrCache
from ctkvr.v1 import session_pb2

from conftest import Open
from models import FAMILIES, WINDOW, dynamic, generate, make, plain_logits, step_logits, text
from server import SMALL_ENGINE


def served_layers(model: Any) -> list[int]:
    """Those that do not slide."""
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    return [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_plain_transformers(family: str, open_cache: Open) -> None:
    model, ids = make(family), text(240)
    cache = open_cache(model)
    found = step_logits(model, ids, 200, cache)
    torch.testing.assert_close(found, plain_logits(model, ids), atol=2e-3, rtol=1e-3)
    served = served_layers(model)
    assert cache.traffic.answers == 40 * len(served)  # the server answered, and for these layers alone
    assert all(cache.layers[layer].keys.shape[2] <= WINDOW + 1 for layer in served)
    info = cache.sessions[0].info()
    assert [layer.length for layer in info.layers if not layer.absent] == [240] * len(served)
    assert len(served) == (4 if family in ("llama", "qwen2", "qwen3") else 2)


def test_a_softcap_matters_in_the_model_that_has_one() -> None:
    """Else the test above would not show that it is respected."""
    ids = text(60)
    assert (
        plain_logits(make("gemma2"), ids) - plain_logits(make("gemma2", attn_logit_softcapping=None), ids)
    ).abs().max() > 0.1


@pytest.mark.parametrize(
    ("family", "answer"), [*((family, "attention") for family in FAMILIES), ("llama", "rows"), ("gemma2", "rows")]
)
def test_generated_tokens_are_the_same(family: str, answer: Any, open_cache: Open) -> None:
    model, ids = make(family), text(150)
    expected = generate(model, ids, 20, cache=dynamic(model))
    cache = open_cache(model, answer=answer)
    assert generate(model, ids, 20, cache=cache).tolist() == expected.tolist()
    assert cache.traffic.answers > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_sent_as_it_is(dtype: torch.dtype, open_cache: Open) -> None:
    model, ids = make("llama").to(dtype), text(120)
    cache = open_cache(model, format={torch.bfloat16: "bf16", torch.float16: "f16"}[dtype])
    with torch.no_grad():
        expected = model(ids, cache=dynamic(model)).logits[0]
    found = step_logits(model, ids, 100, cache)
    assert found.dtype == dtype
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < 0.06
    assert cache.sessions[0].shape(0).dtype == str(dtype).removeprefix("torch.")


def test_the_default_answers_closely_and_alike(open_cache: Open) -> None:
    model, ids = make("llama", initializer_range=0.08), text(900)
    default: dict[str, Any] = {"format": "k8v4", "source": None, "remainder": True, "k": 64}
    default["selection"] = ctkvr.Selection(dense_below_tokens=0)
    expected = plain_logits(model, ids)[880:]

    def error(logits: torch.Tensor) -> float:
        return float((logits[880:] - expected).norm() / expected.norm())

    found = step_logits(model, ids, 880, open_cache(model, **default))
    assert error(found) < 0.12
    bare = step_logits(model, ids, 880, open_cache(model, **{**default, "remainder": False}))
    assert error(bare) > 2 * error(found)  # attention is flat here: the remainder counts
    assert torch.equal(found, step_logits(model, ids, 880, open_cache(model, **default)))


# ---- Batches, turns, taking back -------------------------------------------------------------------------------------


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, padded on the left."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    return ids, torch.cat([torch.nn.functional.pad(torch.ones_like(row), (longest - row.shape[1], 0)) for row in rows])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_each_sequence_of_a_padded_batch_is_its_own(family: str, open_cache: Open) -> None:
    model = make(family)
    rows = [text(tokens, seed=tokens) for tokens in (90, 141, 60)]
    ids, mask = padded(rows)
    cache = open_cache(model)
    found = generate(model, ids, 25, cache=cache, attention_mask=mask)
    for row, alone in enumerate(rows):
        assert found[row, -25:].tolist() == generate(model, alone, 25)[0, -25:].tolist()
    lengths = [session.info().layers[served_layers(model)[0]].length for session in cache.sessions]
    assert lengths == [row.shape[1] + 24 for row in rows]  # padding is not sent; the last token has not been read


def test_a_second_turn_may_be_padded_too(open_cache: Open) -> None:
    model = make("llama")
    first, mask = padded([text(80, seed=1), text(57, seed=2)])
    cache, plain = open_cache(model), dynamic(model)
    turn, turn_mask = padded([text(9, seed=3), text(30, seed=4)])
    answers = []
    for used in (plain, cache):
        said = generate(model, first, 12, cache=used, attention_mask=mask)
        seen = torch.cat([mask, mask.new_ones((2, 12)), turn_mask], dim=1)
        answers.append(generate(model, torch.cat([said, turn], dim=1), 12, cache=used, attention_mask=seen).tolist())
    assert answers[0] == answers[1]
    assert [session.info().layers[0].length for session in cache.sessions] == [80 + 12 + 9 + 11, 57 + 12 + 30 + 11]


@pytest.mark.parametrize("turn", [2, 7, 150])  # the last in several messages
def test_a_chat_of_several_turns(turn: int, open_cache: Open) -> None:
    model = make("qwen3")
    cache, plain = open_cache(model), dynamic(model)
    found = expected = text(130)
    for number in range(3):
        found, expected = generate(model, found, 10, cache=cache), generate(model, expected, 10, cache=plain)
        assert found.tolist() == expected.tolist()
        more = text(turn, seed=10 + number)
        found, expected = torch.cat([found, more], dim=1), torch.cat([expected, more], dim=1)


def test_stop_and_resume(open_cache: Open) -> None:
    model, ids = make("gemma3"), text(100)
    cache = open_cache(model)
    halves = generate(model, generate(model, ids, 20, cache=cache), 20, cache=cache)
    assert halves.tolist() == generate(model, ids, 40).tolist()


@pytest.mark.parametrize("removed", [1, 10, 35, 110])  # of 10 in the window, behind it, into the prompt
def test_crop_takes_back(removed: int, open_cache: Open) -> None:
    model, ids = make("llama"), text(100)
    cache = open_cache(model)
    said = generate(model, ids, 40, cache=cache)
    held = cache.get_seq_length()
    cache.crop(-removed)
    assert cache.get_seq_length() == cache.sessions[0].info().layers[3].length == held - removed
    other = torch.cat([said[:, : held - removed], text(5, seed=9)], dim=1)
    assert generate(model, other, 20, cache=cache).tolist() == generate(model, other, 20).tolist()


def test_lookup_decoding_takes_wrong_guesses_back(open_cache: Open) -> None:
    model = make("llama")
    ids = text(20).repeat(1, 6)
    cache = open_cache(model)
    found = generate(model, ids, 30, cache=cache, prompt_lookup_num_tokens=4)
    assert found.tolist() == generate(model, ids, 30).tolist()


def test_a_prompt_in_chunks_is_read_as_one(open_cache: Open) -> None:
    model, ids = make("llama"), text(200)
    cache = open_cache(model)
    found = generate(model, ids, 15, cache=cache, prefill_chunk_size=64)
    assert found.tolist() == generate(model, ids, 15).tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_prompt_that_was_read_before_is_adopted(family: str, open_cache: Open) -> None:
    model, ids = make(family), text(120)
    read = dynamic(model)
    with torch.no_grad():
        model(ids[:, :-1], cache=read)
    for _ in range(2):  # it stays as it was
        cache = open_cache(model)
        cache.adopt(read)
        assert generate(model, ids, 20, cache=cache).tolist() == generate(model, ids, 20).tolist()
        assert cache.traffic.answers > 0
    with pytest.raises(ValueError, match=r"the cache has 139 tokens; adopt\(\) fills an empty one"):
        cache.adopt(read)


def test_reset_begins_anew(open_cache: Open) -> None:
    model = make("llama")
    cache = open_cache(model)
    generate(model, text(100), 20, cache=cache)
    cache.reset()
    ids = text(90, rows=2, seed=5)
    assert generate(model, ids, 20, cache=cache).tolist() == generate(model, ids, 20).tolist()


def test_query_centroids_get_the_prompts_queries(open_cache: Open) -> None:
    model, ids = make("llama"), text(300)
    options = session_pb2.SessionOptions(
        query_centroids=[session_pb2.QueryCentroidOptions(centroids=32, list_tokens=64)]
    )
    settings: dict[str, Any] = {"format": "k8v4", "source": "query_centroids", "k": 64}
    selection = ctkvr.Selection(dense_below_tokens=0)
    cache = open_cache(model, **settings, options=options, selection=selection)
    generate(model, ids, 5, cache=cache)
    layers = cache.sessions[0].info().layers
    assert [layer.query_centroids for layer in layers] == [32] * 4
    assert all(layer.indexed_length == 300 for layer in layers)


def test_an_engine_in_this_process_serves_as_a_server_does(open_cache: Open) -> None:
    model, ids = make("llama"), text(300, rows=2)
    default: dict[str, Any] = {"format": "k8v4", "source": None, "remainder": True}
    default["selection"] = ctkvr.Selection(k=64, candidate_tokens=128, dense_below_tokens=0)
    expected = generate(model, ids, 20, cache=open_cache(model, **default))
    with ctkvr.connect(SMALL_ENGINE) as client, CtkvrCache(model, client, 1024, window=WINDOW, **default) as cache:
        assert generate(model, ids, 20, cache=cache).tolist() == expected.tolist()
        assert cache.traffic.answers == 2 * 4 * 19


# ---- Refused, and never wrong ----------------------------------------------------------------------------------------


def test_another_attention_is_refused_at_once(client: ctkvr.Client) -> None:
    with pytest.raises(ValueError, match="attn_implementation is 'sdpa'; 'ctkvr' is expected"):
        CtkvrCache(make("llama", "sdpa"), client, 1024)


def test_another_attention_set_later_writes_no_token(open_cache: Open) -> None:
    model = make("llama")
    cache = open_cache(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="gave keys to an attention that is not 'ctkvr'"):
        generate(model, text(100), 20, cache=cache)


def test_beam_search_is_refused(open_cache: Open) -> None:
    model = make("llama")
    with pytest.raises(NotImplementedError, match="beam search needs ForkSession"):
        generate(model, text(50), 5, cache=open_cache(model), num_beams=3)
    for method, argument in (("batch_repeat_interleave", 2), ("batch_select_indices", torch.tensor([0]))):
        with pytest.raises(NotImplementedError, match="sequences needs ForkSession"):
            getattr(open_cache(model), method)(argument)


def test_a_model_whose_layers_all_slide_has_nothing_to_serve(client: ctkvr.Client) -> None:
    model = make("gemma3", layer_types=["sliding_attention"] * 4)
    with pytest.raises(NotImplementedError, match="there is nothing to serve"):
        CtkvrCache(model, client, 1024)


def test_a_mask_that_is_not_causal_is_refused(open_cache: Open) -> None:
    model, ids = make("llama"), text(40)
    whole = torch.ones((1, 1, 40, 40), dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="not that of a causal model"):
        model(ids, cache=open_cache(model), attention_mask=whole)
    additive = torch.zeros((1, 1, 40, 40))
    with pytest.raises(NotImplementedError, match=r"the attention mask is torch\.float32"):
        model(ids, cache=open_cache(model), attention_mask=additive)


def test_training_with_dropout_is_refused(open_cache: Open) -> None:
    model = make("llama", attention_dropout=0.1).train()
    with pytest.raises(NotImplementedError, match="attention with dropout"):
        model(text(40), cache=open_cache(model))


def test_the_token_limit_is_the_servers_word(client: ctkvr.Client) -> None:
    model = make("llama")
    with (
        CtkvrCache(model, client, 128, window=WINDOW, format="f32", remainder=False) as cache,
        pytest.raises(TokenLimit),
    ):
        generate(model, text(120), 20, cache=cache)


def test_without_the_cache_the_model_attends_as_sdpa_does() -> None:
    for family in FAMILIES:
        if family == "gemma2":  # sdpa knows no softcap
            continue
        model, ids = make(family), text(80)
        assert generate(model, ids, 10).tolist() == generate(make(family, "sdpa"), ids, 10).tolist()
