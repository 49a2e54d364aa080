"""Load an optimized model together with its library.

The result is an ordinary `onnxruntime.InferenceSession`; nothing of it is wrapped. In another language do the same two
steps: register the library with the session options, then make the session.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from os import PathLike, fspath
from pathlib import Path

import onnxruntime as ort
import onnxruntime.capi.onnxruntime_pybind11_state as errors

from onnxfuse.codegen.glue.layout import DIGEST_MARK
from onnxfuse.errors import UsageError
from onnxfuse.files import finish

# metadata_props of the model: what the library was made of, and its bytes
DIGEST_KEY, SUM_KEY = "onnxfuse.library_digest", "onnxfuse.library_sha256"
SUFFIX = ".so"
_BOTH = "copy both files, or load the model with onnxruntime itself (it runs without the kernels)"

_ORT_ERRORS = (RuntimeError, errors.Fail, errors.InvalidArgument, errors.NotImplemented, errors.RuntimeException)

# onnxruntime accepts each custom domain once per SessionOptions, and cannot be asked what was registered.
_registered: weakref.WeakKeyDictionary[ort.SessionOptions, str] = weakref.WeakKeyDictionary()


def library_path(model_path: str | PathLike[str]) -> Path:
    """Where the library of a model lies: beside it, with the suffix .so."""
    return Path(fspath(model_path)).with_suffix(SUFFIX)


def InferenceSession(  # noqa: N802 (stands for onnxruntime.InferenceSession)
    path: str | PathLike[str],
    sess_options: ort.SessionOptions | None = None,
    providers: Sequence[object] | None = None,
    **kwargs: object,
) -> ort.InferenceSession:
    """An onnxruntime.InferenceSession with the model's library registered.

    Args:
        path: the optimized model; its library lies beside it.
        sess_options: options to use; the library is registered with them.
        providers: execution providers; the CPU if None.
        kwargs: passed on to onnxruntime.

    Raises:
        UsageError: the model or library is missing, or they do not belong together.
    """
    library = library_path(path)
    check_pair(path, library)
    options = ort.SessionOptions() if sess_options is None else sess_options
    _register(options, library)
    chosen = ["CPUExecutionProvider"] if providers is None else list(providers)
    return ort.InferenceSession(fspath(path), options, providers=chosen, **kwargs)


def check_pair(model_path: str | PathLike[str], library: Path) -> None:
    """Raise UsageError unless both files are there and, as far as they tell, belong together.

    What a killed `optimize` had begun to put in place is completed first.
    """
    try:
        _check_pair(Path(model_path), library)
    except UsageError as error:
        with suppress(OSError):
            if finish(Path(model_path)):
                return _check_pair(Path(model_path), library)
        raise error


def _check_pair(model: Path, library: Path) -> None:
    if not model.is_file():
        raise UsageError("E_MODEL", f"no such model: {model}", f"current directory: {Path.cwd()}")
    if not library.is_file():
        raise UsageError(
            "E_LIBRARY",
            f"no library beside {model}",
            f"expected {library}",
            _BOTH,
        )
    told = _metadata(model)
    wanted, found = told.get(DIGEST_KEY), library_digest(library)
    if found is None:
        raise UsageError("E_LIBRARY", f"{library} was not made by onnxfuse", "it holds no digest", _BOTH)
    if wanted is not None and wanted != found:
        raise UsageError(
            "E_LIBRARY",
            f"{library} belongs to another model",
            f"the model wants {wanted[:16]}..., the library is {found[:16]}...",
            "run onnxfuse optimize again and keep the two files together",
        )
    sum_wanted = told.get(SUM_KEY)
    if sum_wanted is not None and sum_wanted != _sum(library):
        # The loader would map it all the same, and end the process at the first page that is not there.
        why = f"its {library.stat().st_size} bytes are not those that were written"
        raise UsageError("E_LIBRARY", f"{library} is damaged", why, "copy it again, or run onnxfuse optimize again")


def _sum(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def model_digest(path: str | PathLike[str]) -> str | None:
    """The library digest a model names, or None."""
    return _metadata(Path(path)).get(DIGEST_KEY)


def _metadata(path: Path) -> dict[str, str]:
    """What a model tells of its library. Reads only the outermost fields, so the size does not matter."""
    told: dict[str, str] = {}
    with _mapped(path) as data:
        try:
            for props in _fields(data, _METADATA_PROPS):
                key, value = (bytes(next(_fields(props, n), b"")).decode("utf-8", "replace") for n in (_KEY, _VALUE))
                if key in (DIGEST_KEY, SUM_KEY):
                    told.setdefault(key, value)
        except (IndexError, ValueError) as e:
            raise UsageError("E_MODEL", f"{path} is not an ONNX model") from e
    return told


# Field numbers: ModelProto.metadata_props, StringStringEntryProto.key and .value
_METADATA_PROPS, _KEY, _VALUE = 14, 1, 2


def _fields(data: bytes | mmap.mmap, wanted: int) -> Iterator[bytes]:
    """Contents of the length-delimited fields of this number in a protobuf message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                size, at = _varint(data, at)
                if at + size > len(data):
                    raise ValueError("truncated")
                if tag >> 3 == wanted:
                    yield data[at : at + size]
                at += size
            case _:
                raise ValueError("not a protobuf message")


def _varint(data: bytes | mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("varint too long")


@contextmanager
def _mapped(path: Path) -> Iterator[bytes | mmap.mmap]:
    if path.stat().st_size == 0:  # cannot be mapped
        yield b""
        return
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def library_digest(path: Path) -> str | None:
    """The digest inside a library, without loading it."""
    with _mapped(path) as data:
        found = re.search(DIGEST_MARK.encode() + rb"([0-9a-f]{64})\0", data)
        return found.group(1).decode() if found else None


def _register(options: ort.SessionOptions, library: Path) -> None:
    path = str(library.resolve())
    before = _registered.get(options)
    if before == path:
        return
    if before is not None:
        why = f"{before} is registered with them already"
        raise UsageError("E_OPTIONS", "these SessionOptions serve another onnxfuse model", why, "make new ones")
    try:
        options.register_custom_ops_library(path)
    except _ORT_ERRORS as e:
        raise UsageError("E_LIBRARY", f"onnxruntime does not take {library}", str(e)) from e
    _registered[options] = path
