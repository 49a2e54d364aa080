"""What was compiled before: one file per kernel and one per library, in the user's cache folder.

The key of an entry is a hash of everything its content depends on: the printed IR and the schedule, the target, the
versions of LLVM and of this package, and the package's own sources (a changed template never meets an old object).
Nothing here can make a result wrong or fail: an entry that does not read back whole is removed and compiled again, a
folder that cannot be written is not used. Files appear by rename, so any number of processes may share the folder.

The folder is `$ONNXFUSE_CACHE_DIR`, else the user's cache folder; set to nothing it switches the cache off. It holds
code that will be run: it is used only if it belongs to this user and nobody else can write there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import platformdirs

VARIABLE = "ONNXFUSE_CACHE_DIR"
LIMIT = 1 << 30  # bytes; the entries used longest ago go first
TIDY_AFTER = 64  # writes between two looks at the size of the folder, about: one write in so many looks
_MAGIC = b"onnxfuse cache 1\n"
_SUM = 32  # bytes of the checksum that follows the magic
_SOURCES = ("analysis", "codegen", "ir", "templates")  # what decides how a kernel's code looks

Head = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Entry:
    """What is kept under a key: a small JSON record and bytes."""

    head: Head
    data: bytes


@dataclass(frozen=True, slots=True)
class Cache:
    """Entries by key in one folder. No method raises OSError."""

    folder: Path
    limit: int = LIMIT

    def get(self, key: str) -> Entry | None:
        """The entry, or None if there is none or it is damaged (it is then removed)."""
        path = self._path(key)
        try:
            image = path.read_bytes()
        except OSError:
            return None
        entry = _decode(image)
        with contextlib.suppress(OSError):
            if entry is None:
                path.unlink()
            else:
                os.utime(path)  # used now
        return entry

    def put(self, key: str, entry: Entry) -> None:
        """Keep an entry, if that is possible."""
        path = self._path(key)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, _encode(entry))
            if int(key[:8], 16) % TIDY_AFTER == 0:
                self.tidy()

    def tidy(self) -> None:
        """Remove the entries used longest ago until the folder is within its limit."""
        found = sorted(self._files(), reverse=True)
        room = self.limit
        for _, size, path in found:
            room -= size
            if room < 0:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """(time of last use, bytes, path) of each entry."""
        for path in self.folder.glob("??/*"):
            with contextlib.suppress(OSError):
                info = path.stat()
                yield info.st_mtime, info.st_size, path

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key[2:]


def default_cache() -> Cache | None:
    """The cache of this user; None where it is switched off or its folder is not this user's alone."""
    named = os.environ.get(VARIABLE)
    if named == "":
        return None
    folder = Path(named) if named is not None else Path(platformdirs.user_cache_dir("onnxfuse"))
    return Cache(folder) if _private(folder) else None


def _private(folder: Path) -> bool:
    """The folder is there (made now if need be), belongs to this user, and only this user writes there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
    except OSError:
        return False
    if not hasattr(os, "getuid"):
        return True
    return (
        stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def key_of(*parts: str) -> str:
    """Hash of texts, and of everything that is the same for all entries of this package."""
    return hash_of(*versions(), sources(), *parts)


def hash_of(*parts: str) -> str:
    """Hash of texts, each with its length: no two lists of texts run together to the same bytes."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()


@functools.cache
def versions() -> tuple[str, ...]:
    """Versions of this package, llvmlite and LLVM."""
    try:
        own = importlib.metadata.version("onnxfuse")
    except importlib.metadata.PackageNotFoundError:
        own = "unknown"  # run from a source tree that is not installed
    return own, llvmlite.__version__, ".".join(map(str, llvm.llvm_version_info))


@functools.cache
def sources() -> str:
    """Hash of the sources that decide how code is generated."""
    h = hashlib.sha256()
    for name, text in sorted(_modules()):
        h.update(name.encode() + b"\0" + hashlib.sha256(text).digest())
    return h.hexdigest()


def _modules() -> Iterator[tuple[str, bytes]]:
    root = resources.files("onnxfuse")
    yield from ((f"{f}/{m.name}", m.read_bytes()) for f in _SOURCES for m in _python(root / f))
    yield from ((m.name, m.read_bytes()) for m in _python(root))


def _python(folder: Traversable) -> Iterator[Traversable]:
    return (m for m in folder.iterdir() if m.name.endswith(".py"))


def _encode(entry: Entry) -> bytes:
    body = json.dumps(entry.head, sort_keys=True).encode() + b"\n" + entry.data
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode(image: bytes) -> Entry | None:
    start = len(_MAGIC) + _SUM
    body = memoryview(image)[start:]
    if not image.startswith(_MAGIC) or hashlib.sha256(body).digest() != image[len(_MAGIC) : start]:
        return None
    head, _, data = bytes(body).partition(b"\n")
    return Entry(json.loads(head), data)


def _write(path: Path, image: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(image)
        os.replace(name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


__all__ = ["LIMIT", "VARIABLE", "Cache", "Entry", "default_cache", "hash_of", "key_of", "sources", "versions"]
