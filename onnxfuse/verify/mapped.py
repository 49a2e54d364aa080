"""A session of a model whose weights stay in files. Path -> session, or None when that is not possible.

Kernels copy the weights they need into an order of their own when they are created, and never look at the originals
again; onnxruntime keeps both. Here the large initializers that only our nodes read are handed over as pages of the
file, and the pages are given back to the system while kernels are made: the session then holds the packed
weights alone. Such weights lie at any byte of the file, which our kernels allow (their loads assume no alignment that
the machine would insist on) and others may not: what any other node reads is copied once, beside the message that
onnxruntime would have to parse it out of. External data that is aligned stays where it is, whoever reads it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime

from onnxfuse.verify import ort

if TYPE_CHECKING:
    import onnx

_DOMAIN = "onnxfuse"  # of our nodes
_GIVE_BACK = 0.01  # seconds between two times that pages are given back
_ALIGNED = 64  # bytes: a place in a file that every kernel reads from, as onnxruntime maps external data itself


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight in a file: its tensor without data, and where the data lies."""

    header: onnx.TensorProto
    file: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """The session, and the weights that must live as long: left in the file, and copied."""

    session: onnxruntime.InferenceSession
    weights: tuple[onnxruntime.OrtValue, ...]
    copies: tuple[onnxruntime.OrtValue, ...]


def mapped_session(model: Path, *, level: ort.Level, threads: int, libraries: ort.Libraries) -> Mapped | None:
    """See the module docstring. None also when onnxruntime refuses: an ordinary session says better why."""
    import onnx  # here: most processes that compare do without

    from onnxfuse.frontend.wire import scan

    scanned = scan(model)
    if scanned is None or not scanned[1]:
        return None
    proto = onnx.ModelProto.FromString(scanned[0])
    weights = [Stored(found.header, model, found.offset, found.length) for found in scanned[1]]
    options = ort.options(level=level, threads=threads, libraries=libraries)
    try:
        return stored_session(proto, weights, model.parent, options)
    except ort.ORT_ERRORS:
        return None


def stored_session(
    proto: onnx.ModelProto, weights: Sequence[Stored], folder: Path, options: onnxruntime.SessionOptions
) -> Mapped:
    """A session of `proto` with the `weights`, whose files lie in `folder`. Raises what onnxruntime raises.

    `proto` becomes what is loaded; initializers it has of their names are without data.
    """
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    ours = _read_by_us_only(proto.graph)
    fixed = {v.name for v in (*proto.graph.input, *proto.graph.output)}
    there = {t.name: t for t in proto.graph.initializer}
    files = {file: _map(file) for file in {w.file for w in weights}}
    left: list[onnxruntime.OrtValue] = []
    copies: list[onnxruntime.OrtValue] = []
    for weight in weights:
        data = files[weight.file]
        tensor = there.get(weight.header.name) or proto.graph.initializer.add()
        tensor.CopyFrom(weight.header)
        array = None if tensor.name in fixed else _array(weight, data)
        aligned = weight.offset % _ALIGNED == 0
        if not weight.file.is_relative_to(folder) or (array is None and not aligned):
            tensor.raw_data = data[weight.offset : weight.offset + weight.length]
            continue
        _refer(tensor, weight, folder)
        if array is None:
            continue
        stays = aligned or tensor.name in ours
        value = ort.value_of(array if stays else array.copy())
        (left if stays else copies).append(value)
        options.add_initializer(tensor.name, value)
        if not stays:
            _give_back(data)
    with _giving_back(*files.values()):
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return Mapped(session, tuple(left), tuple(copies))


def _map(file: Path) -> mmap.mmap:
    with file.open("rb") as f:
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)


def _array(weight: Stored, data: mmap.mmap) -> np.ndarray | None:
    """The weight where it lies in the file; None if onnxruntime takes no such array from Python."""
    import onnx  # here as well

    try:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(weight.header.data_type))
    except KeyError:
        return None
    dims = tuple(weight.header.dims)
    if not ort.takes(dtype) or math.prod(dims) * dtype.itemsize != weight.length:
        return None
    return np.frombuffer(data, dtype, math.prod(dims), weight.offset).reshape(dims)


def _refer(tensor: onnx.TensorProto, weight: Stored, folder: Path) -> None:
    """Name the place: onnxruntime wants to see a file, also where the value is handed to it."""
    tensor.data_location = type(tensor).EXTERNAL
    tensor.external_data.add(key="location", value=str(weight.file.relative_to(folder)))
    tensor.external_data.add(key="offset", value=str(weight.offset))
    tensor.external_data.add(key="length", value=str(weight.length))


def _give_back(data: mmap.mmap) -> None:
    """Pages of the file that were read do not stay in this process's memory."""
    if hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED)


@contextlib.contextmanager
def _giving_back(*files: mmap.mmap) -> Iterator[None]:
    """Pages are given back again and again meanwhile."""
    done = threading.Event()

    def give_back() -> None:
        more = True
        while more:
            more = not done.wait(_GIVE_BACK)
            for data in files:
                _give_back(data)

    thread = threading.Thread(target=give_back, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _read_by_us_only(graph: onnx.GraphProto) -> set[str]:
    """Names that nothing but our nodes reads, and no caller can override."""
    ours = {name for n in graph.node if n.domain == _DOMAIN for name in n.input}
    others = {v.name for v in (*graph.input, *graph.output)}
    pending = [n for n in graph.node if n.domain != _DOMAIN]
    while pending:
        node = pending.pop()
        others.update(node.input)
        for inner in (g for a in node.attribute for g in (a.g, *a.graphs)):
            others.update(v.name for v in inner.output)
            pending.extend(inner.node)
    return ours - others
