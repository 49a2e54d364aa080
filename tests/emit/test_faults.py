"""Whatever ends or hinders a write, the old files or the new ones are there, whole, and nothing else stays."""

import errno
import itertools
import os
import resource
import shutil
import signal
import sys
import traceback
import warnings
from pathlib import Path

import pytest

from onnxfuse import files
from onnxfuse.emit import bundle
from onnxfuse.emit.bundle import staged, write
from onnxfuse.errors import UsageError
from tests.emit.pieces import assert_same, fused
from tests.emit.test_bundle import X, content, listing, weighted

OLD, NEW = b"the old library", b"the new library"


def in_child(work) -> int:
    """Run `work` in a process of its own; its exit status as os.waitpid gives it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child of a process with threads only writes files
        child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def kill_at(step: int) -> None:
    """End this process at its n-th file operation from now on."""
    seen = iter(range(step))

    def hook(event: str, _args: object) -> None:
        counts = event == "open" or (event.startswith(("os.", "shutil.", "fcntl.")) and event != "os.kill")
        if counts and next(seen, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def bundles(tmp_path: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The files of the old and of the new bundle, and tmp_path/out holding the old one."""
    for name, seed, library in (("new", 1, NEW), ("out", 0, OLD)):
        (tmp_path / name).mkdir()
        write(fused(weighted(seed)), library, tmp_path / name / "out.onnx", external_data=True)
    return content(tmp_path / "out"), content(tmp_path / "new")


def visible(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}


def by_role(found: dict[str, bytes]) -> dict[str, bytes]:
    """The data file has another name when the old one was still in use."""
    return {Path(name).suffix: raw for name, raw in found.items() if not name.endswith(".onnx")}


def test_a_kill_at_any_moment_leaves_the_old_files_or_the_new_ones(tmp_path):
    old, new = bundles(tmp_path)
    out, emission = tmp_path / "out", fused(weighted(1))
    seen = {"old": 0, "new": 0, "between": 0}
    for step in range(1000):
        shutil.rmtree(out)
        out.mkdir()
        for name, raw in old.items():
            (out / name).write_bytes(raw)

        def work(step: int = step) -> None:
            kill_at(step)
            write(emission, NEW, out / "out.onnx", external_data=True)

        status = in_child(work)
        # The model at `out` works at once, whatever lies beside it ...
        seed = 0 if visible(out)["out.onnx"] == old["out.onnx"] else 1
        assert_same(weighted(seed), str(out / "out.onnx"), X)
        # ... and the next one to look at the pair sees one of the two.
        began = files.finish(out / "out.onnx")
        pair = by_role(visible(out))
        assert pair in (by_role(old), by_role(new)), f"step {step}"
        seen["between" if began else "old" if pair == by_role(old) else "new"] += 1
        if status == 0:
            break
        assert status == signal.SIGKILL
    assert all(count > 2 for count in seen.values()), seen
    assert by_role(visible(out)) == by_role(new)


def test_killed_runs_do_not_pile_up(tmp_path):
    emission = fused(weighted(1))
    for step in (10, 15, 20, 25, 30):
        in_child(lambda step=step: (kill_at(step), write(emission, NEW, tmp_path / "out.onnx", external_data=True)))
        assert len([name for name in listing(tmp_path) if name.startswith(".")]) <= 1
    write(emission, NEW, tmp_path / "out.onnx", external_data=True)
    assert listing(tmp_path) == ["out.onnx", "out.onnx.data", "out.so"]


def test_a_run_that_is_still_going_on_is_left_alone(tmp_path):
    with staged(fused(weighted(0)), OLD, tmp_path / "a.onnx") as first:
        write(fused(weighted(1)), NEW, tmp_path / "b.onnx")
        first.publish()
    assert listing(tmp_path) == ["a.onnx", "a.so", "b.onnx", "b.so"]


@pytest.mark.parametrize("signal_error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_between_the_renames_does_not_leave_half_of_it(signal_error, tmp_path, monkeypatch):
    bundles(tmp_path)
    real, count = os.replace, iter(range(9))

    def replace(*names):
        real(*names)
        if next(count) == 1:
            raise signal_error

    with staged(fused(weighted(1)), NEW, tmp_path / "out" / "out.onnx", external_data=True) as pair:
        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(signal_error) as caught:
            pair.publish()
    assert caught.value.__notes__ == ["the files were in place already"]
    assert by_role(content(tmp_path / "out")) == by_role(content(tmp_path / "new"))


# --- the disk ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("limit", [100, 3000, 8500])
def test_a_disk_that_fills_up_is_one_clear_error(limit, tmp_path):
    """A limit on the size of files stands for the disk: writing fails part-way, the same road through the code."""
    old, _ = bundles(tmp_path)
    out, emission = tmp_path / "out" / "out.onnx", fused(weighted(1))

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(UsageError) as caught:
            write(emission, bytes(8000), out, external_data=limit == 3000)
        assert caught.value.code == "E_OUTPUT"
        assert "File too large" in caught.value.why

    assert in_child(work) == 0
    assert content(tmp_path / "out") == old


def failing(real, step: int, code: int):
    """The function, failing at its n-th call."""
    calls = itertools.count()

    def wrapped(*args, **options):
        if next(calls) == step:
            raise OSError(code, os.strerror(code))
        return real(*args, **options)

    return wrapped


@pytest.mark.parametrize(("name", "steps"), [("fsync", 4), ("replace", 4)])
def test_an_error_at_any_of_the_last_steps_undoes_the_ones_before(name, steps, tmp_path, monkeypatch):
    old, _ = bundles(tmp_path)
    emission = fused(weighted(1))
    for step in range(steps):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing(getattr(os, name), step, errno.EIO))
            with pytest.raises(UsageError) as caught:
                write(emission, NEW, tmp_path / "out" / "out.onnx", external_data=True)
        assert caught.value.code == "E_OUTPUT"
        assert content(tmp_path / "out") == old, f"{name} {step}"


def test_an_error_takes_away_what_was_not_there_before(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", failing(os.replace, 2, errno.EPERM))
    with pytest.raises(UsageError):
        write(fused(weighted(1)), NEW, tmp_path / "out.onnx")
    assert listing(tmp_path) == []


def test_a_directory_that_became_read_only_is_an_error(tmp_path, monkeypatch):
    old, _ = bundles(tmp_path)
    emission = fused(weighted(1))
    monkeypatch.setattr(bundle, "private_folder", failing(None, 0, errno.EROFS))
    with pytest.raises(UsageError, match="Read-only file system"):
        write(emission, NEW, tmp_path / "out" / "out.onnx")
    assert content(tmp_path / "out") == old


def test_a_system_without_locks_still_writes(tmp_path, monkeypatch):
    def unknown(*_args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", unknown)
    write(fused(weighted(0)), OLD, tmp_path / "out.onnx", external_data=True)
    assert listing(tmp_path) == ["out.onnx", "out.onnx.data", "out.so"]


# --- two at once ------------------------------------------------------------------------------------------------------
def test_two_processes_with_the_same_target_leave_one_pair(tmp_path):
    bundles(tmp_path)
    out, emissions = tmp_path / "out" / "out.onnx", [fused(weighted(seed)) for seed in (0, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        children = []
        for emission, library in zip(emissions, (OLD, NEW), strict=True):
            children.append(os.fork())
            if children[-1] == 0:
                try:
                    for _ in range(20):
                        write(emission, library, out)
                except BaseException:
                    os._exit(1)
                os._exit(0)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert listing(out.parent) == ["out.onnx", "out.so"]
    seed = 0 if (out.parent / "out.so").read_bytes() == OLD else 1
    assert_same(weighted(seed), str(out), X)


def test_an_output_that_is_a_link_is_replaced_and_what_it_points_to_stays(tmp_path):
    precious = tmp_path / "precious.onnx"
    precious.write_bytes(b"precious")
    (tmp_path / "out.onnx").symlink_to(precious)
    write(fused(weighted(0)), OLD, tmp_path / "out.onnx")
    assert precious.read_bytes() == b"precious"
    assert not (tmp_path / "out.onnx").is_symlink()
    assert_same(weighted(0), str(tmp_path / "out.onnx"), X)


def test_a_directory_reached_through_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(fused(weighted(0)), OLD, tmp_path / "link" / "out.onnx", external_data=True)
    assert listing(tmp_path / "real") == ["out.onnx", "out.onnx.data", "out.so"]


@pytest.mark.parametrize("name", ["n" * 250 + ".onnx", "模" * 80 + ".onnx"])
def test_names_as_long_as_the_file_system_takes(name, tmp_path):
    write(fused(weighted(0)), OLD, tmp_path / name)
    assert sorted(listing(tmp_path)) == sorted([name, name.replace(".onnx", ".so")])


def test_a_name_that_is_too_long_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="File name too long"):
        write(fused(weighted(0)), OLD, tmp_path / ("n" * 250 + ".onnx"), external_data=True)
    assert listing(tmp_path) == []
