"""The library as onnxruntime sees it: right results, refusals that name the place, nothing leaked, threads welcome."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from onnxfuse.codegen.build import Builder
from onnxfuse.codegen.cpu import CPU_FEATURES
from onnxfuse.codegen.dims import emit_dims, env_words
from onnxfuse.codegen.generate import emit_module, generate
from onnxfuse.codegen.glue.layout import EXPORTS
from onnxfuse.codegen.glue.module import glue_module
from onnxfuse.codegen.glue.tables import Part
from onnxfuse.codegen.object import compile_module, dynamic_symbols, host_features, link, load_object
from onnxfuse.errors import CompileError, UsageError
from onnxfuse.ir import given
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import apply, lit, load, sym, var
from onnxfuse.ir.kernel import DimBinding, DimCheck, Kernel, Stage, Store
from onnxfuse.ir.loops import Axis
from onnxfuse.ir.plan import Schedule
from onnxfuse.runtime.jit import jit
from onnxfuse.target import TARGETS
from tests.codegen.tiny import model_of, native, plan_of, plans_of, pointwise, save, value

N, M = sym("N"), sym("M")
NODE = helper.make_node
OLD_PYTHON = os.environ.get("ONNXFUSE_OLD_ORT_PYTHON", "")


def add_relu(consts=(), shape=(N, 4), second=(N, 4)):
    x, y = value("x", DType.F32, *shape), value("y", DType.F32, *second)
    z = value("z", DType.F32, *shape)
    marked = (y,) if consts else ()
    return pointwise("add_relu", [x, y], z, lambda a, b: apply("max", a + b, 0.0), consts=marked)


SHARED = add_relu()
BODY = [NODE("Add", ["x", "y"], ["t"]), NODE("Relu", ["t"], ["z"])]


def options(library: Path | None, threads: int = 2) -> ort.SessionOptions:
    so = ort.SessionOptions()
    so.intra_op_num_threads = threads
    so.log_severity_level = 4
    if library is not None:
        so.register_custom_ops_library(str(library))
    return so


def session(path: Path, library: bool = True, threads: int = 2) -> ort.InferenceSession:
    so = options(path.with_suffix(".so") if library else None, threads)
    return ort.InferenceSession(str(path), so, providers=["CPUExecutionProvider"])


def ran_our_kernel(path: Path, feeds: dict[str, np.ndarray], folder: Path) -> bool:
    """Whether the profile shows the custom node (and not its inlined body)."""
    so = options(path.with_suffix(".so"))
    so.enable_profiling = True
    so.profile_file_prefix = str(folder / "profile")
    s = ort.InferenceSession(str(path), so, providers=["CPUExecutionProvider"])
    s.run(None, feeds)
    return '"op_name" : "add_relu"' in Path(s.end_profiling()).read_text()


@pytest.fixture(scope="module")
def simple(tmp_path_factory) -> Path:
    kernel = add_relu()
    lib = generate(plans_of(plan_of(kernel)), native())
    return save(tmp_path_factory.mktemp("simple"), model_of(kernel, BODY), lib)


def rand(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_the_kernel_runs_and_agrees_with_the_body(simple, tmp_path):
    for n in (1, 7, 64):
        feeds = {"x": rand(n, 4), "y": rand(4, n).T.copy()}
        with_library, without = (session(simple, library=lib).run(None, feeds)[0] for lib in (True, False))
        np.testing.assert_array_equal(with_library, without)
    assert ran_our_kernel(simple, feeds, tmp_path)


def test_no_elements(simple):
    out = session(simple).run(None, {"x": rand(0, 4), "y": rand(0, 4)})[0]
    assert out.shape == (0, 4)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_number_of_threads(simple, threads):
    x, y = rand(300, 4), rand(300, 4) + 1
    out = session(simple, threads=threads).run(None, {"x": x, "y": y})[0]
    np.testing.assert_array_equal(out, np.maximum(x + y, 0))


def test_wrong_dimension_is_a_status_that_says_where(simple):
    s = session(simple)
    expected = r"kernel add_relu \(nodes add_relu_node\): input 1 \(y\) axis 0: expected N = 7, got 3"
    with pytest.raises(Exception, match=expected):
        s.run(None, {"x": rand(7, 4), "y": rand(3, 4)})
    assert s.run(None, {"x": rand(7, 4), "y": rand(7, 4)})[0].shape == (7, 4)


def loosened(model, ranks: dict[str, int]):
    """The model with declared shapes that say less than the kernel expects."""
    for v in (*model.graph.input, *model.graph.output):
        v.type.tensor_type.ClearField("shape")
        for k in range(ranks.get(v.name, 0)):
            v.type.tensor_type.shape.dim.add().dim_param = f"{v.name}_{k}"
    return model


def test_wrong_static_dimension_and_rank(simple, tmp_path):
    kernel = add_relu()
    path = save(tmp_path, loosened(model_of(kernel, BODY), {"x": 2, "y": 2}), None)
    path.with_suffix(".so").write_bytes(simple.with_suffix(".so").read_bytes())
    with pytest.raises(Exception, match=r"input 0 \(x\) axis 1: expected 4, got 5"):
        session(path).run(None, {"x": rand(7, 5), "y": rand(7, 5)})
    path = save(tmp_path, loosened(model_of(kernel, BODY), {"x": 3, "y": 3}), None)
    with pytest.raises(Exception, match=r"input 0: expected rank 2, got rank 3"):
        session(path).run(None, {"x": rand(7, 4, 1), "y": rand(7, 4, 1)})


def test_many_threads_on_one_session(simple):
    s = session(simple)
    bad: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(50):
            x, y = (rng.standard_normal((int(rng.integers(1, 40)), 4)).astype(np.float32) for _ in range(2))
            y = np.resize(y, x.shape)
            if not np.array_equal(s.run(None, {"x": x, "y": y})[0], np.maximum(x + y, 0)):
                bad.append(seed)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad


def test_many_sessions_one_options_object(simple):
    so = options(simple.with_suffix(".so"))
    made = [ort.InferenceSession(str(simple), so, providers=["CPUExecutionProvider"]) for _ in range(5)]
    x = rand(3, 4)
    for s in made:
        np.testing.assert_array_equal(s.run(None, {"x": x, "y": x})[0], np.maximum(x + x, 0))


def test_sessions_outlive_each_other(simple):
    first, second = session(simple), session(simple)
    del first
    gc.collect()
    third = session(simple)
    x = rand(3, 4)
    for s in (second, third):
        np.testing.assert_array_equal(s.run(None, {"x": x, "y": x})[0], np.maximum(x + x, 0))


def test_many_threads_register_at_once(tmp_path, simple):
    library = tmp_path / "fresh.so"  # another file: its first registration is still to come
    library.write_bytes(simple.with_suffix(".so").read_bytes())
    gate = threading.Barrier(8)
    made: list[ort.InferenceSession] = []

    def work() -> None:
        gate.wait()
        made.append(ort.InferenceSession(str(simple), options(library), providers=["CPUExecutionProvider"]))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    x = rand(3, 4)
    assert len(made) == 8
    for s in made:
        np.testing.assert_array_equal(s.run(None, {"x": x, "y": x})[0], np.maximum(x + x, 0))


def test_two_libraries_with_the_same_kernel_names_live_side_by_side(tmp_path, simple):
    kernel = pointwise("add_relu", SHARED.inputs, SHARED.outputs, lambda a, b: a + b + 10.0)
    other = save(tmp_path, model_of(kernel, BODY), generate(plans_of(plan_of(kernel)), native()))
    first, second = session(simple), session(other)
    x = rand(3, 4)
    np.testing.assert_array_equal(first.run(None, {"x": x, "y": x})[0], np.maximum(x + x, 0))
    np.testing.assert_array_equal(second.run(None, {"x": x, "y": x})[0], (x + x) + 10)


def test_registering_twice_is_an_error_not_a_crash(simple):
    so = options(simple.with_suffix(".so"))
    so.register_custom_ops_library(str(simple.with_suffix(".so")))
    with pytest.raises(Exception, match="Domain already set"):
        ort.InferenceSession(str(simple), so, providers=["CPUExecutionProvider"])


# ---- constants, packing, scratch, phases ----

WEIGHT = numpy_helper.from_array(np.arange(4, dtype=np.float32) - 1.5, "y")


def packed_model(tmp_path: Path, overridable: bool, pack: tuple[str, ...] = ("y",)) -> Path:
    kernel = add_relu(consts=("y",), second=(4,))
    plan = plan_of(kernel, Schedule("scalar", pack=pack, grain=64, unroll=2))
    lib = generate(plans_of(plan), native())
    model = loosened(model_of(kernel, BODY, [WEIGHT], overridable), {"x": 2, "y": 1})
    return save(tmp_path, model, lib)


def test_constants_are_packed_at_creation(tmp_path):
    s = session(packed_model(tmp_path, overridable=False))
    w = numpy_helper.to_array(WEIGHT)
    for n in (1, 5, 33):
        x = rand(n, 4)
        np.testing.assert_array_equal(s.run(None, {"x": x})[0], np.maximum(x + w, 0))


def test_overridden_constant_is_packed_at_each_run(tmp_path):
    s = session(packed_model(tmp_path, overridable=True))
    x, y = rand(5, 4), rand(4)
    np.testing.assert_array_equal(s.run(None, {"x": x, "y": y})[0], np.maximum(x + y, 0))
    np.testing.assert_array_equal(s.run(None, {"x": x})[0], np.maximum(x + numpy_helper.to_array(WEIGHT), 0))


@pytest.mark.parametrize("overridable", [False, True])
def test_constants_that_are_not_packed(tmp_path, overridable):
    """Looked up at creation where nobody can override them."""
    s = session(packed_model(tmp_path, overridable, ()))
    for n in (1, 5, 0, 33):
        x, y = rand(n, 4), rand(4) if overridable else numpy_helper.to_array(WEIGHT)
        fed = {"x": x, "y": y} if overridable else {"x": x}
        np.testing.assert_array_equal(s.run(None, fed)[0], np.maximum(x + y, 0))


@pytest.mark.parametrize("pack", [("y",), ()])
def test_constant_of_the_wrong_shape_is_refused_not_packed(tmp_path, pack):
    path = packed_model(tmp_path, overridable=False, pack=pack)
    kernel = add_relu(consts=("y",), second=(4,))
    longer = numpy_helper.from_array(np.zeros(1, np.float32), "y")
    save(tmp_path, model_of(kernel, BODY, [longer]), None)
    with pytest.raises(Exception, match=r"input 1 \(y\) axis 0: expected 4, got 1"):
        session(path).run(None, {"x": rand(2, 4)})


# ---- dimensions ----


def test_run_time_broadcast_takes_the_general_variant(tmp_path):
    x, y = value("x", DType.F32, N, 4), value("y", DType.F32, M, 4)
    z = value("z", DType.F32, apply("bdim", N, M), 4)
    i, j = Axis("i", apply("bdim", N, M)), Axis("j", 4)
    a = load(x, (apply("bcast", var(i), N), var(j)), DType.F32)
    b = load(y, (apply("bcast", var(i), M), var(j)), DType.F32)
    stage = Stage((), (Store(z, (var(i), var(j)), apply("max", a + b, 0.0)),))
    dims = (DimBinding(N, x, 0), DimBinding(M, y, 0))
    kernel = Kernel("add_relu", (x, y), (z,), (i, j), (stage,), dims=dims, maybe=((N, M),), origin=("A", "B"))
    plan = plan_of(kernel, general=Schedule("scalar", unroll=2))

    one = jit(plan, native())
    for n, m, variant in ((3, 3, "fast"), (1, 3, "general"), (3, 1, "general"), (1, 1, "fast")):
        p, q = rand(n, 4), rand(m, 4)
        np.testing.assert_array_equal(one([p, q])[0], np.maximum(p + q, 0))
        assert one.last_variant == variant

    path = save(tmp_path, model_of(kernel, BODY), generate(plans_of(plan), native()))
    s = session(path)
    for n, m in ((3, 3), (1, 3), (3, 1)):
        p, q = rand(n, 4), rand(m, 4)
        np.testing.assert_array_equal(s.run(None, {"x": p, "y": q})[0], np.maximum(p + q, 0))
    with pytest.raises(Exception, match="N and M do not broadcast: expected 1 or 2, got 3"):
        s.run(None, {"x": rand(2, 4), "y": rand(3, 4)})


def dims_of(shapes, out_dims, dims, checks=(), maybe=()):
    """Call K.dims alone: result, env, faults."""
    inputs = [value(f"v{k}", DType.F32, *s) for k, s in enumerate(shapes)]
    out = value("out", DType.F32, *out_dims)
    kernel = replace(
        pointwise("k", inputs[:0], out, lambda: lit(0.0, DType.F32)),
        inputs=tuple(inputs),
        dims=tuple(DimBinding(s, inputs[v], axis, *rest) for s, v, axis, *rest in dims),
        checks=tuple(DimCheck(inputs[v], axis, e) for v, axis, e in checks),
        maybe=tuple(maybe),
    )
    build = Builder(native(), "k")
    faults = emit_dims(build, kernel)
    code = load_object(compile_module(str(build.module), native()).data, native())
    fn = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 3)(code.address("k.dims"))

    def call(*given: int) -> tuple[int, list[int], str]:  # no binding here reads data
        source = np.array(given, np.int64)
        env = np.zeros(env_words(kernel), np.int64)
        result = fn(source.ctypes.data, env.ctypes.data, None)
        text = faults[-1 - result].message(int(env[0]), int(env[1])) if result < 0 else ""
        return result, env.tolist(), text

    call.keep = code  # type: ignore[attr-defined]
    return call


def test_dims_fills_env_in_order():
    call = dims_of([(N, M * 2 + 1)], [N * M, 3], [(N, 0, 0), (M, 0, 1, 2, 1)])
    assert call(5, 9) == (0, [5, 4, 5, 9, 20, 3], "")


def test_dims_refuses_inexact_and_too_small_bindings():
    call = dims_of([(N, M * 2 + 1)], [N, M], [(N, 0, 0), (M, 0, 1, 2, 1)])
    assert call(5, 8)[2].endswith("input 0 (v0) axis 1: expected a multiple of 2 plus 1, got 8")
    assert call(5, -3)[2].endswith("axis 1: expected at least 1, got -3")


def test_dims_evaluates_floor_division_and_checks():
    call = dims_of([(N,), (M,)], [(N - 3) // 2 + 1], [(N, 0, 0), (M, 1, 0)], checks=[(1, 0, N // 2)])
    assert call(9, 4)[:2] == (0, [9, 4, 9, 4, 4])
    assert call(9, 5)[2].endswith(f"input 1 (v1) axis 0: expected {N // 2} = 4, got 5")
    assert "output 0 (out) axis 0: expected at least 0, got -1" in call(0, 0)[2]


@pytest.mark.parametrize("dtype", [DType.I64, DType.I32], ids=str)
def test_dimension_from_an_element_of_a_shape_tensor(dtype):
    x, shape, z = value("x", DType.F32), value("shape", dtype, 2), value("z", DType.F32, M, N)
    at = (var(Axis("i0", M)), var(Axis("i1", N)))
    dims = (DimBinding(M, shape, 0, part=given.Part.WHOLE), DimBinding(N, shape, 1, part=given.Part.WHOLE))
    stage = Stage((), (Store(z, at, load(x, (), DType.F32)),))
    kernel = Kernel("fill", (x, shape), (z,), tuple(v.axis for v in at), (stage,), dims=dims)
    run = jit(plan_of(kernel), native())
    for m, n in ((2, 3), (0, 5), (7, 1)):
        (out,) = run([np.array(4.5, np.float32), np.array([m, n], dtype.numpy)])
        np.testing.assert_array_equal(out, np.full((m, n), 4.5, np.float32))
    with pytest.raises(UsageError, match=r"input 1 \(shape\) element 1: expected at least 0, got -3"):
        run([np.array(0, np.float32), np.array([1, -3], dtype.numpy)])


def test_dims_refuses_outputs_beyond_memory():
    call = dims_of([(N,)], [N, N, N], [(N, 0, 0)])
    assert call(1 << 10)[0] == 0
    assert "output 0 (out) is too large" in call(1 << 30)[2]
    assert "output 0 (out) is too large" in call(1 << 62)[2]


def test_dimension_no_input_binds_is_a_compile_error():
    x, z = value("x", DType.F32, 4), value("z", DType.F32, N)
    kernel = replace(pointwise("k", [x], z, lambda a: a), dims=())
    with pytest.raises(CompileError, match="no input binds dimension N"):
        emit_dims(Builder(native(), "k"), kernel)


# ---- registration ----


def library_needing(features, folder: Path, name: str = "need") -> Path:
    module = emit_module(plan_of(add_relu()), native())
    text = glue_module([module.part], native(), "0" * 64, required=features)
    objects = [compile_module(text, native(), exports=EXPORTS).data, compile_module(module.text, native()).data]
    path = folder / f"{name}.so"
    path.write_bytes(link(objects, native(), EXPORTS))
    return path


@pytest.mark.skipif(not native().triple.startswith("x86_64"), reason="cpuid")
def test_missing_cpu_feature_is_a_status_that_names_it(tmp_path):
    lacking = next(f for f in CPU_FEATURES if f not in host_features())
    path = library_needing(("sse2", lacking), tmp_path)
    with pytest.raises(Exception, match=f"needs the CPU feature {lacking}"):
        options(path)


@pytest.mark.skipif(not native().triple.startswith("x86_64"), reason="cpuid")
def test_cpu_test_agrees_with_llvm_on_every_feature(tmp_path):
    present = [f for f in CPU_FEATURES if f in host_features()]
    options(library_needing(present, tmp_path))
    code = load_object(compile_module(glue_module([], native(), "", required=present), native()).data, native())
    cpuid = ctypes.CFUNCTYPE(ctypes.c_uint32, *[ctypes.c_uint32] * 3)(code.address("onnxfuse.cpuid"))
    enabled = ctypes.CFUNCTYPE(ctypes.c_uint32)(code.address("onnxfuse.enabled_state"))()
    for feature, (leaf, sub, register, bit, state) in CPU_FEATURES.items():
        has = bool(cpuid(leaf, sub, register) >> bit & 1) and enabled & state == state
        assert has == (feature in host_features()), feature


def test_every_target_has_cpu_tests_for_its_features():
    for target in TARGETS:
        if target.triple.startswith("x86_64"):
            assert set(target.features) <= set(CPU_FEATURES), target.name


def test_feature_without_cpu_test_is_a_compile_error():
    with pytest.raises(CompileError, match="no CPU test is known for telepathy"):
        glue_module([], native(), "", required=("telepathy",))


class FakeBase(ctypes.Structure):
    _fields_ = [("get_api", ctypes.c_void_p), ("get_version", ctypes.c_void_p)]


CREATE_STATUS = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p)
GET_API = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
GET_VERSION = ctypes.CFUNCTYPE(ctypes.c_void_p)


def test_too_old_onnxruntime_gets_a_status_with_both_versions(simple):
    seen: list[tuple[int, str]] = []

    @CREATE_STATUS
    def create_status(code, text):
        seen.append((code, text.decode()))
        return 4096

    table = (ctypes.c_void_p * 300)()
    table[0] = ctypes.cast(create_status, ctypes.c_void_p)
    text = ctypes.create_string_buffer(b"1.11.0")
    get_api = GET_API(lambda version: ctypes.addressof(table) if version <= 11 else None)
    get_version = GET_VERSION(lambda: ctypes.addressof(text))
    base = FakeBase(*(ctypes.cast(f, ctypes.c_void_p) for f in (get_api, get_version)))
    register = ctypes.CDLL(str(simple.with_suffix(".so"))).RegisterCustomOps
    register.restype, register.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]
    assert register(None, ctypes.addressof(base)) == 4096
    assert seen == [(9, "onnxfuse: this library needs onnxruntime 1.17 or newer (API 17); this is 1.11.0")]


def test_runtime_without_any_api_stops_instead_of_going_on(simple):
    script = (
        "import ctypes\n"
        "get = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(lambda v: None)\n"
        "base = (ctypes.c_void_p * 2)(ctypes.cast(get, ctypes.c_void_p).value, None)\n"
        f"lib = ctypes.CDLL({str(simple.with_suffix('.so'))!r})\n"
        "lib.RegisterCustomOps.argtypes = [ctypes.c_void_p, ctypes.c_void_p]\n"
        "lib.RegisterCustomOps(None, ctypes.addressof(base))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=60)
    assert done.returncode in (-signal.SIGILL, -signal.SIGTRAP)


def test_library_is_self_contained(simple):
    defined, undefined = dynamic_symbols(simple.with_suffix(".so").read_bytes())
    assert set(defined) == set(EXPORTS)
    assert undefined == ()


def test_memory_functions_copy_right():
    """memcpy, memmove and memset of the library, for all small sizes and overlaps."""
    text = glue_module([], native(), "", required=())
    code = load_object(compile_module(text, native()).data, native())
    void, size = ctypes.c_void_p, ctypes.c_int64
    copy, move = (ctypes.CFUNCTYPE(void, void, void, size)(code.address(n)) for n in ("memcpy", "memmove"))
    fill = ctypes.CFUNCTYPE(void, void, ctypes.c_int, size)(code.address("memset"))
    for n in (*range(35), 64, 100):
        source = np.arange(200, dtype=np.uint8)
        target = np.zeros(200, np.uint8)
        assert copy(target.ctypes.data + 3, source.ctypes.data + 5, n) == target.ctypes.data + 3
        assert np.array_equal(target[3 : 3 + n], source[5 : 5 + n])
        assert not target[3 + n :].any()
        for to, start in ((40, 43), (43, 40), (40, 60), (60, 40), (50, 50)):
            both = np.arange(200, dtype=np.uint8)
            wanted = both.copy()
            wanted[to : to + n] = both[start : start + n].copy()
            move(both.ctypes.data + to, both.ctypes.data + start, n)
            assert np.array_equal(both, wanted)
        fill(target.ctypes.data + 1, 0x1C3, n)
        assert (target[1 : 1 + n] == 0xC3).all()
        assert target[0] == 0


# ---- element types, several outputs, many inputs ----


@pytest.mark.parametrize("dtype", [d for d in DType if d.computable and d is not DType.BF16], ids=str)
def test_every_element_type_passes_through(dtype, tmp_path):
    x, z, w = value("x", dtype, N), value("z", dtype, N), value("w", DType.BOOL, N)
    kernel = pointwise("copy", [x], [z, w], lambda a: (a, apply("eq", a, lit(0, dtype))))
    body = [NODE("Identity", ["x"], ["z"]), NODE("Equal", ["x", "x"], ["w"])]
    path = save(tmp_path, model_of(kernel, body), generate(plans_of(plan_of(kernel)), native()))
    data = (np.arange(7) % 2).astype(dtype.numpy)
    got = session(path).run(None, {"x": data})
    np.testing.assert_array_equal(got[0], data)
    np.testing.assert_array_equal(got[1], data == 0)


def test_sixteen_inputs_and_rank_zero(tmp_path):
    inputs = [value(f"x{k}", DType.F32) for k in range(16)]
    kernel = pointwise("sum", inputs, value("z", DType.F32), lambda *a: sum(a[1:], a[0]))
    body = [NODE("Sum", [v.name for v in inputs], ["z"])]
    path = save(tmp_path, model_of(kernel, body), generate(plans_of(plan_of(kernel)), native()))
    feeds = {v.name: np.array(k, np.float32) for k, v in enumerate(inputs)}
    assert session(path).run(None, feeds)[0] == 120


# ---- memory ----


LEAK_SCRIPT = """
import ctypes, gc, sys
import numpy as np, onnxruntime as ort

path, runs, sessions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"

class Info(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in FIELDS.split()]

libc = ctypes.CDLL("libc.so.6")
libc.mallinfo2.restype = Info

def used():
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd

def session():
    so = ort.SessionOptions()
    so.log_severity_level = 4
    so.intra_op_num_threads = 2
    so.register_custom_ops_library(path[:-5] + ".so")
    return ort.InferenceSession(path, so, providers=["CPUExecutionProvider"])

x = np.ones((32, 4), np.float32)
s = session()

def packed():
    s.run(None, {"x": x})

def overridden():
    s.run(None, {"x": x, "y": x[0]})

def refused():
    try:
        s.run(None, {"x": x, "y": np.ones(1, np.float32)})
    except Exception as e:
        assert "expected 4, got 1" in str(e), e
    else:
        raise SystemExit("not refused")

# A leak grows in every round; what allocators keep for later does not. onnxruntime itself keeps kilobytes of every run
# that fails and frees them a few hundred runs later, also with operators of its own: so look at the least in use.
def least(work, count):
    gc.collect()
    low = None
    for _ in range(count):
        work()
        now = used()
        low = now if low is None else min(low, now)
    return low

for work, count in ((packed, runs), (overridden, runs), (refused, 2 * runs), (session, sessions)):
    least(work, count // 4)
    floors = [least(work, count // 4) for _ in range(4)]
    print(work.__name__, min(b - a for a, b in zip(floors, floors[1:])) / (count // 4))
"""


def leaks(path: Path, runs: int, sessions: int, python: str = sys.executable) -> dict[str, float]:
    """Bytes lost per run of each kind, and per session."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("needs mallinfo2 (glibc 2.33)")
    command = [python, "-c", LEAK_SCRIPT, str(path), str(runs), str(sessions)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    return dict(zip(words[::2], map(float, words[1::2]), strict=True))


# A run: less than the smallest block malloc gives. A session: less than the State and packed buffer of one kernel, and
# more than onnxruntime itself can lose over a few sessions (its own tables grow; up to 32 bytes seen).
LOST_PER_RUN, LOST_PER_SESSION = 8.0, 100.0


def test_nothing_is_leaked_quickly(tmp_path):
    lost = leaks(packed_model(tmp_path, overridable=True), 2000, 80)
    assert lost.pop("session") < LOST_PER_SESSION
    assert max(lost.values()) < LOST_PER_RUN, lost


@pytest.mark.slow
def test_nothing_is_leaked_over_many_runs(tmp_path):
    lost = leaks(packed_model(tmp_path, overridable=True), 10_000, 200)
    assert lost.pop("session") < LOST_PER_SESSION
    assert max(lost.values()) < LOST_PER_RUN, lost


# ---- the oldest supported onnxruntime ----

OLD_SCRIPT = """
import sys
import numpy as np, onnxruntime as ort
path = sys.argv[1]
so = ort.SessionOptions()
so.log_severity_level = 4
so.register_custom_ops_library(path[:-5] + ".so")
s = ort.InferenceSession(path, so, providers=["CPUExecutionProvider"])
x = np.linspace(-3, 3, 20, dtype=np.float32).reshape(5, 4)
y = np.array([1, 2, -3, 4], np.float32)
assert np.array_equal(s.run(None, {"x": x, "y": y})[0], np.maximum(x + y, 0))
assert np.array_equal(s.run(None, {"x": x})[0], np.maximum(x + (np.arange(4, dtype=np.float32) - 1.5), 0))
try:
    s.run(None, {"x": x, "y": y[:1]})
except Exception as e:
    assert "expected 4, got 1" in str(e), e
else:
    raise SystemExit("not refused")
print(ort.__version__)
"""


@pytest.mark.skipif(not OLD_PYTHON, reason="set ONNXFUSE_OLD_ORT_PYTHON to a Python that has onnxruntime 1.17")
def test_oldest_onnxruntime(tmp_path):
    path = packed_model(tmp_path, overridable=True)
    done = subprocess.run([OLD_PYTHON, "-c", OLD_SCRIPT, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lost = leaks(path, 2000, 80, OLD_PYTHON)
    lost.pop("refused")  # 1.17 itself never frees the status of a custom op that fails
    assert lost.pop("session") < LOST_PER_SESSION
    assert max(lost.values()) < LOST_PER_RUN, lost


def test_part_is_what_the_glue_reads():
    module = emit_module(plan_of(add_relu()), native())
    assert isinstance(module.part, Part)
    assert module.part.faults[0].text.split(": ")[1].startswith("input 0 (x) axis 1")
