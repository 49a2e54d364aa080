"""A session of our own model whose weights stay in the file. Path -> session, or None when that is not possible.

Kernels copy the weights they need into an order of their own when they are created, and never look at the originals
again; onnxruntime keeps both. Here the large initializers that only our nodes read are handed over as pages of the
model file, and the pages are given back to the system while kernels are made: the session then holds the packed
weights alone. Such weights lie at any byte of the file, which our kernels allow (their loads assume no alignment that
the machine would insist on) and others may not: what any other node reads is copied once, beside the message that
onnxruntime would have to parse it out of.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
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


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """The session, and the weights that must live as long: left in the file, and copied."""

    session: onnxruntime.InferenceSession
    weights: tuple[onnxruntime.OrtValue, ...]
    copies: tuple[onnxruntime.OrtValue, ...]


def mapped_session(
    model: Path, *, level: ort.Level, threads: int, libraries: Sequence[str | os.PathLike[str]]
) -> Mapped | None:
    """See the module docstring. None also when onnxruntime refuses: an ordinary session says better why."""
    import onnx  # here: most processes that compare do without

    from onnxfuse.frontend.wire import scan

    scanned = scan(model)
    if scanned is None or not scanned[1]:
        return None
    proto = onnx.ModelProto.FromString(scanned[0])
    ours = _read_by_us_only(proto.graph)
    fixed = {v.name for v in (*proto.graph.input, *proto.graph.output)}
    options = ort.options(level=level, threads=threads, libraries=libraries)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(model.parent))
    weights: list[onnxruntime.OrtValue] = []
    copies: list[onnxruntime.OrtValue] = []
    with model.open("rb") as f:
        data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    for found in scanned[1]:
        tensor = proto.graph.initializer.add()
        tensor.CopyFrom(found.header)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        if tensor.name in fixed or dtype.name not in ("float32", "float64", "float16"):
            tensor.raw_data = data[found.offset : found.offset + found.length]
            continue
        array = np.frombuffer(data, dtype, math.prod(tensor.dims), found.offset).reshape(tuple(tensor.dims))
        mine = tensor.name in ours
        value = onnxruntime.OrtValue.ortvalue_from_numpy(array if mine else array.copy())
        (weights if mine else copies).append(value)
        options.add_initializer(tensor.name, value)
        if not mine:
            _give_back(data)
        # onnxruntime wants to see a file; the values come from the line before.
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=model.name)
        tensor.external_data.add(key="offset", value=str(found.offset))
        tensor.external_data.add(key="length", value=str(found.length))
    try:
        with _giving_back(data):
            session = onnxruntime.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
    except ort.ORT_ERRORS:
        return None
    return Mapped(session, tuple(weights), tuple(copies))


def _give_back(data: mmap.mmap) -> None:
    """Pages of the file that were read do not stay in this process's memory."""
    if hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED)


@contextlib.contextmanager
def _giving_back(data: mmap.mmap) -> Iterator[None]:
    """Pages are given back again and again meanwhile."""
    done = threading.Event()

    def give_back() -> None:
        while not done.wait(_GIVE_BACK):
            _give_back(data)
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
