# SPDX-License-Identifier: Apache-2.0
"""The connector for vLLM: its shape against the published interface, and prompts that go to a real server and back.

vLLM itself is not here: its scheduler and worker are played by Engine, its cache is an array of numpy.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ctkvr
import numpy as np
import pytest
from ctkvr.vllm_base import KVConnectorBase_V1, KVConnectorRole
from ctkvr.vllm_connector import CtkvrConnector, CtkvrMetadata

from server import Server

INTERFACE = json.loads((Path(__file__).parent / "vllm_interface.json").read_text())

BLOCK, BLOCKS, KV_HEADS, HEAD_DIM, TOKEN_LIMIT = 16, 64, 2, 32, 512
LAYERS = ["model.layers.0.attn", "model.layers.1.attn"]
STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


# ---- The interface ---------------------------------------------------------------------------------------------------


def parameters(kind: type, name: str) -> list[str]:
    found = list(inspect.signature(getattr(kind, name)).parameters.values())[1:]
    return [f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name for p in found]


@pytest.mark.parametrize("kind", [CtkvrConnector, KVConnectorBase_V1], ids=["connector", "stand-in"])
def test_every_method_has_the_published_parameters(kind: type) -> None:
    own = {name for name in vars(kind) if not name.startswith("_")} | {"__init__"}
    assert own <= {*INTERFACE["methods"], *INTERFACE["properties"]}
    for name in own:
        if name in INTERFACE["properties"]:
            assert isinstance(vars(kind)[name], property)
        else:
            assert parameters(kind, name) == INTERFACE["methods"][name]


def test_every_abstract_method_is_implemented() -> None:
    assert set(INTERFACE["abstract"]) <= set(vars(CtkvrConnector))
    assert set(INTERFACE["abstract"]) <= set(INTERFACE["methods"])


# ---- An engine's part ------------------------------------------------------------------------------------------------


def configuration(address: str, dtype: str = "float32", **changes: Any) -> tuple[Any, Any]:
    extra = {"address": address}
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(get_from_extra_config=lambda key, default: extra.get(key, default)),
        parallel_config=SimpleNamespace(world_size=changes.pop("world_size", 1)),
        model_config=SimpleNamespace(max_model_len=TOKEN_LIMIT),
    )
    spec = SimpleNamespace(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=f"torch.{dtype}")
    groups = [SimpleNamespace(layer_names=LAYERS, kv_cache_spec=spec)] * changes.pop("groups", 1)
    return config, SimpleNamespace(kv_cache_groups=groups)


class Engine:
    """Schedules one prompt at a time, in steps of so many tokens, and computes keys and values from token ids alone."""

    def __init__(self, address: str, dtype: str = "float32", layout: str = "blocks first") -> None:
        config = configuration(address, dtype)
        self.scheduler = CtkvrConnector(config[0], KVConnectorRole.SCHEDULER, config[1])
        self.worker = CtkvrConnector(config[0], KVConnectorRole.WORKER, config[1])
        self.dtype = dtype
        self.first = layout == "blocks first"
        shape = (BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_DIM) if self.first else (2, BLOCKS, BLOCK, KV_HEADS, HEAD_DIM)
        self.caches = {name: np.zeros(shape, STORAGE[dtype]) for name in LAYERS}
        self.show(self.caches)
        self.requests = 0

    def show(self, paged: dict[str, Any]) -> None:
        """What the connector takes for the caches."""
        self.paged = paged
        self.worker.register_kv_caches(paged)

    def rows(self, layer: str, token_ids: list[int]) -> Any:
        """[tokens, kv_heads, keys and values]: of a token and all before it, as in a model."""
        rows = []
        state = LAYERS.index(layer)
        for token in token_ids:
            state = (state * 31 + token) % 1000003
            rows.append(np.random.default_rng(state).standard_normal((KV_HEADS, 2 * HEAD_DIM), np.float32))
        made = np.array(rows, np.float32).reshape(-1, KV_HEADS, 2 * HEAD_DIM)
        return ctkvr.to_bfloat16(made) if self.dtype == "bfloat16" else made.astype(STORAGE[self.dtype])

    def write(self, layer: str, block_ids: list[int], begin: int, rows: Any) -> None:
        for place, row in enumerate(rows, begin):
            block, offset = block_ids[place // BLOCK], place % BLOCK
            if self.first:
                self.caches[layer][block, :, offset] = row
            else:
                self.caches[layer][0, block, offset], self.caches[layer][1, block, offset] = np.split(row, 2, axis=-1)

    def read(self, layer: str, block_ids: list[int], tokens: int) -> Any:
        rows = []
        for place in range(tokens):
            block, offset = block_ids[place // BLOCK], place % BLOCK
            cache = self.caches[layer]
            if self.first:
                rows.append(cache[block, :, offset])
            else:
                rows.append(np.concatenate([cache[0, block, offset], cache[1, block, offset]], axis=-1))
        return np.array(rows)

    def prefill(self, token_ids: list[int], step: int = TOKEN_LIMIT) -> tuple[int, set[int], bool]:
        """(tokens that came from the connector, blocks it could not load, whether the cache is as if computed)."""
        self.requests += 1
        request = SimpleNamespace(request_id=f"r{self.requests}", prompt_token_ids=token_ids)
        count = -(-len(token_ids) // BLOCK)
        block_ids = np.random.default_rng(self.requests).permutation(BLOCKS)[:count].tolist()
        external, later = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert external is not None
        assert not later
        self.scheduler.update_state_after_alloc(request, SimpleNamespace(), external)
        for cache in self.caches.values():
            cache[...] = 0
        computed, failed = external, set()
        while computed < len(token_ids):
            scheduled = min(step, len(token_ids) - computed)
            metadata = self.scheduler.build_connector_meta(
                self.output(request.request_id, token_ids, block_ids, computed, scheduled, new=computed == external)
            )
            failed |= self.forward(metadata, token_ids, block_ids, computed, scheduled)
            computed += scheduled
        self.scheduler.request_finished(request, block_ids)
        whole = all(
            np.array_equal(self.read(name, block_ids, len(token_ids)), self.rows(name, token_ids)) for name in LAYERS
        )
        return external, failed, whole

    def output(
        self, request_id: str, token_ids: list[int], block_ids: list[int], computed: int, scheduled: int, *, new: bool
    ) -> Any:
        first = SimpleNamespace(
            req_id=request_id, prompt_token_ids=token_ids, block_ids=(block_ids,), num_computed_tokens=computed
        )
        cached = SimpleNamespace(
            req_ids=[] if new else [request_id],
            new_block_ids=[None],
            num_computed_tokens=[computed],
            resumed_req_ids=set(),
        )
        return SimpleNamespace(
            scheduled_new_reqs=[first] if new else [],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={request_id: scheduled},
        )

    def forward(
        self, metadata: CtkvrMetadata, token_ids: list[int], block_ids: list[int], computed: int, scheduled: int
    ) -> set[int]:
        worker = self.worker
        worker.bind_connector_metadata(metadata)
        assert worker.has_connector_metadata()
        worker.start_load_kv(SimpleNamespace())
        failed = worker.get_block_ids_with_load_errors()
        for name in LAYERS:
            worker.wait_for_layer_load(name)
            rows = self.rows(name, token_ids[: computed + scheduled])
            self.write(name, block_ids, computed, rows[computed:])
            worker.save_kv_layer(name, self.paged[name], None)
        worker.wait_for_save()
        worker.clear_connector_metadata()
        return failed


@pytest.fixture
def own_server() -> Iterator[Server]:
    with Server("--arena_bytes=16MiB") as serving:
        yield serving


PROMPT = list(range(100, 100 + 8 * BLOCK + 5))


@pytest.mark.parametrize("layout", ["blocks first", "keys first"])
@pytest.mark.parametrize("dtype", list(STORAGE))
def test_a_prompt_comes_back_bit_for_bit(server: Server, dtype: str, layout: str) -> None:
    engine = Engine(server.address, dtype, layout)
    assert engine.prefill(PROMPT) == (0, set(), True)
    assert engine.prefill(PROMPT) == (8 * BLOCK, set(), True)
    engine.worker.shutdown()
    engine.scheduler.shutdown()


def test_prompts_share_what_they_have_in_common(server: Server) -> None:
    engine = Engine(server.address)
    with ctkvr.connect(server.address) as client:
        before = len(client.list_sessions())
        assert engine.prefill(PROMPT, step=40) == (0, set(), True)  # in chunks that end within blocks
        turn = [*PROMPT, *range(900, 900 + 3 * BLOCK)]
        assert engine.prefill(turn, step=24) == (8 * BLOCK, set(), True)
        assert len(client.list_sessions()) == before + 1  # the session went on
        assert engine.prefill(turn) == (11 * BLOCK, set(), True)
        other = [*PROMPT[: 3 * BLOCK], *range(500, 500 + 2 * BLOCK)]
        assert engine.prefill(other) == (3 * BLOCK, set(), True)
        assert len(client.list_sessions()) == before + 2  # sessions do not fork
        assert engine.prefill(other) == (4 * BLOCK, set(), True)  # all but the block of the last token
        assert engine.prefill(turn) == (11 * BLOCK, set(), True)
        engine.scheduler.shutdown()
        assert len(client.list_sessions()) == before


def test_what_cannot_be_full_is_not_stored(server: Server) -> None:
    engine = Engine(server.address)
    for prompt in ([1], list(range(BLOCK - 1))):
        for _ in range(2):
            assert engine.prefill(prompt) == (0, set(), True)
    assert engine.prefill(list(range(BLOCK))) == (0, set(), True)
    assert engine.prefill(list(range(BLOCK))) == (0, set(), True)  # the last token is computed anew


def test_two_prompts_at_once_never_mix(server: Server) -> None:
    """Both begin alike and are stored at once: the second goes on in the first's session, which then stops."""
    engine = Engine(server.address)
    common = list(range(4 * BLOCK))
    prompts = {"a": [*common, *range(600, 600 + 4 * BLOCK)], "b": [*common, *range(700, 700 + 4 * BLOCK)]}
    blocks = {"a": list(range(8)), "b": list(range(8, 16))}
    computed = {"a": 0, "b": 0}
    for name, tokens in (("a", 4 * BLOCK), ("b", 8 * BLOCK), ("a", 4 * BLOCK)):
        output = engine.output(name, prompts[name], blocks[name], computed[name], tokens, new=computed[name] == 0)
        metadata = engine.scheduler.build_connector_meta(output)
        assert engine.forward(metadata, prompts[name], blocks[name], computed[name], tokens) == set()
        computed[name] += tokens
    for prompt in prompts.values():
        external, failed, whole = engine.prefill([*prompt, 1])
        assert external >= 4 * BLOCK
        assert (failed, whole) == (set(), True)


def test_full_memory_makes_room_and_stores_the_newest(own_server: Server) -> None:
    engine = Engine(own_server.address)
    prompts = [list(range(begin, begin + 3 * BLOCK + 1)) for begin in range(0, 40_000, 1000)]
    for prompt in prompts:
        assert engine.prefill(prompt) == (0, set(), True)
    with ctkvr.connect(own_server.address) as client:
        assert 0 < len(client.list_sessions()) < len(prompts)
    assert engine.prefill(prompts[-1]) == (3 * BLOCK, set(), True)
    assert engine.prefill(prompts[0])[0] == 0


def test_a_session_that_is_lost_is_computed_again(server: Server) -> None:
    engine = Engine(server.address)
    engine.prefill(PROMPT)
    (stored,) = engine.scheduler._stored.values()
    stored.session.close()
    assert engine.prefill(PROMPT) == (0, set(), True)
    assert engine.prefill(PROMPT) == (8 * BLOCK, set(), True)


def test_a_load_that_fails_is_reported_by_blocks(server: Server) -> None:
    engine = Engine(server.address)
    engine.prefill(PROMPT)
    request = SimpleNamespace(request_id="r", prompt_token_ids=PROMPT)
    external, _ = engine.scheduler.get_num_new_matched_tokens(request, 2 * BLOCK)
    assert external == 6 * BLOCK  # beyond what the engine has itself
    engine.scheduler.update_state_after_alloc(request, SimpleNamespace(), external)
    block_ids = list(range(20, 29))
    metadata = engine.scheduler.build_connector_meta(engine.output("r", PROMPT, block_ids, 8 * BLOCK, 5, new=True))
    (stored,) = engine.scheduler._stored.values()
    stored.session.close()
    engine.worker.bind_connector_metadata(metadata)
    engine.worker.start_load_kv(SimpleNamespace())
    assert engine.worker.get_block_ids_with_load_errors() == set(range(22, 28))
    assert engine.worker.get_block_ids_with_load_errors() == set()


def test_what_is_not_supported_is_refused(server: Server) -> None:
    for config, text in (
        (configuration(server.address, world_size=2), "world_size is 2"),
        (configuration(server.address, groups=2), "has 2 groups"),
        (configuration(server.address, "float8_e4m3fn"), "dtype is float8_e4m3fn"),
    ):
        with pytest.raises(ValueError, match=text):
            CtkvrConnector(config[0], KVConnectorRole.WORKER, config[1])
    config = configuration(server.address)
    worker = CtkvrConnector(config[0], KVConnectorRole.WORKER, config[1])
    with pytest.raises(ValueError, match=r"kv_caches has no layer model\.layers\.0\.attn"):
        worker.register_kv_caches({})
    with pytest.raises(ValueError, match=r"the paged cache has dims \[4, 16, 2, 64\]"):
        worker.register_kv_caches(dict.fromkeys(LAYERS, np.zeros((4, 16, 2, 64), np.float32)))
    worker.bind_connector_metadata(SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="metadata is SimpleNamespace"):
        worker.start_load_kv(SimpleNamespace())
