# SPDX-License-Identifier: Apache-2.0
"""Takes the rows out of a large reply before it is parsed: they stay where they lie in the bytes that came.

Parsing copies every bytes field, and each look at one copies it again: for rows of a megabyte that is most of what a
step costs in Python. So Answer.keys and Answer.values are cut out of the wire form (protobuf's, of tags, lengths and
payloads), and what is left, a few hundred bytes, is parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from ctkvr.v1 import cache_pb2

__all__ = ["Reply", "reader"]

# Below this, copies cost less than cutting them out.
_LARGE_BYTES = 1 << 15

_LENGTH_DELIMITED = 2
_KEYS = cache_pb2.Answer.DESCRIPTOR.fields_by_name["keys"].number
_VALUES = cache_pb2.Answer.DESCRIPTOR.fields_by_name["values"].number

Rows = dict[int, memoryview]  # by number of the field


@dataclass(frozen=True)
class Reply:
    """A RetrieveReply or DecodeReply."""

    message: Any
    rows: list[Rows] | None  # of each item; None: they are in the message

    @property
    def header(self) -> cache_pb2.ReplyHeader:
        """The message's."""
        header: cache_pb2.ReplyHeader = self.message.header
        return header

    def rows_of(self, item: int) -> tuple[bytes | memoryview, bytes | memoryview]:
        """Answer.keys and Answer.values of an item."""
        if self.rows is None:
            answer = self.message.items[item].answer
            return answer.keys, answer.values
        return self.rows[item].get(_KEYS, b""), self.rows[item].get(_VALUES, b"")


def reader(message_class: Any) -> Callable[[bytes], Reply]:
    """Reads replies of that class, which has `items`, each with an `answer`."""
    items = message_class.DESCRIPTOR.fields_by_name["items"]
    answer = items.message_type.fields_by_name["answer"]

    def read(data: bytes) -> Reply:
        if len(data) < _LARGE_BYTES:
            return Reply(message_class.FromString(data), None)
        rows: list[Rows] = []
        rest = _without_rows(memoryview(data), (items.number, answer.number), rows)
        return Reply(message_class.FromString(rest), rows)

    return read


def _without_rows(data: memoryview, path: tuple[int, ...], rows: list[Rows]) -> bytes:
    """`data` without the rows at the end of `path`, which are added to `rows`, an entry for each field at its begin."""
    kept = bytearray()
    for number, begin, payload, end in _fields(data):
        if path and number == path[0]:
            if len(path) == 2:  # an item
                rows.append({})
            inner = _without_rows(data[payload:end], path[1:], rows)
            kept += _varint(number << 3 | _LENGTH_DELIMITED) + _varint(len(inner)) + inner
        elif not path and number in (_KEYS, _VALUES):
            rows[-1][number] = data[payload:end]
        else:
            kept += data[begin:end]
    return bytes(kept)


def _fields(data: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """(number, begin, begin of the payload, end) of each field. DecodeError: that is no message."""
    position, size = 0, len(data)
    try:
        while position < size:
            begin = position
            tag, position = _read_varint(data, position)
            kind = tag & 7
            if kind == _LENGTH_DELIMITED:
                length, position = _read_varint(data, position)
                payload, position = position, position + length
            elif kind == 0:
                payload = position
                _, position = _read_varint(data, position)
            elif kind in (1, 5):
                payload, position = position, position + (8 if kind == 1 else 4)
            else:
                raise DecodeError(f"a field of wire type {kind}")
            if position > size:
                raise DecodeError("a field goes beyond its message")
            yield tag >> 3, begin, payload, position
    except IndexError:
        raise DecodeError("a number goes beyond its message") from None


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
