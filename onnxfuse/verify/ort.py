"""onnxruntime as judge: sessions, running, and the element types numpy does not know.

In: a model in any form (path, bytes, ModelProto, onnx_ir.Model). Out: an onnxruntime session and named results. The
reference is the CPU provider at ORT_DISABLE_ALL, because the optimised levels change values (and fail on valid models).
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import ml_dtypes
import numpy as np
import onnxruntime
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]  # protobuf ships no types
from onnxruntime.capi import onnxruntime_pybind11_state as _state

from onnxfuse.errors import UsageError
from onnxfuse.files import private_folder

if TYPE_CHECKING:  # a third of the memory of a process that only runs models from files
    import onnx
    import onnx_ir

Source: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | onnx.ModelProto | onnx_ir.Model"
Result = object  # an array, a list of them (sequence), a dict (map) or None (empty optional)
Feeds = Mapping[str, object]
Libraries = Sequence[str | os.PathLike[str]]  # of custom ops, to register

_PROTO_LIMIT = 2**31 - 1  # protobuf refuses more in one message

# Everything onnxruntime raises on purpose; its classes share no base. RuntimeError comes from its Python layer.
ORT_ERRORS: tuple[type[Exception], ...] = (
    *(c for c in vars(_state).values() if isinstance(c, type) and issubclass(c, Exception)),
    RuntimeError,
)


class Level(StrEnum):
    """onnxruntime's graph optimisation level."""

    DISABLE = "disable"
    BASIC = "basic"
    EXTENDED = "extended"
    ALL = "all"

    @property
    def ort(self) -> object:
        levels = onnxruntime.GraphOptimizationLevel
        return {
            Level.DISABLE: levels.ORT_DISABLE_ALL,
            Level.BASIC: levels.ORT_ENABLE_BASIC,
            Level.EXTENDED: levels.ORT_ENABLE_EXTENDED,
            Level.ALL: levels.ORT_ENABLE_ALL,
        }[self]


# onnxruntime's type name -> numpy dtype.
_NATIVE: dict[str, np.dtype] = {
    "float": np.dtype(np.float32), "double": np.dtype(np.float64), "float16": np.dtype(np.float16),
    "int8": np.dtype(np.int8), "int16": np.dtype(np.int16), "int32": np.dtype(np.int32), "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8), "uint16": np.dtype(np.uint16), "uint32": np.dtype(np.uint32),
    "uint64": np.dtype(np.uint64), "bool": np.dtype(np.bool_), "string": np.dtype(object),
}  # fmt: skip
# onnxruntime's type name -> (numpy dtype, integer of the same size, TensorProto code): passed as bytes.
_RAW: dict[str, tuple[np.dtype, np.dtype, int]] = {
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint16), 16),
    "float8e4m3fn": (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.uint8), 17),
    "float8e4m3fnuz": (np.dtype(ml_dtypes.float8_e4m3fnuz), np.dtype(np.uint8), 18),
    "float8e5m2": (np.dtype(ml_dtypes.float8_e5m2), np.dtype(np.uint8), 19),
    "float8e5m2fnuz": (np.dtype(ml_dtypes.float8_e5m2fnuz), np.dtype(np.uint8), 20),
}


def element(type_name: str) -> str | None:
    """`tensor(float)` -> `float`; None for anything that is not a tensor."""
    if type_name.startswith("tensor(") and type_name.endswith(")"):
        return type_name[len("tensor(") : -1]
    return None


def numpy_dtype(type_name: str) -> np.dtype | None:
    """The numpy dtype of `tensor(x)`; None where there is none (sequences, 4-bit types)."""
    name = element(type_name)
    if name is None:
        return None
    return _RAW[name][0] if name in _RAW else _NATIVE.get(name)


def describe(source: Source) -> str:
    """How messages call a model."""
    if isinstance(source, (str, os.PathLike)):
        return repr(str(source))
    return "the model"


_HINT = "is a library of custom ops missing (--custom-op-library), or a newer onnxruntime? --no-verify does without it"


def session(
    source: Source,
    *,
    level: Level = Level.DISABLE,
    threads: int = 1,
    libraries: Libraries = (),
    profile: str = "",
) -> onnxruntime.InferenceSession:
    """A session on the CPU provider. `threads` 0 = onnxruntime's choice; `libraries` = custom-op libraries to register.

    Raises UsageError when onnxruntime refuses the library or the model.
    """
    made = options(level=level, threads=threads, libraries=libraries, profile=profile)
    try:
        return _create(source, made)
    except ORT_ERRORS as exc:
        raise UsageError("E_ORT_LOAD", f"onnxruntime refuses to load {describe(source)}", _text(exc), _HINT) from exc


def options(
    *,
    level: Level = Level.DISABLE,
    threads: int = 1,
    libraries: Libraries = (),
    profile: str = "",
) -> onnxruntime.SessionOptions:
    """The options of `session`. Raises UsageError when onnxruntime refuses a library."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level.ort
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # failures reach the user as exceptions, once
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    for library in libraries:
        try:
            options.register_custom_ops_library(os.path.abspath(library))  # the loader searches for bare names
        except ORT_ERRORS as exc:
            raise UsageError(
                "E_LIBRARY", f"onnxruntime refuses the custom-op library {str(library)!r}", _text(exc)
            ) from exc
    return options


def _create(source: Source, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    """Never serializes a model that may pass protobuf's limit; that one goes through a private folder."""
    providers = ["CPUExecutionProvider"]
    if isinstance(source, (str, os.PathLike)):
        return onnxruntime.InferenceSession(os.fspath(source), options, providers=providers)
    data = _serialize(source)
    if data is not None:
        return onnxruntime.InferenceSession(data, options, providers=providers)
    with private_folder() as folder:
        path = os.path.join(folder, "model.onnx")
        _save_external(source, path)
        return onnxruntime.InferenceSession(path, options, providers=providers)


def in_file(source: Source, path: Path) -> Path:
    """Where the model is as a file: its own path, or `path`, after writing it there (and perhaps data beside it)."""
    if isinstance(source, (str, os.PathLike)):
        return Path(source)
    data = _serialize(source)
    if data is None:
        _save_external(source, os.fspath(path))
    else:
        path.write_bytes(data)
    return path


def _serialize(source: bytes | bytearray | onnx.ModelProto | onnx_ir.Model) -> bytes | None:
    """The model as one message, or None when it needs external data."""
    if isinstance(source, (bytes, bytearray)):
        return bytes(source)
    import onnx_ir

    if isinstance(source, onnx_ir.Model):
        tensors = [v.const_value for v in source.graph.initializers.values() if v.const_value is not None]
        if any(isinstance(t, onnx_ir.ExternalTensor) for t in tensors):
            return None
        if sum(t.nbytes for t in tensors) > _PROTO_LIMIT // 2:
            return None
        source = onnx_ir.to_proto(source)
    try:
        return bytes(source.SerializeToString())
    except (EncodeError, ValueError):  # ValueError: older protobuf
        return None


def _save_external(source: bytes | bytearray | onnx.ModelProto | onnx_ir.Model, path: str) -> None:
    import onnx
    import onnx_ir

    if isinstance(source, onnx_ir.Model):
        onnx_ir.save(source, path, external_data="model.data")
        return
    assert isinstance(source, onnx.ModelProto)
    copy = onnx.ModelProto()
    copy.CopyFrom(source)  # onnx.save moves the data out of the message it is given
    onnx.save(copy, path, save_as_external_data=True, location="model.data")


def _text(exc: Exception) -> str:
    return " ".join(str(exc).split())


def run(sess: onnxruntime.InferenceSession, feeds: Feeds) -> dict[str, Result]:
    """All outputs by name. Raises one of ORT_ERRORS when the model refuses these inputs."""
    names = [o.name for o in sess.get_outputs()]
    results = prepared(sess, feeds)()
    if _speaks_numpy(sess):
        return dict(zip(names, results, strict=True))
    return dict(zip(names, map(_from_ort, results), strict=True))


def prepared(sess: onnxruntime.InferenceSession, feeds: Feeds) -> Callable[[], list[Result]]:
    """A call that runs the session on these feeds and does nothing else, for timing. Raw results (see `run`)."""
    names = [o.name for o in sess.get_outputs()]
    if _speaks_numpy(sess):
        return partial(sess.run, names, dict(feeds))
    return partial(sess.run_with_ort_values, names, {k: value_of(v) for k, v in feeds.items()})


def _speaks_numpy(sess: onnxruntime.InferenceSession) -> bool:
    return not any(element(v.type) in _RAW for v in (*sess.get_inputs(), *sess.get_outputs()))


def takes(dtype: np.dtype) -> bool:
    """Arrays of this type can be handed to onnxruntime, and come out of it."""
    if dtype in {d for d, _, _ in _RAW.values()}:
        return hasattr(onnxruntime.OrtValue, "ortvalue_from_numpy_with_onnx_type")
    return dtype in _NATIVE.values()


def value_of(value: object) -> onnxruntime.OrtValue:
    """An OrtValue on the memory of an array. Raises UsageError where `takes` says no."""
    array = np.asarray(value)
    for dtype, carrier, code in _RAW.values():
        if array.dtype != dtype:
            continue
        if not takes(dtype):
            raise UsageError(
                "E_ORT_VERSION", f"this onnxruntime cannot be fed {dtype} arrays", hint="use 1.20 or newer"
            )
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(carrier), code)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _from_ort(value: onnxruntime.OrtValue) -> Result:
    name = element(value.data_type())
    if name not in _RAW:
        return value.numpy()
    dtype, carrier, _ = _RAW[name]
    shape = tuple(value.shape())
    out = np.empty(shape, carrier)
    if out.size:  # onnxruntime has no numpy type for these: copy the bytes
        ctypes.memmove(out.ctypes.data, value.data_ptr(), out.nbytes)
    return out.view(dtype)


def profile(
    source: Source, feeds: Feeds, *, level: Level = Level.DISABLE, libraries: Libraries = ()
) -> list[tuple[str, str]]:
    """(node name, op type) of every kernel onnxruntime ran for these feeds, in order: what really executed."""
    with private_folder() as folder:
        sess = session(source, level=level, libraries=libraries, profile=os.path.join(folder, "profile"))
        run(sess, feeds)
        events = json.loads(Path(sess.end_profiling()).read_text(encoding="utf-8"))
    ran = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    return [(e["name"].removesuffix("_kernel_time"), e["args"]["op_name"]) for e in ran]
