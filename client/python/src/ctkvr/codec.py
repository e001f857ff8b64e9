# SPDX-License-Identifier: Apache-2.0
"""Between Python values and the messages of the contract: checks, conversions, splitting. No calls are made here."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import xxhash

from ctkvr.answer import Answer, AnswerMode, RowFormat, Selection, Sets, Source
from ctkvr.arrays import STORAGE, DTypeName, elements, from_bfloat16
from ctkvr.errors import ProtocolError
from ctkvr.row_cache import HeldRows, NewRows
from ctkvr.rows import LayerShape, RowDecoder
from ctkvr.v1 import cache_pb2, session_pb2, tensor_pb2

# Room for id, fingerprint, dims and field tags beside the arrays of a message.
_MESSAGE_OVERHEAD_BYTES = 1024

_DTYPES: dict[str, tensor_pb2.DType] = {
    "float32": tensor_pb2.DTYPE_F32,
    "float16": tensor_pb2.DTYPE_F16,
    "bfloat16": tensor_pb2.DTYPE_BF16,
}
_DTYPE_NAMES: dict[int, DTypeName] = {value: cast("DTypeName", name) for name, value in _DTYPES.items()}


class _Enum(Protocol):
    def keys(self) -> list[str]: ...
    def Value(self, name: str) -> Any: ...  # noqa: N802 (the generated class's name)
    def Name(self, number: Any) -> str: ...  # noqa: N802


def enum_value(enum: _Enum, prefix: str, name: str, field: str) -> Any:
    """SOURCE_EXACT of "exact". ValueError: no such name; the text lists those there are."""
    full = prefix + name.upper()
    names = enum.keys()
    if full not in names:
        known = ", ".join(key.removeprefix(prefix).lower() for key in names[1:])
        raise ValueError(f"{field} is {name!r}; it is one of {known}")
    return enum.Value(full)


def enum_name(enum: _Enum, prefix: str, number: int) -> str:
    """The name "exact" of SOURCE_EXACT."""
    return enum.Name(number).removeprefix(prefix).lower()


# ---- Selection -------------------------------------------------------------------------------------------------------

# Fields that are called otherwise here, and the enums.
_FIELD_NAMES = {"k": "k_tokens"}
_FIELD_ENUMS: dict[str, tuple[_Enum, str]] = {
    "source": (session_pb2.Source, "SOURCE_"),
    "reduction": (session_pb2.GroupReduction, "GROUP_REDUCTION_"),
}


@functools.lru_cache(maxsize=256)
def encode_selection(selection: Selection) -> session_pb2.Selection:
    """Fields that are None stay unset. The message is for all who ask: it is copied, not changed."""
    message = session_pb2.Selection()
    for field in fields(selection):
        value = getattr(selection, field.name)
        if value is None:
            continue
        if field.name in _FIELD_ENUMS:
            value = enum_value(*_FIELD_ENUMS[field.name], value, field.name)
        setattr(message, _FIELD_NAMES.get(field.name, field.name), value)
    return message


def decode_selection(message: session_pb2.Selection) -> Selection:
    """Fields that are unset become None."""
    return _decode_selection(message.SerializeToString())


@functools.lru_cache(maxsize=256)  # from step to step it stays the same
def _decode_selection(data: bytes) -> Selection:
    message = session_pb2.Selection.FromString(data)
    values: dict[str, Any] = {}
    for field in fields(Selection):
        name = _FIELD_NAMES.get(field.name, field.name)
        if not message.HasField(cast("Any", name)):
            continue
        value = getattr(message, name)
        values[field.name] = enum_name(*_FIELD_ENUMS[field.name], value) if field.name in _FIELD_ENUMS else value
    return Selection(**values)


def merge_selection(selection: Selection | None, k: int | None, source: Source | None) -> Selection:
    """`selection` with the two settings that have arguments of their own."""
    merged = selection or Selection()
    if k is not None:
        merged = replace(merged, k=k)
    if source is not None:
        merged = replace(merged, source=source)
    return merged


# ---- Sessions --------------------------------------------------------------------------------------------------------


def set_geometry(options: session_pb2.SessionOptions, dtype: str | None, sizes: Mapping[str, int | None]) -> None:
    """Lays what is given over options.geometry. ValueError: an unknown dtype."""
    for name, value in sizes.items():
        if value is not None:
            setattr(options.geometry, name, value)
    if dtype is None:
        return
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it is one of {', '.join(_DTYPES)}")
    options.geometry.dtype = _DTYPES[dtype]


def shape_of_layer(options: session_pb2.SessionOptions, layer: int) -> LayerShape:
    """The shape of a layer, overrides applied in order. IndexError: a layer that is not there."""
    geometry = options.geometry
    if not 0 <= layer < geometry.layers:
        raise IndexError(f"layer is {layer}; the session has {geometry.layers}")
    shape = LayerShape(
        q_heads=geometry.q_heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        value_dim=geometry.value_dim or geometry.head_dim,
        dtype=_DTYPE_NAMES[geometry.dtype],
    )
    for override in options.layer_overrides:
        if layer not in override.layers:
            continue
        names = ("q_heads", "kv_heads", "head_dim", "value_dim")
        given = {name: getattr(override, name) for name in names if override.HasField(cast("Any", name))}
        shape = replace(shape, absent=shape.absent or override.absent, **given)
        shape = replace(shape, value_dim=shape.value_dim or shape.head_dim)
    return shape


# ---- Chunks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one layer, checked against its shape. Arrays as `elements` gives them."""

    shape: LayerShape
    layer: int
    keys: npt.NDArray[Any]  # [tokens, kv_heads, head_dim]
    values: npt.NDArray[Any]  # [tokens, kv_heads, value_dim]
    queries: npt.NDArray[Any]  # [positions, q_heads, head_dim], of the last tokens
    weights: npt.NDArray[np.float32]  # [tokens], or empty
    classes: npt.NDArray[np.uint32]  # [tokens], or empty

    @property
    def tokens(self) -> int:
        """How many."""
        return len(self.keys)

    def part(self, begin: int, end: int) -> Chunk:
        """Tokens [begin, end), without a copy."""
        first_query = self.tokens - len(self.queries)
        queries = self.queries[max(begin - first_query, 0) : max(end - first_query, 0)]
        return replace(
            self,
            keys=self.keys[begin:end],
            values=self.values[begin:end],
            queries=queries,
            weights=self.weights[begin:end],
            classes=self.classes[begin:end],
        )

    def encode(self, first_position: int) -> cache_pb2.Chunk:
        """As a message."""
        message = cache_pb2.Chunk(
            layer=self.layer,
            first_position=first_position,
            keys=_encode_tensor(self.keys, self.shape.dtype),
            values=_encode_tensor(self.values, self.shape.dtype),
        )
        if len(self.queries):
            message.queries.CopyFrom(_encode_tensor(self.queries, self.shape.dtype))
        message.weights.extend(self.weights.tolist())
        message.classes.extend(self.classes.tolist())
        return message

    def checksum(self) -> int:
        """AppendRequest.checksum."""
        hasher = xxhash.xxh3_64()
        for array in (self.keys, self.values, self.queries):
            if array.size:
                hasher.update(array.reshape(-1).view(np.uint8).data)
        return int(hasher.intdigest())


@dataclass(frozen=True)
class Tags:
    """What a chunk's tokens are tagged with, for the policies of a session that was opened with tags. None: 0."""

    weights: Any = None  # [tokens], from 0: TF-IDF, say
    classes: Any = None  # [tokens], 0 to 255: syntax class or modality, say


def make_chunk(
    shape: LayerShape, layer: int, keys: Any, values: Any, queries: Any = None, tags: Tags | None = None
) -> Chunk:
    """Checks arrays against the layer. ValueError: dims; TypeError: element type. One token may come without its axis.

    keys [tokens, kv_heads, head_dim], values [tokens, kv_heads, value_dim], queries [positions, q_heads, head_dim].
    """
    key_array = _checked(keys, shape.dtype, "keys", (shape.kv_heads, shape.head_dim))
    value_array = _checked(values, shape.dtype, "values", (shape.kv_heads, shape.value_dim))
    if queries is None:
        query_array: npt.NDArray[Any] = np.empty((0, shape.q_heads, shape.head_dim), STORAGE[shape.dtype])
    else:
        query_array = _checked(queries, shape.dtype, "queries", (shape.q_heads, shape.head_dim))
    if len(key_array) == 0:
        raise ValueError("keys has no token")
    if len(value_array) != len(key_array):
        raise ValueError(f"values has {len(value_array)} tokens; keys has {len(key_array)}")
    if len(query_array) > len(key_array):
        raise ValueError(f"queries has {len(query_array)} positions; keys has {len(key_array)} tokens")
    tags = tags or Tags()
    weights = _checked_tags(tags.weights, np.float32, "weights", len(key_array))
    classes = _checked_tags(tags.classes, np.uint32, "classes", len(key_array))
    return Chunk(shape, layer, key_array, value_array, query_array, weights, classes)


def _checked_tags(tags: Any, dtype: type[np.generic], name: str, tokens: int) -> npt.NDArray[Any]:
    found = np.asarray([] if tags is None else tags)
    if tags is not None and found.shape != (tokens,):
        raise ValueError(f"{name} has dims {list(found.shape)}; [{tokens}] is expected")
    return found.astype(dtype)


def _checked(array: Any, dtype: str, name: str, row: tuple[int, int]) -> npt.NDArray[Any]:
    found = elements(array, dtype, name)
    if found.shape == row:
        found = found[np.newaxis]
    if found.ndim != 3 or found.shape[1:] != row:
        raise ValueError(f"{name} has dims {list(found.shape)}; [n, {row[0]}, {row[1]}] is expected")
    return found


def _encode_tensor(array: npt.NDArray[Any], dtype: str) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=_DTYPES[dtype], dims=array.shape, data=array.tobytes())


def tokens_per_message(chunk: Chunk, limits: cache_pb2.ServerLimits, append_bytes: int) -> int:
    """How many tokens of the chunk a message may carry."""
    budget = append_bytes
    if limits.message_bytes_max:
        budget = min(budget, limits.message_bytes_max - _MESSAGE_OVERHEAD_BYTES)
    optional = (array for array in (chunk.queries, chunk.weights, chunk.classes) if len(array))
    arrays = (chunk.keys, chunk.values, *optional)
    tokens = budget // sum(array[0].nbytes for array in arrays)
    return int(max(1, min(tokens, limits.append_tokens_max or tokens)))


def parts_of(chunk: Chunk, begin: int, step: int) -> Iterator[tuple[int, Chunk]]:
    """(offset, part) of the chunk's tokens from `begin` on, at most `step` tokens each."""
    for offset in range(begin, chunk.tokens, step):
        yield offset, chunk.part(offset, min(offset + step, chunk.tokens))


# ---- Queries and answers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuerySettings:
    """What a retrieval asks for beside layer, position and queries."""

    selection: Selection
    answer: AnswerMode
    row_format: RowFormat | None
    local_begin: int | None = None
    local_sinks: int = 0
    remainder: bool = False
    decode_rows: bool = True

    def __post_init__(self) -> None:
        """ValueError: rows that do not travel as stored cannot be left so."""
        if not self.decode_rows and self.row_format != "storage":
            raise ValueError(f'decode_rows=False needs row_format="storage"; row_format is {self.row_format!r}')


def query_array(shape: LayerShape, queries: Any) -> npt.NDArray[Any]:
    """The queries [positions, q_heads, head_dim] of one or more positions, checked."""
    found = _checked(queries, shape.dtype, "queries", (shape.q_heads, shape.head_dim))
    if len(found) == 0:
        raise ValueError("queries has no position")
    return found


def encode_query(
    shape: LayerShape,
    layer: int,
    position: int,
    queries: npt.NDArray[Any],
    settings: QuerySettings,
    held: HeldRows | None = None,
) -> cache_pb2.Query:
    """As a message. `position` is that of the first query."""
    return cache_pb2.Query(
        layer=layer,
        position=position,
        queries=_encode_tensor(queries, shape.dtype),
        selection=encode_selection(settings.selection),
        local_begin=settings.local_begin,
        local_sinks=settings.local_sinks,
        cache_version=0 if held is None else held.version,
    )


def encode_answer_options(settings: QuerySettings, known_code_generation: int) -> cache_pb2.AnswerOptions:
    """As a message."""
    row_format = tensor_pb2.ROW_FORMAT_UNSPECIFIED
    if settings.row_format is not None:
        row_format = enum_value(tensor_pb2.RowFormat, "ROW_FORMAT_", settings.row_format, "row_format")
    return cache_pb2.AnswerOptions(
        mode=enum_value(cache_pb2.AnswerMode, "ANSWER_MODE_", settings.answer, "answer"),
        row_format=row_format,
        known_code_generation=known_code_generation,
        remainder=settings.remainder,
    )


class Decoders:
    """The row decoders of a session, by layer and code generation, from the codecs that answers bring."""

    def __init__(self) -> None:
        self._decoders: dict[tuple[int, int], RowDecoder] = {}

    def known_generation(self, layer: int) -> int:
        """AnswerOptions.known_code_generation."""
        return 1 if (layer, 1) in self._decoders else 0

    def find(self, layer: int, message: cache_pb2.Answer, shape: LayerShape) -> RowDecoder:
        """The decoder of an answer's rows. ProtocolError: its codec is neither there nor known, or does not fit."""
        key = (layer, message.code_generation)
        if message.HasField("codec") and key not in self._decoders:
            try:
                self._decoders[key] = RowDecoder(message.codec, shape)
            except ValueError as error:
                raise ProtocolError("INTERNAL", f"answer.{error}") from error
        if key not in self._decoders:
            raise ProtocolError("INTERNAL", f"the answer has no codec for code generation {key[1]}")
        return self._decoders[key]


@dataclass(frozen=True)
class Place:
    """Which layer an answer is of."""

    layer: int
    shape: LayerShape
    decoders: Decoders  # of its session


_ROW_DTYPES: dict[str, str] = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def decode_answer(
    message: cache_pb2.Answer,
    rows_sent: tuple[bytes | memoryview, bytes | memoryview],
    place: Place,
    decode_rows: bool = True,
    held: HeldRows | None = None,
) -> Answer:
    """The answer of one layer.

    rows_sent: keys and values, which need not be in the message (ctkvr.wire). held: of an answer with new rows, which
    are taken into that cache. ProtocolError: sizes that do not fit each other or the layer; StaleAnswer.
    """
    layer, shape, decoders = place.layer, place.shape, place.decoders
    used = decode_selection(message.used)
    sets, set_heads = shape.kv_heads, shape.group_heads
    if used.reduction == "per_head":
        sets, set_heads = shape.q_heads, 1
    counts = _counts(message.counts, sets, "counts")
    attends = message.HasField("output")  # instead of everything a token
    # Whose ids and rows travel.
    sent = (
        np.zeros_like(counts)
        if attends
        else counts
        if held is None
        else _counts(message.new_counts, sets, "new_counts")
    )
    ids, rows = _array(message.ids, "<u4", (_sum(sent),), "ids"), _sum(counts)
    scores = None
    if not attends and held is None and (message.scores or rows == 0):
        scores = Sets(counts, _array(message.scores, "<f4", (rows * set_heads,), "scores"), set_heads)
    keys = values = decoder = None
    row_format: RowFormat | None = None
    key_bytes, value_bytes = rows_sent
    if key_bytes or value_bytes or held is not None:
        row_format = cast("RowFormat", enum_name(tensor_pb2.RowFormat, "ROW_FORMAT_", message.row_format))
        if row_format != "storage":
            arrays = _plain_rows(key_bytes, value_bytes, shape, _sum(sent), row_format)
        else:
            decoder = decoders.find(layer, message, shape)
            arrays = _stored_rows(key_bytes, value_bytes, _sum(sent), decoder)
        if decoder is not None and decode_rows:
            heads = np.repeat(np.tile(np.arange(sets) * set_heads // shape.group_heads, len(sent)), sent.ravel())
            arrays = decoder.keys(arrays[0], heads), decoder.values(arrays[1])
        if held is not None:
            new = _new_rows(message, counts, sent, ids, arrays)
            taken = held.cache.take(new, held.version)
            ids, arrays = taken.ids, (taken.keys, taken.values)
        keys, values = (Sets(counts, flat) for flat in arrays)
    return Answer(
        counts=counts,
        ids=Sets(sent if attends else counts, ids),
        scores=scores,
        keys=keys,
        values=values,
        row_format=row_format,
        used=used,
        source=cast("Source", enum_name(session_pb2.Source, "SOURCE_", message.source)),
        length=message.length,
        indexed_length=message.indexed_length,
        bytes_read=message.bytes_read,
        always_tokens=message.always_tokens,
        code_generation=message.code_generation,
        decoder=None if decode_rows else decoder,
        new_rows=None if held is None else _sum(sent),
        **{name: _part_of(message, name, len(counts), shape) for name in _PARTS},
    )


_PARTS = ("output", "log_sum_exp", "remainder_output", "remainder_log_sum_exp")


def _part_of(message: cache_pb2.Answer, name: str, positions: int, shape: LayerShape) -> npt.NDArray[np.float32] | None:
    """One array of _PARTS, as float32; None: the answer has none."""
    if not message.HasField(cast("Any", name)):
        return None
    tensor = getattr(message, name)
    dims = (positions, shape.q_heads, shape.value_dim)[: 2 if name.endswith("log_sum_exp") else 3]
    dtype = _DTYPE_NAMES.get(tensor.dtype)
    if tuple(tensor.dims) != dims or dtype is None:
        raise ProtocolError(
            "INTERNAL",
            f"answer.{name} has dims {list(tensor.dims)} of dtype {tensor.dtype}; {list(dims)} are expected",
        )
    found = _array(tensor.data, STORAGE[dtype], dims, name)
    return from_bfloat16(found) if dtype == "bfloat16" else np.asarray(found, np.float32)


def _counts(numbers: Any, sets: int, name: str) -> npt.NDArray[np.uint32]:
    """[P, G]."""
    counts = np.array(numbers, np.uint32)
    if len(counts) % sets:
        raise ProtocolError("INTERNAL", f"answer.{name} has {len(counts)} numbers; a multiple of {sets} is expected")
    return counts.reshape(-1, sets)


def _sum(counts: npt.NDArray[np.uint32]) -> int:
    return int(counts.sum(dtype=np.int64))


def _new_rows(
    message: cache_pb2.Answer,
    counts: npt.NDArray[np.uint32],
    new_counts: npt.NDArray[np.uint32],
    ids: npt.NDArray[np.uint32],
    rows: tuple[npt.NDArray[Any], npt.NDArray[Any]],
) -> NewRows:
    if counts.shape != new_counts.shape:
        raise ProtocolError(
            "INTERNAL", f"answer.new_counts has {new_counts.size} numbers; {counts.size}, as counts, are expected"
        )
    return NewRows(
        counts=counts,
        slots=_array(message.slots, "<u2", (_sum(counts),), "slots"),
        new_counts=new_counts,
        new_slots=_array(message.new_slots, "<u2", (_sum(new_counts),), "new_slots"),
        ids=ids,
        keys=rows[0],
        values=rows[1],
        version=message.cache_version,
    )


def _plain_rows(
    keys: bytes | memoryview, values: bytes | memoryview, shape: LayerShape, rows: int, row_format: RowFormat
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    dtype = STORAGE[_ROW_DTYPES[row_format]]
    return (
        _array(keys, dtype, (rows, shape.head_dim), "keys"),
        _array(values, dtype, (rows, shape.value_dim), "values"),
    )


def _stored_rows(
    keys: bytes | memoryview, values: bytes | memoryview, rows: int, decoder: RowDecoder
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    return (
        _array(keys, "u1", (rows, decoder.key_row_bytes), "keys"),
        _array(values, "u1", (rows, decoder.value_row_bytes), "values"),
    )


def _array(data: bytes | memoryview, dtype: npt.DTypeLike, shape: tuple[int, ...], name: str) -> npt.NDArray[Any]:
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if len(data) != expected:
        raise ProtocolError("INTERNAL", f"answer.{name} has {len(data)} bytes; {expected} are expected")
    return np.frombuffer(data, dtype).reshape(shape)
