"""Small facts about onnx protobufs that reading, inlining and checking share. No decisions here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir

from onnxfuse.errors import UsageError
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.graph import Constant

AttributeType = onnx.AttributeProto


@dataclass(frozen=True, slots=True, eq=False)
class TensorConst:
    """A constant of the user's model: read when asked for, written back as it was."""

    tensor: onnx_ir.TensorProtocol

    @property
    def nbytes(self) -> int:
        if self.tensor.dtype == onnx_ir.DataType.STRING:
            return int(sum(len(s) for s in np.asarray(self.tensor.numpy()).reshape(-1)))
        return int(self.tensor.nbytes)

    def numpy(self) -> np.ndarray:
        t = self.tensor
        if not isinstance(t, onnx_ir.ExternalTensor):
            return t.numpy()
        if t.dtype.bitwidth < 8:
            array = t.numpy()  # unpacked, so it does not need the file any more
            t.release()
            return array
        return np.frombuffer(raw_bytes(t), t.dtype.numpy().newbyteorder("<")).reshape(t.shape.numpy())


@dataclass(frozen=True, slots=True, eq=False)
class ScaledConst:
    """Floats times factors that broadcast to their shape, computed in f64 and rounded to `dtype` whenever read."""

    base: Constant
    factor: np.ndarray
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return self.base.nbytes

    def numpy(self) -> np.ndarray:
        weight = self.base.numpy()
        factor = np.broadcast_to(self.factor, weight.shape)
        out = np.empty(weight.shape, self.dtype)
        rows = max(1, _AT_ONCE * weight.shape[0] // max(1, weight.size))
        with np.errstate(all="ignore"):
            for k in range(0, weight.shape[0], rows):
                out[k : k + rows] = weight[k : k + rows].astype(np.float64) * factor[k : k + rows]
        return out

    def tensor(self, name: str, shape: Sequence[int]) -> onnx_ir.LazyTensor:
        """The same for the writer. `files_of` knows where its data come from."""
        dtype = onnx_ir.DataType.from_numpy(self.dtype)
        made = onnx_ir.LazyTensor(lambda: onnx_ir.tensor(self.numpy()), dtype, onnx_ir.Shape(list(shape)), name=name)
        made.meta[_FILES] = _files_behind(self)
        return made


_AT_ONCE = 1 << 16  # elements computed in f64 together
_FILES = "onnxfuse.files"


def _files_behind(const: Constant) -> frozenset[Path]:
    while isinstance(const, ScaledConst):
        const = const.base
    return files_of(const.tensor) if isinstance(const, TensorConst) else frozenset()


def files_of(t: onnx_ir.TensorProtocol) -> frozenset[Path]:
    """Files that must be there, unchanged, when the tensor is written."""
    if isinstance(t, onnx_ir.ExternalTensor):
        return frozenset({Path(t.path)})
    if isinstance(t, onnx_ir.LazyTensor):
        return frozenset(t.meta.get(_FILES, ()))
    return frozenset()


def raw_bytes(t: onnx_ir.TensorProtocol) -> bytes:
    """The data as ONNX stores it."""
    parts = list(raw_parts(t))
    return parts[0] if len(parts) == 1 else b"".join(parts)


def raw_parts(t: onnx_ir.TensorProtocol) -> Iterator[bytes]:
    """The same in pieces. A tensor in a file is read and not mapped: every mapping holds a file open."""
    if not isinstance(t, onnx_ir.ExternalTensor):
        yield t.tobytes()
        return
    left = t.nbytes
    with open(t.path, "rb") as f:
        f.seek(t.offset or 0)
        while left and (part := f.read(min(left, _PART))):
            left -= len(part)
            yield part
    if left:
        raise UsageError(
            "E_EXTERNAL_SIZE",
            f"data of tensor {t.name!r} is no longer complete",
            f"{t.path}: {t.nbytes - left} bytes at offset {t.offset}, {t.nbytes} are needed",
            "the file changed while it was in use",
        )


_PART = 1 << 22  # bytes read at once


@dataclass(frozen=True, slots=True, eq=False)
class SparseConst:
    """A sparse initializer: stays sparse in the file, dense for whoever computes with it."""

    sparse: onnx.SparseTensorProto

    @property
    def nbytes(self) -> int:
        return int(math.prod(self.sparse.dims) * _tensor(self.sparse.values).itemsize)

    def numpy(self) -> np.ndarray:
        values, indices = _tensor(self.sparse.values), _tensor(self.sparse.indices)
        dense = np.zeros(tuple(self.sparse.dims), values.dtype)
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
        return dense


def _tensor(proto: onnx.TensorProto) -> np.ndarray:
    return onnx_ir.serde.TensorProtoTensor(proto).numpy()


def told(node: onnx.NodeProto) -> str:
    """What a message calls a node."""
    if node.name:
        return f"node {node.name!r} ({node.op_type})"
    made = next((o for o in node.output if o), "")
    return f"the {node.op_type} node without a name" + (f" that makes {made!r}" if made else "")


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Graphs in the attributes of a node (not those nested deeper)."""
    for attr in node.attribute:
        if attr.HasField("g"):
            yield attr.g
        yield from attr.graphs


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and every graph nested in it, outer before inner."""
    stack = [graph]
    while stack:
        g = stack.pop()
        yield g
        for node in g.node:
            stack.extend(subgraphs(node))


def local_names(graph: onnx.GraphProto) -> set[str]:
    """Names a graph itself defines."""
    names = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    names |= {t.values.name for t in graph.sparse_initializer}
    return names | {name for node in graph.node for name in node.output if name}


def captured_names(node: onnx.NodeProto) -> list[str]:
    """Outer values that the subgraphs of a node read, in order of first use."""
    found: dict[str, None] = {}
    stack: list[tuple[onnx.GraphProto, frozenset[str]]] = [(g, frozenset()) for g in reversed(list(subgraphs(node)))]
    while stack:
        graph, scope = stack.pop()
        inner = scope | local_names(graph)
        for child in graph.node:
            found.update((name, None) for name in child.input if name and name not in inner)
            stack.extend((g, inner) for g in subgraphs(child))
        found.update((o.name, None) for o in graph.output if o.name not in inner)
    return list(found)


def domain_of(name: str) -> str:
    """The default domain has two spellings."""
    return "" if name == "ai.onnx" else name


def imports_of(entries: object) -> dict[str, int]:
    """Opset imports by domain (of a ModelProto or FunctionProto field)."""
    return {domain_of(e.domain): int(e.version) for e in entries}  # type: ignore[attr-defined]


def dtype_of(code: int) -> DType | None:
    """Element type, None when unset or newer than this version."""
    return DType.from_onnx(code)
