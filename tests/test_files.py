"""files.py: private folders last as long as their process; a publication is the business of one process at a time."""

import os
import subprocess
import sys
import threading

import pytest

from onnxfuse import files
from onnxfuse.files import BESIDE, private_folder, publish


def test_a_folder_goes_with_its_block(tmp_path):
    with private_folder(tmp_path) as folder:
        (folder / "file").write_bytes(b"1")
        assert folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_process_was_killed_goes_with_the_next(tmp_path):
    code = f"""import os, pathlib, signal
from onnxfuse.files import private_folder
with private_folder(pathlib.Path({str(tmp_path)!r})) as folder:
    (folder / "file").write_bytes(b"1")
    os.kill(os.getpid(), signal.SIGKILL)"""
    subprocess.run([sys.executable, "-c", code], check=False)
    (left,) = tmp_path.iterdir()
    assert (left / "file").exists()
    with private_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_was_only_just_made_goes_too(tmp_path):
    (tmp_path / f"{BESIDE}abc").mkdir()
    with private_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_what_others_call_alike_stays(tmp_path):
    (tmp_path / f"{BESIDE}notes").mkdir()
    (tmp_path / f"{BESIDE}notes" / "precious").write_bytes(b"1")
    (tmp_path / f"{BESIDE}file").write_bytes(b"1")
    (tmp_path / f"{BESIDE}link").symlink_to(tmp_path)
    before = sorted(tmp_path.iterdir())
    with private_folder(tmp_path):
        pass
    assert sorted(tmp_path.iterdir()) == before


def test_many_threads_make_folders_at_once(tmp_path):
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(30):
                with private_folder(tmp_path) as folder:
                    (folder / "file").write_bytes(b"1")
                    assert (folder / "file").read_bytes() == b"1"
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed
    assert list(tmp_path.iterdir()) == []


def test_publishing_inside_a_private_folder(tmp_path):
    """Its lock is not the one that publications wait for."""
    with private_folder(tmp_path) as outer:
        with private_folder(outer) as folder:
            (folder / "a").write_bytes(b"1")
            publish(folder, ["a"], outer / "a")
        assert (outer / "a").read_bytes() == b"1"


def test_a_directory_that_stays_locked_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_WAIT", 0.05)
    with private_folder(tmp_path) as folder:
        (folder / "a").write_bytes(b"1")
        with files._alone(tmp_path), pytest.raises(OSError, match="another process holds its lock"):
            publish(folder, ["a"], tmp_path / "a")
    assert os.listdir(tmp_path) == []
