"""Model and library on disk: all or nothing.

    out.onnx        the model
    out.so          the library (if there is one)
    out.onnx.data   weights, when asked for or when the model would pass protobuf's 2 GB

`staged` writes everything into a hidden directory beside the output, under the final names, so that it can be loaded
and verified there; `publish` puts weights, library and model in place (see `onnxfuse.files`): a run killed before has
done nothing, one killed meanwhile is completed by the next, or by `onnxfuse.InferenceSession`. Between the renames the
old model may see the new library, which is harmless: op types name their kernels by content. Old weights are never
written over with other ones: the new file takes another name then, and the old one goes after the model is in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir

from onnxfuse.emit.model import Emission, initializer
from onnxfuse.errors import UsageError
from onnxfuse.files import private_folder, publish
from onnxfuse.frontend.load import copy_fields
from onnxfuse.frontend.protos import files_of, raw_parts
from onnxfuse.frontend.wire import varint
from onnxfuse.ir.bodies import BodyFiles, FormalInput

LIBRARY_SUFFIX = ".so"
DATA_SUFFIX = ".data"
INLINE_LIMIT = 2_000_000_000  # bytes of a model without external data; protobuf stops at 2^31 - 1
EXTERNAL_FROM = 1024  # bytes: smaller tensors stay in the model (the convention of onnx)
ALIGN_FROM, ALIGNMENT = 1 << 20, 1 << 16  # large tensors start where every system can map them
_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_RAW_DATA = 7, 5, 9  # field numbers in onnx.proto


@dataclass(frozen=True, slots=True)
class Written:
    """The files of a finished write."""

    model: Path
    library: Path | None
    data: Path | None


def check_output(out: str | os.PathLike[str], source: str | os.PathLike[str] | None = None) -> Path:
    """Refuse an output that cannot work, before any work is done. Returns the path to write."""
    path = Path(out)
    if path.suffix == LIBRARY_SUFFIX:
        raise UsageError("E_OUTPUT", f"{path}: the name of the library", hint="the model's name ends in .onnx")
    if path.is_dir():
        raise UsageError("E_IS_DIRECTORY", f"output {path} is a directory", hint=f"for example {path / 'model.onnx'}")
    parent = Path(os.path.abspath(path)).parent
    if not parent.is_dir():
        raise UsageError("E_OUTPUT", f"output {path}: its directory does not exist", f"no directory {parent}")
    library = path.with_suffix(LIBRARY_SUFFIX)
    if library.is_dir():
        raise UsageError("E_IS_DIRECTORY", f"output {library} is a directory", "the library goes there")
    if source is not None:
        for ours in (path, library):
            if _same_file(ours, Path(source)):
                raise UsageError(
                    "E_SAME_FILE", f"output {ours} is the input", f"both are {ours.resolve()}", "give another name"
                )
    try:
        with private_folder(parent):
            return path
    except OSError as error:
        raise UsageError("E_OUTPUT", f"output {path} cannot be written", f"{parent}: {error.strerror}") from error


def _same_file(a: Path, b: Path) -> bool:
    if a.exists() and b.exists():
        return a.samefile(b)
    return a.resolve() == b.resolve()


@dataclass(frozen=True, slots=True)
class Staged:
    """A bundle in its hidden directory, loadable from there. Holds no weights: the caller may free them meanwhile.

    target  where `publish` puts the model
    used    data files the user's own tensors lie in
    bodies  optimized bodies of control flow, before and after, to compare
    """

    model: Path
    library: Path | None
    data: Path | None
    target: Path
    used: frozenset[Path]
    bodies: tuple[BodyFiles, ...] = ()

    def publish(self) -> Written:
        """Rename the files into place."""
        files = [f for f in (self.data, self.library, self.model) if f is not None]
        library, data = (None if p is None else self.target.with_name(p.name) for p in (self.library, self.data))
        old = _data_files_of(self.target) - {data} - self.used
        stale = [f.name for f in old if f.name.startswith(self.target.name)]
        try:
            publish(self.model.parent, [f.name for f in files], self.target, stale)
        except OSError as error:
            raise _unwritable(self.target, error) from error
        return Written(self.target, library, data)


def write(
    emission: Emission, library: bytes | None, out: str | os.PathLike[str], *, external_data: bool = False
) -> Written:
    """Write the bundle (see the module docstring)."""
    with staged(emission, library, out, external_data=external_data) as bundle:
        return bundle.publish()


@contextlib.contextmanager
def staged(
    emission: Emission, library: bytes | None, out: str | os.PathLike[str], *, external_data: bool = False
) -> Iterator[Staged]:
    """Write the bundle into a hidden directory beside `out`; without `publish` nothing of it stays."""
    target = check_output(out)
    if target.resolve() in {p.resolve() for p in _used_by(emission)}:
        why = "the weights are still read from it"
        raise UsageError("E_SAME_FILE", f"output {target} is the input", why, "give another name")
    outside = _slots(emission) if external_data or _size(emission) > INLINE_LIMIT else {}
    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(private_folder(target.parent))
        except OSError as error:
            raise _unwritable(target, error) from error
        pair = _stage(emission, library, target, directory, outside)
        del emission, library, outside  # not kept alive by this generator
        yield pair


def _stage(
    emission: Emission, library: bytes | None, target: Path, directory: Path, outside: Mapping[str, _Slot]
) -> Staged:
    model, data, beside = directory / target.name, None, None
    try:
        if outside:
            written = directory / "data"
            digest = _write_data(written, emission, outside)
            data = written.rename(directory / _data_name(target, digest, emission))
        if library is not None:
            beside = directory / target.with_suffix(LIBRARY_SUFFIX).name
            beside.write_bytes(library)
        with model.open("wb") as f:
            f.writelines(model_bytes(emission, outside, data.name if data is not None else ""))
    except OSError as error:
        raise _unwritable(target, error) from error
    return Staged(model, beside, data, target, frozenset(_used_by(emission)), _bodies(emission, directory))


def _bodies(emission: Emission, directory: Path) -> tuple[BodyFiles, ...]:
    """Files of what is compared body by body; one too large for a file of its own is not."""
    out: list[BodyFiles] = []
    for body in emission.bodies:
        if max(_size(body.before), _size(body.after)) > INLINE_LIMIT:
            continue
        before, after = (directory / f"body_{body.number}_{which}.onnx" for which in ("before", "after"))
        for path, half in ((before, body.before), (after, body.after)):
            with path.open("wb") as f:
                f.writelines(model_bytes(half, {}, ""))
        formals = tuple(
            FormalInput(name, str(f.role), f.source.name if f.source is not None else "", f.axis, f.backwards)
            for name, f in body.formals
        )
        out.append(BodyFiles(body.name, body.number, body.parent, formals, body.free, before, after))
    return tuple(out)


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError("E_OUTPUT", f"output {path} cannot be written", str(error))


def _size(emission: Emission) -> int:
    """Bytes of the model with all its tensors inside."""
    return int(emission.model.ByteSize()) + sum(int(t.nbytes) for t in emission.tensors.values() if _sized(t))


def _sized(t: onnx_ir.TensorProtocol) -> bool:
    return t.dtype != onnx_ir.DataType.STRING


# --- external data ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a tensor lies in the data file."""

    offset: int
    length: int


def _slots(emission: Emission) -> dict[str, _Slot]:
    slots: dict[str, _Slot] = {}
    end = 0
    for name, t in emission.tensors.items():
        if not _sized(t) or t.nbytes < EXTERNAL_FROM:
            continue
        if t.nbytes >= ALIGN_FROM:
            end = -(-end // ALIGNMENT) * ALIGNMENT
        slots[name] = _Slot(end, int(t.nbytes))
        end += int(t.nbytes)
    return slots


def _write_data(path: Path, emission: Emission, slots: Mapping[str, _Slot]) -> str:
    """Write one tensor after the other; returns a digest of the whole file."""
    digest = hashlib.sha256()
    with path.open("wb") as f:
        for name, slot in slots.items():
            pad = bytes(slot.offset - f.tell())
            for part in itertools.chain([pad], raw_parts(emission.tensors[name])):
                f.write(part)
                digest.update(part)
    return digest.hexdigest()


def _data_name(path: Path, digest: str, emission: Emission) -> str:
    """`out.onnx.data`; another name if that file holds other data, which the old model, or the input, still needs."""
    plain = path.with_name(path.name + DATA_SUFFIX)
    if not plain.exists() or (plain.is_file() and _digest_of(plain) == digest and plain not in _used_by(emission)):
        return plain.name
    return f"{path.name}.{digest[:12]}{DATA_SUFFIX}"


def _digest_of(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _used_by(emission: Emission) -> set[Path]:
    """Files the input's tensors lie in: they belong to the user."""
    return {file for t in emission.tensors.values() for file in files_of(t)}


def _data_files_of(path: Path) -> set[Path]:
    """Data files that the model now at `path` uses, if it is one of ours."""
    beside = [p for p in path.parent.iterdir() if p.name.startswith(path.name) and p.suffix == DATA_SUFFIX]
    if not beside or not path.is_file():
        return set()
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception:  # whatever it is (protobuf's errors have no public name), it is about to be replaced
        return set()
    if not any(p.key.startswith("onnxfuse.") for p in model.metadata_props):
        return set()
    locations = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
    return {path.with_name(name) for name in locations if name and Path(name).name == name}


# --- bytes -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Piece:
    """A serialised TensorProto: its fields, then (unless `tensor` is None) the key of raw_data and the data."""

    head: bytes
    tensor: onnx_ir.TensorProtocol | None = None

    @property
    def size(self) -> int:
        return len(self.head) + (int(self.tensor.nbytes) if self.tensor is not None else 0)


def model_bytes(emission: Emission, outside: Mapping[str, _Slot], location: str) -> Iterator[bytes]:
    """The serialised model in pieces: at most one tensor in memory at a time.

    A ModelProto is a sequence of fields, so the graph field is written last, and within it the initializers.
    """
    rest = onnx.ModelProto()
    copy_fields(emission.model, rest, skip=("graph",))
    graph = emission.model.graph.SerializeToString(deterministic=True)
    pieces = [_piece(name, t, outside.get(name), location) for name, t in emission.tensors.items()]
    total = len(graph) + sum(1 + len(varint(p.size)) + p.size for p in pieces)
    yield rest.SerializeToString(deterministic=True)
    yield _key(_MODEL_GRAPH) + varint(total) + graph
    for piece in pieces:
        yield _key(_GRAPH_INITIALIZER) + varint(piece.size) + piece.head
        if piece.tensor is not None:
            yield from raw_parts(piece.tensor)


def _piece(name: str, t: onnx_ir.TensorProtocol, slot: _Slot | None, location: str) -> _Piece:
    if slot is None and isinstance(t, onnx_ir.serde.TensorProtoTensor):
        return _Piece(initializer(name, t).SerializeToString(deterministic=True))
    proto = onnx.TensorProto(name=name, data_type=int(t.dtype), dims=t.shape.numpy(), doc_string=t.doc_string or None)
    if slot is None:
        return _Piece(proto.SerializeToString(deterministic=True) + _key(_TENSOR_RAW_DATA) + varint(int(t.nbytes)), t)
    proto.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", slot.offset), ("length", slot.length)):
        proto.external_data.add(key=key, value=str(value))
    return _Piece(proto.SerializeToString(deterministic=True))


def _key(field: int) -> bytes:
    """Key of a length-delimited field."""
    return varint(field << 3 | 2)
