# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers that decode through ctkvr. Needs ctkvr[transformers].

    import ctkvr.transformers  # registers attn_implementation="ctkvr"

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="ctkvr")
    with ctkvr.connect("127.0.0.1:7420") as client, ctkvr.transformers.CtkvrCache(model, client, 8192) as cache:
        model.generate(**inputs, cache=cache)

A prompt is read as usual, its keys and values go to the server meanwhile. From then on the model holds a window of the
newest tokens alone: each step asks the server, layer by layer, for the attention over everything before, and merges
it with its own over the window. Layers that see a sliding window, and calls with any other cache or none, attend as
with "sdpa".
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ctkvr.answer import Answer, Selection, Source
from ctkvr.attention import merge_attention
from ctkvr.client import Client, Session
from ctkvr.sequences import Question, Recovery, Sequences, Traffic
from ctkvr.torch import attend, attend_rows
from ctkvr.v1 import session_pb2

__all__ = ["NAME", "CtkvrCache", "Recovery", "Traffic"]

NAME = "ctkvr"  # of attn_implementation

# The tail that key clusters and index have not taken in is attended in full by the server. It is taken in at the end of
# a prompt or turn where it has so many tokens, and of decoded ones when there are so many.
_TURN_TOKENS = 128
_TAIL_TOKENS_MAX = 1024
_ROTATION_SEED = 1
_K_TOKENS = 256
_CANDIDATES = 512  # the server's default; there must be more of them than are chosen
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_FORK = "needs ForkSession, which ctkvr servers do not serve yet: generate with num_beams=1, or with a DynamicCache"


class CtkvrCache(Cache):  # type: ignore[misc]
    """Keys and values of a batch of sequences on a ctkvr server, one session each. Not thread-safe.

    Give it to generate() or to the model as `cache`; several calls go on from where the last one ended, and a further
    turn of a chat is a call with more tokens. crop() takes tokens back. The sessions are opened with the first tokens
    and closed by close() or the end of a `with`.

    Left padding, or padding between turns, is told from the attention mask and is not sent. Raises ctkvr.CtkvrError for
    what the server refuses; NotImplementedError for what would not be right: beam search, kinds of layers and of
    attention that are not served.
    """

    def __init__(
        self,
        model: Any,
        client: Client,
        token_limit: int,
        *,
        k: int | None = None,
        source: Source | None = None,
        selection: Selection | None = None,
        format: str = "k8v4",  # noqa: A002 (the contract's word)
        answer: Literal["attention", "rows"] = "attention",
        remainder: bool = True,
        window: int = 64,
        options: session_pb2.SessionOptions | None = None,
        keep: bool = True,
        patience: float = 60.0,
        on_recovery: Callable[[Recovery], object] | None = None,
    ) -> None:
        """model: whose attn_implementation is "ctkvr"; client: to the server.

        token_limit: most tokens of a sequence; the server admits their memory at once. k (default 256), source,
        selection, format, options: of Client.open_session(). answer "attention": the server attends to the tokens
        chosen; "rows": it sends their rows, and they are attended here. remainder: with an estimate of everything
        else. window: the newest tokens, attended here in full precision.
        keep: keys and values stay in this process's main memory too, so that a session that is lost, by a restart of
        the server for one, is filled again and the text goes on as it would have; patience: seconds to wait for the
        server then. Without it such a loss is a SessionLost, and what was generated is to be read again as a prompt.
        on_recovery: told of each such repair, as the log (logger "ctkvr") is.
        ValueError: another attn_implementation. NotImplementedError: a kind of layer that is not served.
        """
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation != NAME:
            raise ValueError(
                f"attn_implementation is {config._attn_implementation!r}; {NAME!r} is expected: load the model with it,"
                f' or model.set_attn_implementation("{NAME}")'
            )
        layers = [self._layer(index, layer, window) for index, layer in enumerate(DynamicCache(config=config).layers)]
        super().__init__(layers=layers)
        self._served = [index for index, layer in enumerate(layers) if isinstance(layer, _ServedLayer)]
        if not self._served:
            raise NotImplementedError("every layer of the model sees a sliding window: there is nothing to serve")
        selection = selection or Selection()
        chosen = k or selection.k or _K_TOKENS
        if selection.candidate_tokens is None and chosen > _CANDIDATES // 2:
            selection = replace(selection, candidate_tokens=2 * chosen)
        self._client = client
        self._answer = answer
        self._remainder = remainder
        self._keep: dict[str, Any] = {"keep": keep, "patience": patience, "on_recovery": on_recovery}
        self._options = session_pb2.SessionOptions()
        if options is not None:
            self._options.CopyFrom(options)
        if remainder and not self._options.HasField("key_clusters"):
            self._options.key_clusters.tokens_per_cluster = 16
        absent = [index for index in range(len(layers)) if index not in self._served]
        if absent:
            self._options.layer_overrides.add(layers=absent, absent=True)
        self._opening: dict[str, Any] = {
            "token_limit": token_limit,
            "k": chosen,
            "source": source,
            "selection": selection,
            "format": format,
            "layers": len(layers),
            # Only where it is asked for, so that the same text gives the same answers each time.
            "maintenance": "manual",
        }
        self._sequences: Sequences | None = None
        self._closed = False
        self._shape: _Shape | None = None
        self._tail = 0  # tokens since index and clusters took some in
        self._prompted = False  # some of them by more than one
        self._checked_mask: torch.Tensor | None = None

    def _layer(self, index: int, layer: Any, window: int) -> Any:
        if type(layer) is DynamicLayer:
            return _ServedLayer(self, index, window)
        if type(layer) in (DynamicSlidingWindowLayer, DummyLayer):
            return layer
        raise NotImplementedError(f"layer {index} is a {type(layer).__name__}; served are full attention layers")

    # ---- What users ask ----------------------------------------------------------------------------------------------

    @property
    def sessions(self) -> list[Session]:
        """One for each sequence of the batch; none before the first token."""
        return [] if self._sequences is None else list(self._sequences.sessions)

    @property
    def traffic(self) -> Traffic:
        """Bytes and seconds since the first token."""
        return Traffic() if self._sequences is None else self._sequences.traffic

    @property
    def recoveries(self) -> list[Recovery]:
        """How often sessions were lost and filled again."""
        return [] if self._sequences is None else list(self._sequences.recoveries)

    @property
    def kept_bytes(self) -> int:
        """Keys and values in this process's memory for the case that a session is lost."""
        return 0 if self._sequences is None else self._sequences.kept_bytes

    @property
    def window_bytes(self) -> int:
        """Keys and values that the model attends itself: all of a prompt until the first step, then the window."""
        layers = (self.layers[index] for index in self._served)
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers if layer.is_initialized)

    def adopt(self, cache: Cache) -> None:
        """Takes over the tokens of an unpadded DynamicCache of the same model: a prompt that was read before.

        They are sent with the next token, which still attends to all of them here. ValueError: this cache has tokens
        already. Query centroids get no queries of an adopted prompt.
        """
        if self.get_seq_length() != 0:
            raise ValueError(f"the cache has {self.get_seq_length()} tokens; adopt() fills an empty one")
        for index, layer in enumerate(cache.layers):
            if isinstance(self.layers[index], _ServedLayer):
                self.layers[index].hold(layer.keys, layer.values)
            else:
                self.layers[index] = copy.copy(layer)

    def close(self) -> None:
        """Ends the sessions; what was counted can still be read."""
        if self._sequences is not None and not self._closed:
            self._sequences.close()
        self._closed = True

    def __enter__(self) -> CtkvrCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- What transformers ask ---------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets everything; the sessions are closed, and the next token opens others."""
        self.close()
        self._sequences, self._closed = None, False
        self._shape, self._tail, self._prompted = None, 0, False
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the newest -tokens_to_remove tokens back, on the server too."""
        super().crop(tokens_to_remove)
        if tokens_to_remove and self._sequences is not None and not self._closed:
            rows = range(len(self._sequences.sessions))
            first: _ServedLayer = self.layers[self._served[0]]
            self._sequences.truncate([first.tokens_before(row, first.sent) for row in rows])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Not served."""
        raise NotImplementedError(f"beam search {_FORK}")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not served."""
        raise NotImplementedError(f"repeating sequences {_FORK}")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Not served."""
        raise NotImplementedError(f"selecting sequences {_FORK}")

    # ---- What layers ask ---------------------------------------------------------------------------------------------

    def open(self, shape: _Shape) -> Sequences:
        """The sessions, opened with the first tokens. NotImplementedError: another shape than theirs."""
        if self._closed:
            raise RuntimeError("the cache is closed; make another, or reset() it")
        if self._sequences is not None and self._shape == shape:
            return self._sequences
        if self._shape is not None and self._sequences is not None:
            raise NotImplementedError(
                f"a layer has {shape}; the first one has {self._shape}: sessions are of one shape"
            )
        options = session_pb2.SessionOptions()
        options.CopyFrom(self._options)
        options.softmax.softmax_scale = shape.scale
        # One that a session opened again has too.
        options.rotation_seed = options.rotation_seed or _ROTATION_SEED
        if shape.softcap is not None:
            options.softmax.logit_softcap = shape.softcap
        geometry = {name: getattr(shape, name) for name in ("q_heads", "kv_heads", "head_dim", "value_dim", "dtype")}
        opening = {**self._opening, **geometry, "options": options}
        settings: dict[str, Any] = {"answer": self._answer, "remainder": self._remainder}
        if self._answer == "rows":
            settings["row_format"] = "storage"
        self._shape = shape
        self._sequences = Sequences(
            self._client,
            lambda: self._client.open_session(**opening),
            shape.batch,
            self._served,
            **self._keep,
            **settings,
        )
        return self._sequences

    @property
    def positions_max(self) -> int:
        """Query positions of a sequence in a message; rows are large, so fewer of them."""
        limit: int = self._client.core.connection.info.limits.query_positions_max
        return min(limit, 64 if self._answer == "attention" else 8)

    def note_new(self, index: int, tokens: int) -> None:
        """Once a forward pass: counts its tokens."""
        if index == self._served[0]:
            self._tail += tokens
            self._prompted = self._prompted or tokens > 1

    def index_before(self, index: int, tokens: int) -> None:
        """Once a forward pass, before anything of it is asked: what came before is indexed, where it is time."""
        turn_ended = self._prompted and tokens == 1 and self._tail >= _TURN_TOKENS
        if index == self._served[0] and self._sequences is not None and (turn_ended or self._tail >= _TAIL_TOKENS_MAX):
            self._sequences.maintain()
            self._tail, self._prompted = 0, False

    def check_mask(self, mask: torch.Tensor, seen: torch.Tensor, new: torch.Tensor) -> None:
        """NotImplementedError: the mask is more than causal with padding. seen [batch, tokens], new its last tokens."""
        if mask is self._checked_mask:
            return
        tokens, queries = seen.shape[1], new.shape[1]
        causal = _causal(queries, tokens, mask.device)
        expected = seen[:, None, None, :] & causal
        if not bool(((mask == expected) | ~new[:, None, :, None]).all()):
            raise NotImplementedError("the attention mask is not that of a causal model with padding; it is not served")
        self._checked_mask = mask


@dataclass(frozen=True)
class _Shape:
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    scale: float
    softcap: float | None


class _ServedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A full attention layer: a window of keys and values here, everything before it on the server.

    Columns are what transformers count, padding included; tokens are what sessions hold. Columns [begin, length) are
    here, columns [0, sent) on the server.
    """

    is_sliding = False
    is_croppable = True
    keys: Any
    values: Any

    def __init__(self, owner: CtkvrCache, index: int, window: int) -> None:
        super().__init__()
        self.owner = owner
        self.index = index
        self.window = window
        self._forget()

    def _forget(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.begin = self.length = self.sent = 0
        self.real: torch.Tensor | None = None  # [batch, length], False where a column is padding; None: nowhere
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None  # given to attention that has not come yet

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Of the first tokens' type and device."""
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Tokens that were read elsewhere: sent with the next ones."""
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.length = keys, values, keys.shape[2]

    def _columns_kept(self, new: int) -> int:
        """Of the columns here, so many stay when `new` ones come: all while a prompt is read, else the window."""
        here = self.length - self.begin
        reading = self.begin == 0 and (new > 1 or self.sent < self.length)
        return here if reading else min(here, self.window)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that update() will give for so many new ones, and the first of them."""
        kept = self._columns_kept(query_length)
        return kept + query_length, self.length - kept

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes new columns; gives those here, marked so that attention finds the layer."""
        if self._new is not None:
            raise RuntimeError(
                f"layer {self.index} gave keys to an attention that is not {NAME!r}, or a pass was broken off: "
                "load the model with that attn_implementation, and reset() this cache"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[2]
        kept = self._columns_kept(new)
        here = self.length - self.begin
        self.keys = torch.cat([self.keys[:, :, here - kept :], key_states], dim=2)
        self.values = torch.cat([self.values[:, :, here - kept :], value_states], dim=2)
        self.begin = self.length - kept
        self.length += new
        self._new = key_states, value_states
        given = self.keys.view_as(self.keys)
        given.ctkvr_layer = self
        return given, self.values

    def get_seq_length(self) -> int:
        """Columns."""
        return int(self.length)

    def get_max_length(self) -> int:
        """No limit here: the server names the session's."""
        return -1

    def reset(self) -> None:
        """Forgets everything."""
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes columns back; CtkvrCache.crop() tells the server."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}; the negative of a number of tokens is expected")
        if not self.is_initialized:
            return
        self.length = max(self.length + tokens_to_remove, 0)
        self.begin, self.sent = min(self.begin, self.length), min(self.sent, self.length)
        here = self.length - self.begin
        self.keys, self.values = self.keys[:, :, :here], self.values[:, :, :here]
        self.real = None if self.real is None else self.real[:, : self.length]

    def tokens_before(self, row: int, column: int) -> int:
        """Tokens of a sequence in columns [0, column)."""
        return column if self.real is None else int(self.real[row, :column].sum())

    # ---- Attention ---------------------------------------------------------------------------------------------------

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        softcap: float | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The attention of the columns that update() took last: [batch, positions, q_heads, value_dim]."""
        if self._new is None or module.layer_idx != self.index:
            raise NotImplementedError(f"layer {module.layer_idx} attends to the keys of layer {self.index}")
        key, value = self._new
        dtype = _DTYPES.get(key.dtype)
        if dtype is None:
            raise NotImplementedError(f"keys are {key.dtype}; served are {', '.join(map(str, _DTYPES))}")
        shape = _Shape(len(query), query.shape[1], key.shape[1], key.shape[3], value.shape[3], dtype, scale, softcap)
        self._note_padding(mask, query.shape[2])
        self.owner.index_before(self.index, query.shape[2])
        sequences = self.owner.open(shape)
        if self.begin == 0:
            output = _attend_here(module, query, self.keys, self.values, mask, scale, softcap, **kwargs)
            self._send(sequences, query)
        else:
            output = self._ask(sequences, query, mask, shape)
        self._new, self.sent = None, self.length
        self.owner.note_new(self.index, query.shape[2])
        return output

    def _note_padding(self, mask: torch.Tensor | None, new: int) -> None:
        """What of the new columns is padding, from the mask's last query, which sees everything that is not."""
        if mask is None:
            if self.real is not None:
                self.real = torch.nn.functional.pad(self.real, (0, self.length - self.real.shape[1]), value=True)
            return
        if mask.dtype != torch.bool:
            raise NotImplementedError(f"the attention mask is {mask.dtype}; served are those that transformers make")
        batch = len(self.keys)
        found = mask[:, 0, -1, -new:].expand(batch, new)
        if self.real is None and not bool(found.all()):
            self.real = found.new_ones((batch, self.length - new))
        if self.real is not None:
            self.real = torch.cat([self.real, found], dim=1)
        here = found.new_ones((batch, self.length - self.begin)) if self.real is None else self.real[:, self.begin :]
        self.owner.check_mask(mask, here, found)

    def _rows(self, tensor: torch.Tensor, row: int, first: int) -> torch.Tensor:
        """[tokens, heads, dim] of a sequence, without padding, of a tensor whose first column is `first`."""
        found = tensor[row].detach().transpose(0, 1)
        if self.real is not None:
            found = found[self.real[row, first : first + len(found)]]
        return found.contiguous()

    def _send(self, sequences: Sequences, query: torch.Tensor) -> None:
        new = query.shape[2]
        keys, values = (tensor[:, :, self.sent :] for tensor in (self.keys, self.values))
        first, asked = self.sent, self.sent == self.length - new
        for row in range(len(query)):
            found = [self._rows(tensor, row, first) for tensor in (keys, values, query)[: 3 if asked else 2]]
            if len(found[0]):
                sequences.append(row, self.index, *found)

    def _ask(self, sequences: Sequences, query: torch.Tensor, mask: torch.Tensor | None, shape: _Shape) -> torch.Tensor:
        new = query.shape[2]
        first = self.length - new
        assert self._new is not None  # noqa: S101 (for mypy)
        questions = []
        for row in range(shape.batch):
            keys, values, queries = (self._rows(tensor, row, first) for tensor in (*self._new, query))
            if len(keys):
                questions.append(Question(row, keys, values, queries, self.tokens_before(row, self.begin)))
        if mask is None and new > 1:
            mask = _causal(new, self.length - self.begin, query.device)

        def own() -> tuple[torch.Tensor, torch.Tensor]:
            found = attend(query, self.keys, self.values, scale=shape.scale, softcap=shape.softcap, mask=mask)
            return found[0].transpose(1, 2), found[1].transpose(1, 2)

        if not questions:
            return own()[0].to(query.dtype)
        answers, here = sequences.ask(self.index, questions, self.owner.positions_max, own)
        parts = [here]
        for part in self._parts(questions, answers, shape):
            parts.append(self._spread(part, questions, first, new, shape))
        return merge_attention(parts)[0].to(query.dtype)

    @staticmethod
    def _parts(questions: list[Question], answers: list[list[Answer]], shape: _Shape) -> list[list[tuple[Any, Any]]]:
        """Chosen tokens and, where it was asked for, remainder: each for every question ([tokens, q_heads, V], sum)."""
        chosen: list[tuple[Any, Any]] = []
        rest: list[tuple[Any, Any]] = []
        for question, found in zip(questions, answers, strict=True):
            if found[0].output is not None:
                chosen.append(_joined([(a.output, a.log_sum_exp) for a in found]))
            else:
                pieces = question.queries.split([len(a.counts) for a in found])
                attended = [
                    attend_rows(queries, a, scale=shape.scale, softcap=shape.softcap)
                    for queries, a in zip(pieces, found, strict=True)
                ]
                chosen.append(_joined([(output.cpu().numpy(), total.cpu().numpy()) for output, total in attended]))
            if found[0].remainder_output is not None:
                rest.append(_joined([(a.remainder_output, a.remainder_log_sum_exp) for a in found]))
        return [part for part in (chosen, rest) if part]

    def _spread(
        self, part: list[tuple[Any, Any]], questions: list[Question], first: int, new: int, shape: _Shape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of every sequence and new column [batch, positions, ...]; nothing where it is padding."""
        output = np.zeros((shape.batch, new, shape.q_heads, shape.value_dim), np.float32)
        total = np.full((shape.batch, new, shape.q_heads), -np.inf, np.float32)
        for (found, sum_), question in zip(part, questions, strict=True):
            real: Any = slice(None) if self.real is None else self.real[question.row, first:].cpu().numpy()
            output[question.row, real], total[question.row, real] = found, sum_
        device = self.keys.device
        return torch.from_numpy(output).to(device), torch.from_numpy(total).to(device)


def _joined(parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def _causal(queries: int, tokens: int, device: Any) -> torch.Tensor:
    """[queries, tokens], the queries being those of the last tokens."""
    return torch.ones((queries, tokens), dtype=torch.bool, device=device).tril(tokens - queries)


def _attend_here(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    **kwargs: Any,
) -> torch.Tensor:
    """As attn_implementation "sdpa", which knows no softcap."""
    if softcap is None:
        output: torch.Tensor = sdpa_attention_forward(module, query, key, value, mask, scaling=scale, **kwargs)[0]
        return output
    if mask is None:
        mask = _causal(query.shape[2], key.shape[2], query.device)
    return attend(query, key, value, scale=scale, softcap=softcap, mask=mask)[0].transpose(1, 2).to(query.dtype)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers call for attn_implementation "ctkvr"."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: _ServedLayer | None = getattr(key, "ctkvr_layer", None)
    if layer is None:
        return _attend_here(module, query, key, value, attention_mask, scale, softcap, **kwargs), None
    for option in ("s_aux", "position_bias"):
        if kwargs.get(option) is not None:
            raise NotImplementedError(f"the model's attention has {option}; that is not served")
    if kwargs.get("dropout") or kwargs.get("is_causal") is False:
        raise NotImplementedError("attention with dropout, or that is not causal, is not served: call model.eval()")
    return layer.attend(module, query, attention_mask, scale, softcap, **kwargs), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
