# SPDX-License-Identifier: Apache-2.0
"""A KV connector for vLLM that keeps prompts' keys and values on a ctkvr server: a sketch, see client/python/vllm.md.

    --kv-transfer-config '{"kv_connector": "CtkvrConnector", "kv_connector_module_path": "ctkvr.vllm_connector",
                           "kv_role": "kv_both", "kv_connector_extra_config": {"address": "127.0.0.1:7420"}}'

Of every prompt the full blocks are stored, in a session of their own, in the cache's element type: what comes back is
what went in. A prompt that begins as a stored one does takes the common blocks from there. Loads and saves are done
when they are asked for, not beside the model's work.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import ctkvr
from ctkvr.arrays import is_torch
from ctkvr.errors import CtkvrError, NoRoom
from ctkvr.vllm_base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

__all__ = ["CtkvrConnector", "CtkvrMetadata", "Transfer"]

_log = logging.getLogger(__name__)

_READ_BYTES_MAX = 64 << 20  # a retrieval's rows, about
# An element type, as str(torch.dtype) ends: the format that keeps it as it is, and how rows of it travel.
_FORMATS: dict[str, Any] = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Transfer:
    """Positions [begin, end) of a request between the paged cache and a session."""

    session_id: str
    store: bool  # else load
    block_ids: list[int]  # of the request, from position 0 on
    begin: int
    end: int


@dataclass
class CtkvrMetadata(KVConnectorMetadata):
    """What the workers are to do in a step."""

    transfers: list[Transfer] = field(default_factory=list)


@dataclass
class _Stored:
    """A session, as the scheduler knows it."""

    session: ctkvr.Session
    blocks: int  # asked to be stored


@dataclass
class _Request:
    """A request whose prompt is being computed."""

    token_ids: list[int]
    hashes: list[bytes]
    block_ids: list[int]
    stored: _Stored | None  # where its blocks go; None: nowhere
    saved_blocks: int  # of them, asked to be stored or held before


class Layout:
    """The one group of attention layers that a cache may have. ValueError: another cache."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ValueError(f"kv_cache_groups has {len(groups)} groups; one of full attention is supported")
        if vllm_config.parallel_config.world_size != 1:
            raise ValueError(f"world_size is {vllm_config.parallel_config.world_size}; 1 is supported")
        spec = groups[0].kv_cache_spec
        self.layers: list[str] = list(groups[0].layer_names)
        self.block_size: int = spec.block_size
        self.kv_heads: int = spec.num_kv_heads
        self.head_dim: int = spec.head_size
        self.value_dim: int = getattr(spec, "head_size_v", None) or spec.head_size
        self.dtype = str(spec.dtype).removeprefix("torch.")
        if self.dtype not in _FORMATS:
            raise ValueError(f"the cache's dtype is {self.dtype}; it is one of {', '.join(_FORMATS)}")

    def places(self, transfer: Transfer) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Block and offset of each position of a transfer."""
        positions = np.arange(transfer.begin, transfer.end)
        return np.array(transfer.block_ids, np.int64)[positions // self.block_size], positions % self.block_size

    def parts(self, kv_layer: Any) -> tuple[Any, Any]:
        """Views (keys, values), [blocks, offsets, kv_heads, dim] each. ValueError: a shape that is none of the two.

        [blocks, kv_heads, block_size, head_dim + value_dim], or [2, blocks, block_size, kv_heads, head_dim].
        """
        shape = tuple(kv_layer.shape)
        if shape[1:] == (self.kv_heads, self.block_size, self.head_dim + self.value_dim):
            turned = kv_layer.swapaxes(1, 2)
            return turned[..., : self.head_dim], turned[..., self.head_dim :]
        if self.head_dim == self.value_dim and (shape[:1], shape[2:]) == (
            (2,),
            (self.block_size, self.kv_heads, self.head_dim),
        ):
            return kv_layer[0], kv_layer[1]
        raise ValueError(
            f"the paged cache has dims {list(shape)}; [blocks, {self.kv_heads}, {self.block_size}, "
            f"{self.head_dim + self.value_dim}] or [2, blocks, {self.block_size}, {self.kv_heads}, {self.head_dim}] "
            "is expected"
        )

    def hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Of each full block: of its tokens and of all before it."""
        ids = np.array(token_ids, np.int64)
        found: list[bytes] = []
        last = repr((self.layers, self.block_size, self.kv_heads, self.head_dim, self.value_dim, self.dtype)).encode()
        for begin in range(0, len(ids) - self.block_size + 1, self.block_size):
            last = hashlib.sha256(last + ids[begin : begin + self.block_size].tobytes()).digest()
            found.append(last)
        return found


class CtkvrConnector(KVConnectorBase_V1):
    """One instance in the scheduler's process, one in the worker's; each with a connection of its own.

    kv_connector_extra_config: address ("127.0.0.1:7420"), token_limit (of a session: the model's max_model_len).
    ValueError: more than one group of layers or process, or an element type that is quantised.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._layout = Layout(vllm_config, kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        self._token_limit: int = extra("token_limit", vllm_config.model_config.max_model_len)
        # The scheduler does not wait for room: it makes some.
        retry = ctkvr.RetryOptions(attempts_max=1) if role is KVConnectorRole.SCHEDULER else None
        self._client = ctkvr.connect(extra("address", "127.0.0.1:7420"), retry=retry)
        # The scheduler's.
        self._stored: OrderedDict[str, _Stored] = OrderedDict()  # by session id, least recently used first
        self._by_hash: dict[bytes, str] = {}
        self._matched: dict[str, tuple[str, int]] = {}  # by request: session, local tokens
        self._loads: dict[str, tuple[str, int, int]] = {}  # by request: session, begin, end
        self._requests: dict[str, _Request] = {}
        # The worker's.
        self._caches: dict[str, Any] = {}
        self._sessions: dict[str, ctkvr.Session] = {}
        self._failed_blocks: set[int] = set()
        self._unsaved: set[str] = set()  # sessions that a save to has failed

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a save that is lost is computed again."""
        return False

    # ---- Scheduler ---------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens of the prompt that are held here beyond those computed; never the last one, which must be computed."""
        prompt = list(request.prompt_token_ids or [])
        hashes = self._layout.hashes(prompt[:-1])
        for blocks in range(len(hashes), 0, -1):
            session_id = self._by_hash.get(hashes[blocks - 1])
            if session_id is None:
                continue
            held = min(self._held_tokens(session_id), blocks * self._layout.block_size)
            held -= held % self._layout.block_size
            if held > num_computed_tokens:
                self._matched[request.request_id] = (session_id, num_computed_tokens)
                return held - num_computed_tokens, False
            if session_id in self._stored:
                break  # else it is lost, and another may hold less
        return 0, False

    def _held_tokens(self, session_id: str) -> int:
        """Of the layer that holds least; 0: the session is lost, and forgotten."""
        if session_id not in self._stored:
            return 0
        try:
            held = min(layer.length for layer in self._stored[session_id].session.info().layers)
        except CtkvrError as error:
            _log.warning("ctkvr: session %s is not used any more: %s", session_id, error)
            self._forget(session_id)
            return 0
        self._stored.move_to_end(session_id)
        return held

    def _forget(self, session_id: str) -> None:
        self._stored.pop(session_id, None)
        self._by_hash = {key: value for key, value in self._by_hash.items() if value != session_id}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Notes what the next step loads."""
        if num_external_tokens > 0:
            session_id, begin = self._matched[request.request_id]
            self._loads[request.request_id] = (session_id, begin, begin + num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> CtkvrMetadata:
        """Loads noted since the last step, and saves of the blocks that this step fills."""
        metadata = CtkvrMetadata()
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._requests[new.req_id] = self._new_request(list(new.prompt_token_ids or []), list(new.block_ids[0]))
            self._plan(metadata, new.req_id, new.num_computed_tokens + scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            request = self._requests.get(request_id)
            if request is None:
                continue
            new_blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                request.block_ids = []  # after a preemption all of them come anew
            request.block_ids += new_blocks[0] if new_blocks else []
            self._plan(metadata, request_id, cached.num_computed_tokens[index] + scheduled[request_id])
        self._loads.clear()
        self._matched.clear()
        return metadata

    def _new_request(self, token_ids: list[int], block_ids: list[int]) -> _Request:
        hashes = self._layout.hashes(token_ids)
        known = next((n for n in range(len(hashes), 0, -1) if hashes[n - 1] in self._by_hash), 0)
        stored = self._stored.get(self._by_hash[hashes[known - 1]]) if known else None
        if known == len(hashes):
            return _Request(token_ids, hashes, block_ids, None, known)  # nothing to add, or nothing full
        if stored is None or stored.blocks != known:  # another text goes on from there: sessions do not fork yet
            stored, known = self._open(), 0
        return _Request(token_ids, hashes, block_ids, stored, known)

    def _open(self) -> _Stored | None:
        """A session for a prompt; the least recently used make room. None: none is to be had."""
        layout = self._layout
        while True:
            try:
                session = self._client.open_session(
                    layers=len(layout.layers),
                    q_heads=layout.kv_heads,
                    kv_heads=layout.kv_heads,
                    head_dim=layout.head_dim,
                    value_dim=layout.value_dim,
                    dtype=layout.dtype,  # type: ignore[arg-type]
                    format=_FORMATS[layout.dtype],
                    token_limit=self._token_limit,
                )
            except NoRoom as error:
                if not self._stored:
                    _log.warning("ctkvr: a prompt is not stored: %s", error)
                    return None
                session_id, oldest = next(iter(self._stored.items()))
                self._forget(session_id)
                self._close(oldest.session)
            except CtkvrError as error:
                _log.warning("ctkvr: a prompt is not stored: %s", error)
                return None
            else:
                self._stored[session.id] = stored = _Stored(session, 0)
                return stored

    @staticmethod
    def _close(session: ctkvr.Session) -> None:
        try:
            session.close()
        except CtkvrError as error:  # its lease ends it
            _log.warning("ctkvr: session %s was not closed: %s", session.id, error)

    def _plan(self, metadata: CtkvrMetadata, request_id: str, computed_tokens: int) -> None:
        request = self._requests[request_id]
        if request_id in self._loads:
            session_id, begin, end = self._loads[request_id]
            metadata.transfers.append(Transfer(session_id, False, list(request.block_ids), begin, end))
        full = min(computed_tokens // self._layout.block_size, len(request.hashes))
        stored = request.stored
        if stored is None or full <= request.saved_blocks or stored.session.id not in self._stored:
            return
        if stored.blocks != request.saved_blocks:  # another request went on from there meanwhile, with its own text
            request.stored = None
            return
        begin, end = (blocks * self._layout.block_size for blocks in (request.saved_blocks, full))
        metadata.transfers.append(Transfer(stored.session.id, True, list(request.block_ids), begin, end))
        for block in range(request.saved_blocks, full):
            self._by_hash.setdefault(request.hashes[block], stored.session.id)
        stored.blocks = request.saved_blocks = full

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forgets the request; its blocks may be freed at once."""
        self._requests.pop(request.request_id, None)
        return False, None

    # ---- Worker ------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The paged cache of each layer. ValueError: a layer too few, or a shape that is not known."""
        for name in self._layout.layers:
            if name not in kv_caches:
                raise ValueError(f"kv_caches has no layer {name}")
            self._layout.parts(kv_caches[name])
        self._caches = kv_caches

    def _transfers(self, *, store: bool) -> list[Transfer]:
        metadata = self._connector_metadata
        if not isinstance(metadata, CtkvrMetadata):
            raise TypeError(f"the step's metadata is {type(metadata).__name__}; CtkvrMetadata is expected")
        return [transfer for transfer in metadata.transfers if transfer.store == store]

    def _session(self, session_id: str) -> ctkvr.Session:
        if session_id not in self._sessions:
            self._sessions[session_id] = self._client.attach_session(session_id)
        return self._sessions[session_id]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads every layer, and is done when it returns. What cannot be loaded is reported as blocks to compute."""
        for transfer in self._transfers(store=False):
            try:
                session = self._session(transfer.session_id)
                for layer, name in enumerate(self._layout.layers):
                    self._load(session, layer, self._caches[name], transfer)
            except CtkvrError as error:
                _log.warning("ctkvr: %d tokens are computed again: %s", transfer.end - transfer.begin, error)
                self._failed_blocks |= set(self._layout.places(transfer)[0].tolist())

    def _load(self, session: ctkvr.Session, layer: int, kv_layer: Any, transfer: Transfer) -> None:
        """The stored rows of the positions; a retrieval of all tokens with a query of zeros reads them back."""
        layout = self._layout
        parts = layout.parts(kv_layer)
        blocks, offsets = layout.places(transfer)
        shape = session.shape(layer)
        query = np.zeros((shape.q_heads, shape.head_dim), ctkvr.arrays.STORAGE[layout.dtype])
        token_bytes = layout.kv_heads * ((layout.head_dim + layout.value_dim) * query.itemsize + 8)
        step = max(1, _READ_BYTES_MAX // token_bytes)
        for begin in range(transfer.begin, transfer.end, step):
            end = min(begin + step, transfer.end)
            answer = session.retrieve(
                layer, query, end - 1, source="dense", row_format=_FORMATS[layout.dtype], local_sinks=begin
            )
            places = slice(begin - transfer.begin, end - transfer.begin)
            for part, sets in zip(parts, (answer.keys, answer.values), strict=True):
                rows = np.stack(list(sets or ()), axis=1)  # [tokens, kv_heads, dim]
                part[blocks[places], offsets[places]] = _like(part, rows)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """start_load_kv has waited."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Appends the layer's part of the step's saves. A save that fails costs a later load, and nothing else."""
        for transfer in self._transfers(store=True):
            if transfer.session_id in self._unsaved:
                continue
            blocks, offsets = self._layout.places(transfer)
            keys, values = (part[blocks, offsets] for part in self._layout.parts(kv_layer))
            try:
                layer = self._layout.layers.index(layer_name)
                self._session(transfer.session_id).append(layer, keys, values, first_position=transfer.begin)
            except CtkvrError as error:
                _log.warning("ctkvr: session %s takes no more: %s", transfer.session_id, error)
                self._unsaved.add(transfer.session_id)

    def wait_for_save(self) -> None:
        """save_kv_layer has waited."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Of the loads since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def shutdown(self) -> None:
        """Closes the connection, and in the scheduler's process the sessions: nobody would find them again."""
        for stored in self._stored.values():
            self._close(stored.session)
        self._stored.clear()
        self._client.close()


def _like(part: Any, rows: npt.NDArray[Any]) -> Any:
    """Rows for assignment to a part of the paged cache: numpy for numpy, torch on its device for torch."""
    return ctkvr.to_torch(rows).to(part.device) if is_torch(part) else rows
