"""Large initializers of a model file are found where they lie, without reading them. Path -> (ModelProto, Found).

A protobuf message is a sequence of (key, length, payload), so a walk over the keys of the model, of its graph and of
each initializer tells where `raw_data` begins: reading a model of 400 MB costs neither 400 MB nor the time to parse
them, and weights are mapped from the file when they are looked at. Anything unusual (typed data fields, several graphs,
a broken length) is left to protobuf itself, which also has the last word on whether the bytes are a model.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx

LARGE = 1 << 16  # bytes: smaller initializers are read with the rest
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # field numbers in onnx.proto
_PLAIN_TENSOR = frozenset({1, 2, 8, 9, 12})  # dims, data_type, name, raw_data, doc_string
_BYTES = 2  # wire type of everything that has a length


@dataclass(frozen=True, slots=True)
class Found:
    """An initializer left in the file: its fields without data, where the data lies, its place among the others."""

    header: onnx.TensorProto
    offset: int
    length: int
    place: int


@dataclass(frozen=True, slots=True)
class _Field:
    number: int
    wire: int
    key: int  # offset of the key
    start: int  # of the payload
    end: int


class _Unusual(Exception):  # noqa: N818 - ends the walk, never leaves this file
    pass


def scan(path: Path) -> tuple[bytes, list[Found]] | None:
    """The model's bytes without its large initializers, and those; None when protobuf should read the file itself."""
    if path.stat().st_size < LARGE:
        return None
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _split(data)
        except _Unusual:
            return None


def _split(data: mmap.mmap) -> tuple[bytes, list[Found]]:
    graphs: list[_Field] = []
    rest: list[bytes] = []
    for field in _fields(data, 0, len(data)):
        if field.number == _GRAPH and field.wire == _BYTES:
            graphs.append(field)
        else:
            rest.append(data[field.key : field.end])
    if len(graphs) != 1:
        raise _Unusual
    found: list[Found] = []
    kept: list[bytes] = []
    place, run = 0, graphs[0].start
    for field in _fields(data, graphs[0].start, graphs[0].end):
        if field.number != _INITIALIZER or field.wire != _BYTES:
            continue
        if field.end - field.start >= LARGE and (tensor := _tensor(data, field, place)) is not None:
            found.append(tensor)
            kept.append(data[run : field.key])
            run = field.end
        place += 1
    kept.append(data[run : graphs[0].end])
    graph = b"".join(kept)
    return b"".join([*rest, varint(_GRAPH << 3 | _BYTES), varint(len(graph)), graph]), found


def _tensor(data: mmap.mmap, tensor: _Field, place: int) -> Found | None:
    """An initializer with raw data and nothing unusual."""
    header: list[bytes] = []
    raw: list[_Field] = []
    for field in _fields(data, tensor.start, tensor.end):
        if field.number not in _PLAIN_TENSOR:
            return None
        if field.number == _RAW_DATA and field.wire == _BYTES:
            raw.append(field)
        else:
            header.append(data[field.key : field.end])
    if len(raw) != 1:
        return None
    proto = onnx.TensorProto()
    try:
        proto.ParseFromString(b"".join(header))
    except Exception as error:  # protobuf's DecodeError: protobuf shall say so of the whole file
        raise _Unusual from error
    return Found(proto, raw[0].start, raw[0].end - raw[0].start, place)


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[_Field]:
    at = start
    while at < end:
        key, payload = _read_varint(data, at, end)
        number, wire = key >> 3, key & 7
        match wire:
            case 0:  # varint
                stop = _read_varint(data, payload, end)[1]
            case 1:  # 64 bits
                stop = payload + 8
            case 2:  # a length, and as many bytes
                length, payload = _read_varint(data, payload, end)
                stop = payload + length
            case 5:  # 32 bits
                stop = payload + 4
            case _:
                raise _Unusual
        if stop > end or number == 0:
            raise _Unusual
        yield _Field(number, wire, at, payload, stop)
        at = stop


def _read_varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """(value, offset behind it)."""
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _Unusual


def varint(n: int) -> bytes:
    """A number in protobuf's variable-length form."""
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)
