"""tools/soak.py: what it measures is what it says."""

import subprocess
import sys
import time

import soak

KIB, MIB = 1 << 10, 1 << 20


def marks(per_run: int, step: int = 0) -> list[int]:
    """Memory at the marks of 1500 sessions, a step in the last but one."""
    return [200 * MIB + k * 150 * per_run + (step if k >= 8 else 0) for k in range(10)]


def test_a_leak_is_told_from_a_step_of_the_allocator() -> None:
    assert soak.growth(marks(0, step=2 * MIB), 150) == 0
    assert soak.growth(marks(2 * KIB), 150) == 2 * KIB
    assert soak.growth(marks(2 * KIB, step=2 * MIB), 150) == 2 * KIB > soak.LEAK["sessions"]


def test_memory_of_children_and_theirs_is_counted() -> None:
    hold = f"b = bytearray(b'x' * {64 * MIB}); import time; time.sleep(0.5)"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    with soak.Together() as seen:
        subprocess.run([sys.executable, "-c", nested], check=True)
    assert 64 * MIB < seen.most < 256 * MIB


def test_a_new_name_is_seen_when_it_appears(tmp_path) -> None:
    (tmp_path / "there").write_text("before")
    write = f"import time; time.sleep(0.3); open({str(tmp_path / '.new')!r}, 'w').close(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", write]) as child:
        begin = time.perf_counter()
        soak._wait_for_a_name(child, tmp_path)
        assert (tmp_path / ".new").exists()
        assert 0.3 <= time.perf_counter() - begin < 30
        child.kill()
