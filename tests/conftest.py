"""Fixtures of all tests: golden files, seeded random numbers, markers."""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path

import hypothesis
import numpy as np
import pytest

HERE = Path(__file__).parent
os.environ["ONNXFUSE_CACHE_DIR"] = (
    ""  # what is tested is compiled here and now; tests/codegen/test_cache.py has its own
)
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("fixed")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/ instead of comparing with it")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("-m"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    for item in items:
        missing = [m.args[0] for m in item.iter_markers("isa") if m.args[0] not in _host_features()]
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"this CPU has no {', '.join(missing)}"))


def _host_features() -> frozenset[str]:
    from llvmlite import binding  # only when a test asks

    return frozenset(name for name, on in binding.get_host_cpu_features().items() if on)


class _Writer(str):  # noqa: SLOT000 - carries the path
    """Equal to every text, which it writes to the golden file."""

    path: Path

    def __eq__(self, other: object) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(str(other), encoding="utf-8")
        return True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


@pytest.fixture
def golden(request) -> str:
    """The text this test must give: `assert str(x) == golden`. Rewritten by --update-golden; read the diff."""
    folder = request.path.relative_to(HERE).with_suffix("")
    path = HERE / "golden" / folder / (re.sub(r"[^A-Za-z0-9_.-]+", "_", request.node.name) + ".txt")
    if request.config.getoption("--update-golden"):
        writer = _Writer()
        writer.path = path
        return writer
    if not path.exists():
        return f"no {path.relative_to(HERE)}: run with --update-golden and read it"
    return path.read_text(encoding="utf-8")


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random numbers that depend on the test's name only."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
