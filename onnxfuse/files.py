"""Private folders, and renames that happen all or not at all. Knows nothing of models.

A private folder is held by a lock on a file in it (flock), which the system drops when the process ends, however it
ends. Whoever makes the next one beside it first removes those that nobody holds, so killed runs do not pile up.

`publish` puts the files of a folder in place. The folder is renamed first, to a name that follows from the target's:
from then on the new files count. A run that is killed between the renames that follow leaves that folder, and the next
`publish` to the same target, or `finish`, completes them. One process at a time publishes in a directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

BESIDE = ".onnxfuse-new-"  # private folders beside an output
TEMPORARY = "onnxfuse-tmp-"  # the same in the system's place for temporary files
_COMMIT = ".onnxfuse-commit-"
_LOCK = ".lock"  # inside a private folder
_OLD, _STALE = (
    ".old",
    ".stale",
)  # inside a committed one: hard links to what is being replaced; names of files to remove
_WAIT = 30.0  # seconds for another process to finish its renames
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EINVAL})


# --- private folders -------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def private_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder in `parent` (None: where temporary files go), removed at the end. Raises OSError."""
    place = Path(tempfile.gettempdir()) if parent is None else Path(os.path.abspath(parent))
    prefix = TEMPORARY if parent is None else BESIDE
    _sweep(place, prefix)
    folder, held = _held_folder(place, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _held_folder(place: Path, prefix: str) -> tuple[Path, int]:
    """A new folder and the descriptor that holds it; another process may sweep it away before we hold it."""
    for _ in range(100):
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        with contextlib.suppress(FileNotFoundError):
            return folder, _hold(folder)
    raise OSError(errno.EAGAIN, "no folder to be had", str(place))


def _hold(folder: Path) -> int:
    """A descriptor with the folder's lock (without it where the file system has none)."""
    held = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        swept = not (folder / _LOCK).exists()
    except OSError as error:
        swept = error.errno not in _NO_LOCKS
    if swept:
        os.close(held)
        raise FileNotFoundError(errno.ENOENT, "swept away", str(folder))
    return held


def _sweep(place: Path, prefix: str) -> None:
    """Remove what killed runs of this user left. Nothing here may fail: it is not what the caller asked for."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_abandoned(entry)


def _remove_abandoned(entry: os.DirEntry[str]) -> None:
    """Raises OSError when it is in use, or when this file system cannot tell."""
    if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
        return
    folder = Path(entry.path)
    if not (folder / _LOCK).exists():
        folder.rmdir()  # made, and killed or not there yet: it is empty
        return
    with _descriptor(folder / _LOCK) as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


# --- all or nothing --------------------------------------------------------------------------------------------------
def publish(folder: Path, names: Sequence[str], target: Path, stale: Collection[str] = ()) -> None:
    """Move the files of `folder` beside `target`, in this order, over whatever is there; then remove the stale ones.

    Raises OSError: none moved.
    """
    place = Path(os.path.abspath(target)).parent
    (folder / _STALE).write_bytes(b"\0".join(os.fsencode(name) for name in stale))
    for name in (*names, _STALE):
        _sync(folder / name)
    with _alone(place):
        _complete(target)
        try:
            os.replace(folder, _committed(target))  # from here on the new files count
            _sync_folder(place)
            _complete(target, names)
        except (KeyboardInterrupt, SystemExit) as interrupt:
            if _complete(target, names):
                interrupt.add_note("the files were in place already")
            raise
        _sync_folder(place)


def finish(target: Path) -> bool:
    """Complete what a killed `publish` to this target had begun; whether there was anything. Raises OSError."""
    if not _committed(target).is_dir():
        return False
    with _alone(Path(os.path.abspath(target)).parent):
        _complete(target)
    return True


def _committed(target: Path) -> Path:
    """Where the folder of a publication lies meanwhile: a name of its own length, whatever the target's."""
    path = Path(os.path.abspath(target))
    return path.parent / (_COMMIT + hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16])


def _complete(target: Path, names: Sequence[str] | None = None) -> bool:
    """The renames of a committed folder, if there is one. The model goes last; what is missing has been moved."""
    committed, place = _committed(target), Path(os.path.abspath(target)).parent
    if not committed.is_dir():
        return False
    if names is None:
        found = {p.name for p in committed.iterdir()} - {_LOCK, _OLD, _STALE}
        names = sorted(found, key=lambda name: (name == target.name, name))
    kept = committed / _OLD
    moved: list[str] = []
    try:
        for name in names:
            if (committed / name).exists():
                _keep(place / name, kept)
                _move(committed / name, place / name)
                moved.append(name)
    except OSError:
        _restore(moved, kept, place)
        shutil.rmtree(committed, ignore_errors=True)
        raise
    for name in _stale(committed):
        with contextlib.suppress(OSError):
            (place / name).unlink()
    shutil.rmtree(committed, ignore_errors=True)
    return True


def _stale(committed: Path) -> list[str]:
    listed = committed / _STALE
    return [os.fsdecode(raw) for raw in listed.read_bytes().split(b"\0") if raw] if listed.exists() else []


def _keep(path: Path, kept: Path) -> None:
    """Another link to a file about to be replaced, for the case that the next one cannot be."""
    with contextlib.suppress(OSError):  # a file system without hard links
        kept.mkdir(exist_ok=True)
        os.link(path, kept / path.name, follow_symlinks=False)


def _restore(moved: Sequence[str], kept: Path, place: Path) -> None:
    for name in moved:
        with contextlib.suppress(OSError):
            if (kept / name).exists():
                os.replace(kept / name, place / name)
            else:
                os.unlink(place / name)


def _move(source: Path, target: Path) -> None:
    """Rename over whatever is there, keeping its permissions."""
    if target.exists():
        os.chmod(source, stat.S_IMODE(target.stat().st_mode))
    os.replace(source, target)


def _sync(path: Path) -> None:
    """Wait until the data are on the disk: done before a file takes its place, not before it is verified."""
    with _descriptor(path) as handle:
        os.fsync(handle)


def _sync_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system knows how, and what has been renamed stays renamed
        _sync(path)


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """One process at a time publishes in a directory. Its lock needs no file and ends with the process."""
    with _descriptor(place) as handle:
        give_up = time.monotonic() + _WAIT
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    break
                if time.monotonic() > give_up:
                    raise OSError(error.errno, "another process holds its lock", str(place)) from error
            time.sleep(0.01)
        yield


@contextlib.contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)
