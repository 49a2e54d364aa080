"""The cache saves time and nothing else: the same library, whatever the folder holds."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import onnx.parser
import pytest

from onnxfuse.codegen import cache as caches
from onnxfuse.codegen import generate as generating
from onnxfuse.codegen.cache import VARIABLE, Cache, Entry, default_cache, key_of
from onnxfuse.codegen.generate import generate
from onnxfuse.config import Config
from onnxfuse.ir.plan import Plans
from onnxfuse.pipeline import optimize
from onnxfuse.target import by_name
from tests.codegen.tiny import native

BOTH = """
<ir_version: 8, opset_import: ["" : 17]>
both (float[N, 5] x, float[M, 7] a) => (float[N, 5] y, float[M] z) { r = Exp(x)  y = Add(r, r)
  z = ReduceMax <axes = [1], keepdims = 0> (a) }
"""
ONE = """
<ir_version: 8, opset_import: ["" : 17]>
one (float[N, 5] x) => (float[N, 5] y) { r = Exp(x)  y = Add(r, r) }
"""


@pytest.fixture
def cache(tmp_path) -> Cache:
    return Cache(tmp_path / "cache")


def test_an_entry_comes_back_as_it_was(cache):
    entry = Entry({"digest": "abc", "faults": [{"text": "x"}]}, b"\x00\n\xff" * 100)
    cache.put("ab" * 32, entry)
    assert cache.get("ab" * 32) == entry
    assert cache.get("cd" * 32) is None


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-1], lambda b: b + b"x", lambda b: b"", lambda b: b[:40], lambda b: b[:-1] + bytes([b[-1] ^ 1])],
    ids=["cut", "longer", "empty", "head only", "one bit"],
)
def test_a_damaged_entry_is_no_entry_and_goes(cache, damage):
    cache.put("ab" * 32, Entry({}, b"data"))
    (path,) = files(cache)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get("ab" * 32) is None
    assert not path.exists()


def test_the_library_is_the_same_with_and_without(cache):
    plans = plans_for(BOTH)
    fresh = generate(plans, native())
    cold = generate(plans, native(), cache=cache)
    warm = generate(plans, native(), cache=cache)
    assert fresh.image == cold.image == warm.image
    assert fresh.digest == cold.digest == warm.digest


def test_nothing_is_compiled_twice(cache, monkeypatch):
    plans = plans_for(BOTH)
    generate(plans, native(), cache=cache)
    monkeypatch.setattr(generating, "emit_module", unreachable)
    monkeypatch.setattr(generating, "link", unreachable)
    generate(plans, native(), cache=cache)


def test_kernels_are_shared_between_libraries(cache, monkeypatch):
    both, one = plans_for(BOTH), plans_for(ONE)
    generate(both, native(), cache=cache)
    want = generate(one, native())
    monkeypatch.setattr(generating, "emit_module", unreachable)
    assert generate(one, native(), cache=cache).image == want.image


def test_other_targets_and_sources_have_entries_of_their_own(cache, monkeypatch):
    plans = plans_for(ONE)
    generate(plans, native(), cache=cache)
    before = set(files(cache))
    generate(plans, by_name("x86-64-v2"), cache=cache)
    between = set(files(cache))
    assert len(between) == 2 * len(before)
    monkeypatch.setattr(caches, "sources", lambda: "edited")
    generate(plans, native(), cache=cache)
    assert len(set(files(cache))) == 3 * len(before)


def test_an_entry_damaged_in_between_is_compiled_again(cache):
    plans = plans_for(BOTH)
    want = generate(plans, native(), cache=cache).image
    for path in files(cache):
        path.write_bytes(path.read_bytes()[:-1])
    assert generate(plans, native(), cache=cache).image == want


def test_the_folder_stays_within_its_limit(tmp_path):
    cache = Cache(tmp_path, limit=1000)
    for k in range(10):
        cache.put(f"{k:064x}", Entry({}, bytes(300)))
        os.utime(cache._path(f"{k:064x}"), (k, k))
    cache.tidy()
    assert sum(f.stat().st_size for f in files(cache)) <= 1000
    assert cache.get(f"{9:064x}") is not None
    assert cache.get(f"{0:064x}") is None


def test_a_folder_that_cannot_be_written_is_only_slower(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    cache = Cache(tmp_path / "file")
    cache.put("ab" * 32, Entry({}, b""))
    assert cache.get("ab" * 32) is None


def test_the_default_folder_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    assert default_cache() == Cache(tmp_path / "mine")
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o700
    (tmp_path / "mine").chmod(0o777)
    assert default_cache() is None


def test_an_empty_variable_switches_it_off(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    assert default_cache() is None


def test_keys_tell_texts_apart():
    assert key_of("ab", "c") != key_of("a", "bc")


def plans_for(text: str) -> Plans:
    return optimize(onnx.parser.parse_model(text), Config(cache=False)).plans


def files(cache: Cache) -> list[Path]:
    return [p for p in cache.folder.rglob("*") if p.is_file()]


def unreachable(*_args, **_more):
    raise AssertionError("compiled again")
