"""A model from anywhere -> Loaded: a ModelProto without initializer data, and the tensors beside it.

The split keeps large models out of protobuf: everything later copies, checks and serialises the small skeleton, and
tensors are handed from input to output as objects. External data is memory-mapped when read. The caller's object is
never changed. All complaints are UsageErrors that name the object and the numbers.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]

from onnxfuse.errors import UsageError
from onnxfuse.frontend.protos import all_graphs, domain_of, raw_bytes, subgraphs
from onnxfuse.frontend.wire import Found, scan

ModelLike = str | os.PathLike[str] | bytes | bytearray | onnx.ModelProto | onnx_ir.Model
PROTOBUF_LIMIT = (1 << 31) - 1  # bytes of one message
_DAMAGED = "the file is damaged, or was written by something with a bug"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model taken apart. `proto` is ours to change while reading; `tensors` are the main graph's initializers."""

    proto: onnx.ModelProto
    tensors: Mapping[str, onnx_ir.TensorProtocol]
    path: Path | None


def load(model: ModelLike) -> Loaded:
    """Take a model apart (see the module docstring)."""
    if isinstance(model, onnx_ir.Model):
        return _from_ir(model)
    if isinstance(model, onnx.ModelProto):
        return _take_apart(model, None)
    if isinstance(model, (bytes, bytearray, memoryview)):
        return _take_apart(_parse(bytes(model), "the given bytes"), None)
    return _from_path(Path(model))


def _from_path(path: Path) -> Loaded:
    _refuse_no_file(path)
    try:
        scanned = scan(path)
        data, found = (path.read_bytes(), []) if scanned is None else scanned
    except OSError as error:
        raise UsageError("E_NO_FILE", f"{path} cannot be read", str(error.strerror)) from error
    return _take_apart(_parse(data, f"{path}"), path, found)


def _refuse_no_file(path: Path) -> None:
    if path.is_dir():
        raise UsageError("E_IS_DIRECTORY", f"{path} is a directory", hint="give the .onnx file")
    if not path.exists():
        raise UsageError("E_NO_FILE", f"{path} does not exist", f"current directory: {Path.cwd()}")
    if not path.is_file():
        raise UsageError("E_NO_FILE", f"{path} is not a regular file")
    if path.stat().st_size > PROTOBUF_LIMIT:
        raise UsageError(
            "E_TOO_LARGE",
            f"{path}: larger than protobuf allows",
            f"{path.stat().st_size} bytes > {PROTOBUF_LIMIT}",
            "store the weights as external data",
        )


def _parse(data: bytes, what: str) -> onnx.ModelProto:
    if not data:
        raise UsageError("E_EMPTY", f"{what}: empty, not an ONNX model", "0 bytes", "was the file written completely?")
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise UsageError(
            "E_PARSE",
            f"{what}: not an ONNX model, or a truncated one",
            f"{len(data)} bytes that are not a ModelProto",
            "was the file copied or downloaded completely?",
        ) from error
    return proto


def _take_apart(whole: onnx.ModelProto, path: Path | None, found: Sequence[Found] = ()) -> Loaded:
    """Tensors keep pointing into `whole` and into the file: no copy of weights is made."""
    what = str(path) if path is not None else "the model"
    if not whole.HasField("graph") or not (whole.ir_version or whole.opset_import):
        raise UsageError(
            "E_NOT_MODEL",
            f"{what}: not an ONNX model",
            f"graph: {'yes' if whole.HasField('graph') else 'no'}, ir_version: {whole.ir_version}",
            "a whole ModelProto is needed: a tensor or a graph alone is none",
        )
    _refuse_bad_text(whole)
    proto = onnx.ModelProto()
    copy_fields(whole, proto, skip=("graph",))
    copy_fields(whole.graph, proto.graph, skip=("initializer",))
    places = _Places(path)
    tensors: dict[str, onnx_ir.TensorProtocol] = {}
    for tensor, place in _in_file_order(whole.graph.initializer, found):
        if not tensor.name:
            raise UsageError("E_INVALID_MODEL", f"{what}: an initializer has no name", f"dims {list(tensor.dims)}")
        if isinstance(tensor.name, bytes):
            raise _bad_text("TensorProto.name", tensor.name)
        if tensor.name in tensors:
            raise UsageError("E_DUPLICATE_VALUE", f"initializer {tensor.name!r} is there twice")
        tensors[tensor.name] = _tensor(tensor, places) if place is None else _in_model_file(place, path)
    for nested in _nested_tensors(proto):
        _internalise(nested, places)
        _check_data(nested)
    return Loaded(proto, tensors, path)


def _in_file_order(
    read: Sequence[onnx.TensorProto], found: Sequence[Found]
) -> Iterator[tuple[onnx.TensorProto, Found | None]]:
    rest = iter(read)
    at = 0
    for f in found:
        while at < f.place:
            yield next(rest), None
            at += 1
        yield f.header, f
        at += 1
    yield from ((t, None) for t in rest)


def _in_model_file(found: Found, path: Path | None) -> onnx_ir.ExternalTensor:
    proto = found.header
    assert path is not None
    dtype, expected = _data_type(proto), _data_bytes(proto)
    if dtype == onnx_ir.DataType.STRING or found.length != expected:
        raise _mismatch(proto, expected, "bytes", found.length)
    return onnx_ir.ExternalTensor(
        str(path.resolve()), found.offset, found.length, dtype, shape=onnx_ir.Shape(list(proto.dims)), name=proto.name,
        doc_string=proto.doc_string or None,
    )  # fmt: skip


def copy_fields(source: onnx.ModelProto | onnx.GraphProto, target: object, skip: Collection[str]) -> None:
    """Copy all fields that are set, but those in `skip` (copying all and deleting would copy the weights)."""
    for field, value in source.ListFields():
        if field.name in skip:
            continue
        if field.is_repeated:
            getattr(target, field.name).extend(value)
        elif field.message_type is not None:
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def _from_ir(model: onnx_ir.Model) -> Loaded:
    """An onnx_ir model: its initializers are taken over as objects, the rest goes through protobuf."""
    held = {name: value.const_value for name, value in model.graph.initializers.items()}
    clone = model.clone()
    for name, value in clone.graph.initializers.items():
        tensor = held.get(name)
        if tensor is None:
            raise UsageError("E_INVALID_MODEL", f"initializer {name!r} has no data")
        value.const_value = onnx_ir.ExternalTensor("-", 0, 0, tensor.dtype, shape=tensor.shape, name=name)  # type: ignore[arg-type]
    proto = onnx_ir.to_proto(clone)
    del proto.graph.initializer[:]
    for nested in _nested_tensors(proto):
        if nested.data_location == onnx.TensorProto.EXTERNAL:
            raise UsageError(
                "E_EXTERNAL_PATH",
                f"tensor {nested.name!r} inside a subgraph has external data",
                hint="give the path of the model file instead of the object",
            )
    return Loaded(proto, {k: v for k, v in held.items() if v is not None}, None)


# --- tensors ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Places:
    """Where external data may lie: beside the model as named, or beside the file its symlink leads to."""

    model: Path | None

    def resolve(self, tensor: onnx.TensorProto, location: str) -> Path:
        what = f"external data of tensor {tensor.name!r}"
        if self.model is None:
            raise UsageError(
                "E_EXTERNAL_MISSING",
                f"{what} cannot be found",
                f"location {location!r}, but the model was given without a directory",
                "give the path of the model file",
            )
        if "\0" in location:
            raise UsageError("E_EXTERNAL_PATH", f"{what} is in no file", f"location {location!r} has a NUL in it")
        directory = Path(os.path.abspath(self.model)).parent
        roots = (directory.resolve(), self.model.resolve().parent)
        lexical = Path(os.path.normpath(directory / location))
        found = lexical.resolve()
        inside = lexical.is_relative_to(directory) and any(found.is_relative_to(r) for r in roots)
        if os.path.isabs(location) or not location or not inside:
            raise UsageError(
                "E_EXTERNAL_PATH",
                f"{what} lies outside the model's directory",
                f"location {location!r} leads to {found}, the model is in {directory}",
                "move the data file beside the model",
            )
        if not _is_file(found):
            raise UsageError("E_EXTERNAL_MISSING", f"{what} is missing", f"no file {found}", "copy it beside the model")
        return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long, a folder nobody may read
        return False


def _tensor(proto: onnx.TensorProto, places: _Places) -> onnx_ir.TensorProtocol:
    if proto.data_location == onnx.TensorProto.EXTERNAL:
        return _external(proto, places)
    _check_data(proto)
    return onnx_ir.serde.TensorProtoTensor(proto)


def _external(proto: onnx.TensorProto, places: _Places) -> onnx_ir.ExternalTensor:
    info = {e.key: e.value for e in proto.external_data}
    path = places.resolve(proto, info.get("location", ""))
    dtype, expected = _data_type(proto), _data_bytes(proto)
    try:
        offset = int(info.get("offset") or 0)
        length = int(info["length"]) if info.get("length") else expected
    except ValueError as error:
        raise UsageError(
            "E_EXTERNAL_SIZE",
            f"offset or length of the external data of tensor {proto.name!r} is no number",
            f"offset {info.get('offset', '')!r}, length {info.get('length', '')!r}"[:200],
            "both are decimal numbers of bytes: export the model again",
        ) from error
    size = path.stat().st_size
    if offset < 0 or length != expected or offset + length > size:
        raise UsageError(
            "E_EXTERNAL_SIZE",
            f"external data of tensor {proto.name!r} does not fit its file",
            f"{path.name}: offset {offset} + {length} bytes of {size}; dims {list(proto.dims)} {dtype} need {expected}",
            "the data file is truncated or belongs to another model",
        )
    # An absolute location without base_dir: the places were checked here, and by rules that allow symlinked caches.
    return onnx_ir.ExternalTensor(
        str(path), offset, length, dtype, shape=onnx_ir.Shape(list(proto.dims)), name=proto.name,
        doc_string=proto.doc_string or None,
    )  # fmt: skip


def _data_type(proto: onnx.TensorProto) -> onnx_ir.DataType:
    try:
        dtype = onnx_ir.DataType(proto.data_type)
    except ValueError as error:
        raise UsageError(
            "E_TENSOR", f"tensor {proto.name!r}: unknown element type {proto.data_type}", hint=_DAMAGED
        ) from error
    if dtype == onnx_ir.DataType.UNDEFINED:
        raise UsageError("E_TENSOR", f"tensor {proto.name!r} has no element type")
    return dtype


def _elements(proto: onnx.TensorProto) -> int:
    total = 1
    for d in proto.dims:
        if d < 0:
            raise UsageError(
                "E_TENSOR", f"tensor {proto.name!r} has a negative dimension", f"dims {list(proto.dims)}", _DAMAGED
            )
        total *= d
    return total


def _data_bytes(proto: onnx.TensorProto) -> int:
    return (_elements(proto) * _data_type(proto).bitwidth + 7) // 8


def _check_data(proto: onnx.TensorProto) -> None:
    """The stored data must be as long as the dimensions say."""
    dtype, count = _data_type(proto), _elements(proto)
    if dtype == onnx_ir.DataType.STRING:
        stored, needed, unit = len(proto.string_data), count, "strings"
    elif proto.HasField("raw_data"):
        stored, needed, unit = len(proto.raw_data), _data_bytes(proto), "bytes"
    else:
        stored = sum(
            len(f) for f in (proto.float_data, proto.int32_data, proto.int64_data, proto.double_data, proto.uint64_data)
        )
        packed = 8 // dtype.bitwidth if dtype.bitwidth < 8 and dtype.bitwidth in (2, 4) else 1
        pair = 2 if dtype in (onnx_ir.DataType.COMPLEX64, onnx_ir.DataType.COMPLEX128) else 1
        needed, unit = (count * pair + packed - 1) // packed, "numbers"
    if stored != needed:
        raise _mismatch(proto, needed, unit, stored)


def _mismatch(proto: onnx.TensorProto, needed: int, unit: str, stored: int) -> UsageError:
    return UsageError(
        "E_TENSOR",
        f"tensor {proto.name!r}: data does not match its dimensions",
        f"dims {list(proto.dims)} {_data_type(proto)} need {needed} {unit}, found {stored}",
        _DAMAGED,
    )


def _nested_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Tensors in attributes, subgraphs and functions."""
    bodies = [g for f in proto.functions for n in f.node for s in subgraphs(n) for g in all_graphs(s)]
    graphs = [*all_graphs(proto.graph), *bodies]
    for g in graphs:
        yield from g.initializer
    for node in (n for owner in (*graphs, *proto.functions) for n in owner.node):
        for attr in node.attribute:
            if attr.HasField("t") and attr.type == onnx.AttributeProto.TENSOR:
                yield attr.t
            yield from attr.tensors


def _refuse_bad_text(proto: onnx.ModelProto) -> None:
    """Text fields that are not UTF-8 come out of protobuf as bytes."""
    stack: list[Message] = [proto]
    while stack:
        message = stack.pop()
        if isinstance(message, onnx.TensorProto):  # listing its fields would copy the data
            if isinstance(message.name, bytes):
                raise _bad_text("TensorProto.name", message.name)
            continue
        for field, value in message.ListFields():
            if field.type not in (field.TYPE_STRING, field.TYPE_MESSAGE):
                continue
            items = value if field.is_repeated else [value]
            if field.type == field.TYPE_MESSAGE:
                stack.extend(items)
            elif bad := next((item for item in items if isinstance(item, bytes)), None):
                raise _bad_text(f"{message.DESCRIPTOR.name}.{field.name}", bad)


def _bad_text(field: str, text: bytes) -> UsageError:
    shown = repr(text[:80])[2:-1]
    hint = "the exporter wrote it in another encoding, or the file is damaged"
    return UsageError("E_PARSE", f"the model has text that is not UTF-8: {field}", f"it is '{shown}'", hint)


def _internalise(proto: onnx.TensorProto, places: _Places) -> None:
    """External data below the top level is small and rare: it moves into the model, so that paths do not matter."""
    if proto.data_location != onnx.TensorProto.EXTERNAL:
        return
    data = raw_bytes(_external(proto, places))
    del proto.external_data[:]
    proto.ClearField("data_location")
    proto.raw_data = data


def opset_of(proto: onnx.ModelProto) -> dict[str, int]:
    """Opset imports; two spellings of the default domain must agree."""
    found: dict[str, int] = {}
    for entry in proto.opset_import:
        domain = domain_of(entry.domain)
        if not 0 <= entry.version < 1 << 31:
            raise UsageError(
                "E_OPSET_IMPORT",
                f"domain {domain or 'ai.onnx'!r} is imported in an impossible version",
                str(entry.version),
            )
        if found.setdefault(domain, entry.version) != entry.version:
            raise UsageError(
                "E_OPSET_IMPORT",
                f"domain {domain or 'ai.onnx'!r} is imported twice",
                f"versions {found[domain]} and {entry.version}",
                "keep the one the nodes are written for",
            )
    return found
