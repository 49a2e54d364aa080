"""One kernel on numpy arrays: right results, refusals, and every kind of overrun noticed."""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llvmlite import ir

from onnxfuse.codegen.build import F32, I8, VOID, Builder
from onnxfuse.codegen.object import compile_module, load_object
from onnxfuse.errors import CompileError, IRError, UsageError
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import apply, cast, i64, sym, where
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.plan import Emitted, Schedule
from onnxfuse.runtime.jit import jit, run_kernel
from onnxfuse.target import Target
from tests.codegen.tiny import Broken, Scalar, native, plan_of, pointwise, value

N = sym("N")


def double(dtype: DType = DType.F32, consts: bool = False):
    x, y, z = value("x", dtype, N, 4), value("y", dtype, 4), value("z", dtype, N, 4)
    return pointwise("double", [x, y], z, lambda a, b: apply("add", a, b), consts=[y] if consts else ())


def feeds(n: int = 5) -> list[np.ndarray]:
    return [np.arange(n * 4, dtype=np.float32).reshape(n, 4), np.arange(4, dtype=np.float32)]


def test_results_do_not_depend_on_task_order_or_alignment():
    kernel = jit(plan_of(double(consts=True), Schedule("scalar", pack=("y",), grain=64, unroll=2)), native())
    x, y = feeds(9)
    wanted = kernel([x, y])[0]
    np.testing.assert_array_equal(wanted, x + y)
    for seed, shift in ((1, 0), (2, 4), (3, 20)):
        np.testing.assert_array_equal(kernel([x, y], seed=seed, shift=shift)[0], wanted)


def test_no_elements():
    out = run_kernel(plan_of(double()), [np.zeros((0, 4), np.float32), np.zeros(4, np.float32)], native())
    assert out[0].shape == (0, 4)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((3, 5), True), ((2**33, 2**31), False), ((2**62, 4), False), ((2**63 - 1, 1), False), ((0, 2**63 - 1), True)],
)
def test_dimensions_that_wrap_are_refused(shape: tuple[int, int], fits: bool):
    m = sym("M")
    x, z = value("x", DType.F32, N, m), value("z", DType.F32, N * m, N + 1)
    kernel = jit(plan_of(pointwise("flat", [x], z, lambda a: a)), native())
    shapes, env = np.array(shape, np.int64), np.zeros(64, np.int64)
    code = kernel.dims(shapes.ctypes.data, env.ctypes.data, env.ctypes.data)
    assert (code >= 0) is fits
    if not fits:
        assert re.search("leaves the range of a dimension|is too large", kernel.module.part.faults[-1 - code].text)


def test_a_sum_that_is_not_chosen_may_wrap():
    # The end of a Slice: counted from the back when negative, and often the largest number there is.
    end = sym("E")
    stop = where(apply("lt", end, i64(0)), end + N, apply("min", end, N))
    x, k, z = value("x", DType.F32, N), value("k", DType.F32, end), value("z", DType.F32, apply("min", stop, i64(4)))
    kernel = jit(plan_of(pointwise("cut", [x, k], z, lambda a, _: a)), native())
    shapes, env = np.array([7, 2**63 - 1], np.int64), np.zeros(64, np.int64)
    assert kernel.dims(shapes.ctypes.data, env.ctypes.data, env.ctypes.data) >= 0


def test_bfloat16_passes():
    x, z = value("x", DType.BF16, N), value("z", DType.BF16, N)
    kernel = pointwise("half", [x], z, lambda a: cast(cast(a, DType.F32) * 2.0, DType.BF16))
    data = np.array([1, -0.5, 3e38], np.float32).astype(DType.BF16.numpy)
    (out,) = run_kernel(plan_of(kernel), [data], native())
    assert out.dtype == DType.BF16.numpy
    np.testing.assert_array_equal(out.astype(np.float32)[:2], [2, -1])
    assert np.isinf(out.astype(np.float32)[2])


def test_not_contiguous_input():
    x, y = feeds(4)
    (out,) = run_kernel(plan_of(double()), [x.T.copy().T, y], native())
    np.testing.assert_array_equal(out, x + y)


def test_wrong_shape_has_the_message_of_the_library():
    with pytest.raises(UsageError, match=r"input 1 \(y\) axis 0: expected 4, got 3"):
        run_kernel(plan_of(double()), [feeds()[0], np.zeros(3, np.float32)], native())


def test_wrong_dtype_and_rank():
    x, y = feeds()
    with pytest.raises(UsageError, match="float64"):
        run_kernel(plan_of(double()), [x.astype(np.float64), y], native())
    with pytest.raises(UsageError, match="rank 1"):
        run_kernel(plan_of(double()), [x[0], y], native())


def test_template_that_fails():
    with pytest.raises(CompileError, match="never works"):
        jit(plan_of(double(), template=Broken("emit")), native())


class Overrun(Scalar):
    """Writes one byte at an offset from a buffer, or reads it."""

    def __init__(self, which: str, offset: int, read: bool = False) -> None:
        self.which, self.offset, self.read = which, offset, read

    def emit(self, build: Builder, kernel: Kernel, schedule: Schedule, target: Target) -> Emitted:
        out = super().emit(build, kernel, schedule, target)
        run = build.module.globals[f"{build.prefix}.run.0"]
        pointer = run.args[1].type
        build.prefix += ".extra"
        with build.function("run", VOID, [a.type for a in run.args]) as fn:
            pointers = {"scratch": fn.args[3], "packed": fn.args[2]}
            for k, v in enumerate((*kernel.inputs, *kernel.outputs)):
                pointers[v.name] = build.load(build.offset(fn.args[1], k, pointer), pointer)
            at = build.offset(pointers[self.which], self.offset, I8)
            byte = build.load(at, I8) if self.read else build.const(I8, 0)
            build.store(byte, pointers["z"] if self.read else at)  # a read must not be dead
        build.prefix = build.prefix.removesuffix(".extra")
        at_start = ir.IRBuilder()
        at_start.position_at_start(run.entry_basic_block)
        at_start.call(fn, list(run.args))
        return out


@pytest.mark.parametrize(
    ("which", "offset"),
    [("z", 80), ("z", 335), ("z", -1), ("x", 80), ("x", 3), ("scratch", 320), ("scratch", -7), ("packed", 16)],
)
def test_overrun_is_noticed(which, offset):
    schedule = Schedule("scalar", pack=("y",), grain=64)
    kernel = jit(plan_of(double(consts=True), schedule, template=Overrun(which, offset)), native())
    with pytest.raises(IRError, match="IR_OVERRUN"):
        kernel([np.ones((5, 4), np.float32), np.ones(4, np.float32)])


@pytest.mark.parametrize("fence", ["start", "end"])
def test_fences_do_not_disturb(fence):
    schedule = Schedule("scalar", pack=("y",), grain=64)
    for n in (0, 1, 5, 300):
        x, y = feeds(n)
        (out,) = run_kernel(plan_of(double(consts=True), schedule), [x, y], native(), fence=fence)
        np.testing.assert_array_equal(out, x + y)


@pytest.mark.parametrize(("fence", "offset"), [("end", 80), ("start", -1)])
def test_reading_past_a_fence_ends_the_process(fence, offset):
    script = (
        "import numpy as np\n"
        "from tests.runtime.test_jit import *\n"
        f"plan = plan_of(double(), template=Overrun('x', {offset}, read=True))\n"
        "arrays = [np.ones((5, 4), np.float32), np.ones(4, np.float32)]\n"
        "run_kernel(plan, arrays, native())\n"
        "print('canaries see no reads', flush=True)\n"
        f"run_kernel(plan, arrays, native(), fence={fence!r})\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout == "canaries see no reads\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


class Doubled(Scalar):
    """Doubles the number in scratch as well, written before or not."""

    def __init__(self, written: bool) -> None:
        self.written = written

    def emit(self, build: Builder, kernel: Kernel, schedule: Schedule, target: Target) -> Emitted:
        out = super().emit(build, kernel, schedule, target)
        run = build.module.globals[f"{build.prefix}.run.0"]
        build.prefix += ".extra"
        with build.function("run", VOID, [a.type for a in run.args]) as fn:
            scratch = fn.args[3]
            if self.written:
                build.store(build.const(F32, 1.0), scratch)
            number = build.load(scratch, F32)
            build.store(build.ir.fadd(number, number), scratch)
        build.prefix = build.prefix.removesuffix(".extra")
        at_start = ir.IRBuilder()
        at_start.position_at_start(run.entry_basic_block)
        at_start.call(fn, list(run.args))
        return out


@pytest.mark.skipif(not native().triple.startswith("x86_64"), reason="MXCSR")
def test_calculating_with_memory_that_nobody_wrote_is_found():
    schedule = Schedule("scalar", grain=64)
    tiny = np.full((5, 4), 1e-40, np.float32)
    run_kernel(plan_of(double(), schedule, template=Doubled(True)), [tiny, tiny[0]], native())  # inputs may be so
    with pytest.raises(IRError, match="IR_UNWRITTEN"):
        run_kernel(plan_of(double(), schedule, template=Doubled(False)), feeds(), native())


@pytest.mark.skipif(not native().triple.startswith("x86_64"), reason="MXCSR")
def test_a_kernel_that_changes_the_rounding_is_found():
    text = """
define void @round_up() {
  %m = alloca i32, align 8
  store i32 24448, ptr %m, align 8
  call void asm sideeffect "ldmxcsr ($0)", "r,~{memory}"(ptr %m)
  ret void
}
define void @round_to_nearest() {
  %m = alloca i32, align 8
  store i32 8064, ptr %m, align 8
  call void asm sideeffect "ldmxcsr ($0)", "r,~{memory}"(ptr %m)
  ret void
}
"""
    code = load_object(compile_module(text, native(), exports=("round_up", "round_to_nearest")).data, native())
    up, back = (ctypes.CFUNCTYPE(None)(code.address(n)) for n in ("round_up", "round_to_nearest"))
    one = jit(plan_of(double()), native())
    call = one.prepare(feeds())
    (run,) = call.variant.run

    def turned(*arguments):
        run(*arguments)
        up()

    call.variant = replace(call.variant, run=(turned,))
    try:
        with pytest.raises(IRError, match="changed how floating point works"):
            call.run()
    finally:
        back()
    call.variant = replace(call.variant, run=(run,))
    call.run()
