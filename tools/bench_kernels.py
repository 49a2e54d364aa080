"""Micro-benchmark: one kernel per template against onnxruntime's own operator, one thread, interleaved.

    python tools/bench_kernels.py [--only REGEX] [--rounds N] [--rows] [--target-cpu NAME]

`--rows` measures what moves memory instead (pointwise functions, softmax, norms, reductions, transpositions ...),
each also against a copy of as many bytes in the same memory (copy = share of its bandwidth).

Prints the median time of each and the ratio onnxruntime / ours (above 1: ours is faster). The operator runs alone in a
session with all optimisations, so a convolution pays its layout reorders; the rows therefore also show the node alone,
from the profiler: its fastest run beside our fastest run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "templates"))
from contractions import conv, matmul, pool, random

from onnxfuse.codegen.object import compile_module, host_features, load_object
from onnxfuse.config import FusionConfig, PrepareConfig
from onnxfuse.errors import Refusal
from onnxfuse.frontend.atomize import atomize
from onnxfuse.frontend.lower import lower
from onnxfuse.frontend.prepare import prepare
from onnxfuse.frontend.read import read
from onnxfuse.fuse import fuse
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.plan import Plan, Template
from onnxfuse.runtime.jit import Call, jit
from onnxfuse.schedule.kernelize import kernelize
from onnxfuse.schedule.layout import layout
from onnxfuse.schedule.plan import plan
from onnxfuse.target import Target, by_name
from onnxfuse.templates.gemm import GEMM
from onnxfuse.templates.window import WINDOW
from onnxfuse.verify.evaluate import evaluate

NODE_RUNS = 20  # runs of a profiled session
HUGE = 1 << 21  # bytes of a huge page
SKEW = 5 * 4096 + 640  # bytes: no two arrays begin at the same place of a page


@dataclass(frozen=True)
class Row:
    """One comparison."""

    name: str
    template: Template
    kernel: Kernel
    op: str
    attrs: dict[str, object]
    flops: float


def conv_row(
    c: int, size: int, f: int, k: int, s: int = 1, p: int | None = None, groups: int = 1, tpl: Template = GEMM
) -> Row:
    pad = k // 2 if p is None else p
    kernel = conv(1, c, [size] * 2, f, [k] * 2, strides=[s] * 2, pads=[(pad, pad)] * 2, groups=groups)
    out = (size + 2 * pad - k) // s + 1
    attrs: dict[str, object] = {"strides": [s, s], "pads": [pad] * 4, "group": groups}
    flops = 2.0 * out * out * f * (c // groups) * k * k
    kind = "dw" if groups == c else "conv"
    return Row(f"{kind} {size}x{size} {c}->{f} {k}x{k}/{s}", tpl, kernel, "Conv", attrs, flops)


def pool_row(c: int, size: int, k: int, s: int, pad: int) -> Row:
    kernel = pool(1, c, [size] * 2, [k] * 2, strides=[s] * 2, pads=[(pad, pad)] * 2)
    out = (size + 2 * pad - k) // s + 1
    attrs: dict[str, object] = {"kernel_shape": [k, k], "strides": [s, s], "pads": [pad] * 4}
    return Row(f"maxpool {size}x{size} {c} {k}x{k}/{s}", WINDOW, kernel, "MaxPool", attrs, 1.0 * out * out * c * k * k)


def matmul_row(m: int, n: int, k: int, batch: Sequence[int] = (), const: str = "B", tb: bool = False) -> Row:
    kernel = matmul(list(batch), m, n, k, const=const, tb=tb)
    total = 2.0 * m * n * k * int(np.prod(batch or [1]))
    op = "FusedMatMul" if tb else "MatMul"
    name = f"matmul {list(batch)} {m}x{n}x{k}{' const' if const else ''}{' B^T' if tb else ''}"
    return Row(name, GEMM, kernel, op, {"transB": 1} if tb else {}, total)


def rows() -> list[Row]:
    out = [
        matmul_row(1024, 1024, 1024),
        matmul_row(1024, 1024, 1024, const=""),
        matmul_row(128, 768, 768),
        matmul_row(128, 3072, 768),
        matmul_row(128, 768, 3072),
        matmul_row(64, 64, 64),
        matmul_row(1, 768, 768),
        matmul_row(1, 3072, 768, const=""),
        matmul_row(4, 768, 768),
        matmul_row(128, 64, 128, (12,), const=""),
        matmul_row(128, 128, 64, (12,), const="", tb=True),
        matmul_row(1, 128, 64, (12,), const="", tb=True),
        conv_row(3, 224, 64, 7, 2, 3),
        conv_row(64, 56, 64, 3),
        conv_row(128, 28, 128, 3),
        conv_row(256, 14, 256, 3),
        conv_row(512, 7, 512, 3),
        conv_row(128, 56, 128, 3, 2),
        conv_row(64, 56, 64, 1),
        conv_row(64, 56, 256, 1),
        conv_row(256, 56, 64, 1),
        conv_row(512, 28, 128, 1),
        conv_row(256, 14, 1024, 1),
        conv_row(1024, 14, 256, 1),
        conv_row(512, 7, 2048, 1),
        conv_row(256, 56, 512, 1, 2, 0),
        conv_row(32, 112, 64, 3, groups=2),
        conv_row(24, 56, 144, 1),
        conv_row(16, 20, 16, 3),
    ]
    for c, size, s in ((32, 112, 1), (96, 112, 2), (144, 56, 1), (144, 56, 2), (384, 14, 1), (960, 7, 1)):
        out.append(conv_row(c, size, c, 3, s, groups=c, tpl=WINDOW))
    out.append(conv_row(240, 14, 240, 5, groups=240, tpl=WINDOW))
    out.append(pool_row(64, 112, 3, 2, 1))
    return out


@dataclass(frozen=True)
class Memory:
    """An operator (or a few that make one kernel) that is bound by memory."""

    name: str
    text: str  # nodes in the textual format of ONNX: from x (and constants) to y
    shape: tuple[int, ...]
    extra: tuple[tuple[str, tuple[int, ...]], ...] = ()  # further inputs


GELU = "d = Constant<value = float {1.4142135}>() q = Div(x, d) e = Erf(q) o = Constant<value = float {1.0}>() "
GELU += "s = Add(e, o) m = Mul(x, s) h = Constant<value = float {0.5}>() y = Mul(m, h)"
SLICE = "l = Constant<value_ints = [3]>() h = Constant<value_ints = [1500]>() "
SLICE += "a = Constant<value_ints = [2]>() y = Slice(x, l, h, a)"
NORM = "y = LayerNormalization<axis = -1>(x, scale, bias)"
AFFINE = (("scale", (768,)), ("bias", (768,)))
FIRST = "u = ReduceMean<axes = [1]>(x) d = Sub(x, u) q = Mul(d, d) v = ReduceMean<axes = [1]>(q) "
FIRST += "e = Constant<value = float {0.00001}>() w = Add(v, e) r = Sqrt(w) y = Div(d, r)"


def memory_rows() -> list[Memory]:
    wide, square = (256, 4096), (1024, 1024)  # 4 MiB: neither in L1 nor in L2
    unary = ("Relu", "Tanh", "Sigmoid", "Exp", "Log", "Erf", "HardSwish", "Elu", "Softplus", "Sin", "Sqrt", "Abs")
    out = [Memory(f"{op} 4 MiB", f"y = {op}(x)", wide) for op in unary]
    out += [
        Memory("Add 4 MiB", "y = Add(x, b)", wide, (("b", wide),)),
        Memory("Add row 4 MiB", "y = Add(x, b)", wide, (("b", wide[1:]),)),
        Memory("Add column 4 MiB", "y = Add(x, b)", wide, (("b", (256, 1)),)),
        Memory("Gelu 4 MiB", GELU, wide),
        Memory("Softmax 4096", "y = Softmax<axis = -1>(x)", wide),
        Memory("Softmax 1000", "y = Softmax<axis = -1>(x)", (64, 1000)),
        Memory("Softmax 197", "y = Softmax<axis = -1>(x)", (6, 197, 197)),
        Memory("Softmax axis 1", "y = Softmax<axis = 1>(x)", (1, 64, 16384)),
        Memory("LogSoftmax 4096", "y = LogSoftmax<axis = -1>(x)", wide),
        Memory("LogSoftmax 1000", "y = LogSoftmax<axis = -1>(x)", (64, 1000)),
        Memory("LayerNorm 768", NORM, (1365, 768), AFFINE),
        Memory("LayerNorm 768 x 64", NORM, (64, 768), AFFINE),
        Memory("channels-first norm", FIRST, (1, 96, 3136)),
        Memory("ReduceMean last", "y = ReduceMean<axes = [1]>(x)", square),
        Memory("ReduceMean first", "y = ReduceMean<axes = [0]>(x)", square),
        Memory("ReduceSum middle", "a = Constant<value_ints = [1]>() y = ReduceSum(x, a)", (16, 256, 256)),
        Memory("ReduceMax last", "y = ReduceMax<axes = [1]>(x)", square),
        Memory("GlobalAveragePool", "y = GlobalAveragePool(x)", (1, 1280, 7, 7)),
        Memory("ArgMax last", "y = ArgMax<axis = 1>(x)", square),
        Memory("Transpose 2d", "y = Transpose<perm = [1, 0]>(x)", square),
        Memory("Transpose heads", "y = Transpose<perm = [0, 2, 1, 3]>(x)", (1, 197, 12, 64)),
        Memory("Transpose NCHW-NHWC", "y = Transpose<perm = [0, 2, 3, 1]>(x)", (1, 96, 56, 56)),
        Memory("Transpose NHWC-NCHW", "y = Transpose<perm = [0, 3, 1, 2]>(x)", (1, 56, 56, 96)),
        Memory("Transpose 3 channels", "y = Transpose<perm = [0, 3, 1, 2]>(x)", (1, 512, 512, 3)),
        Memory(
            "Resize nearest 2x",
            'r = Constant<value = float[4] {1, 1, 2, 2}>() y = Resize<mode = "nearest", '
            'coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">(x, , r)',
            (1, 64, 64, 64),
        ),
        Memory(
            "Resize linear 2x",
            'r = Constant<value = float[4] {1, 1, 2, 2}>() y = Resize<mode = "linear">(x, , r)',
            (1, 64, 64, 64),
        ),
        Memory("Concat", "y = Concat<axis = 1>(x, b)", (8, 64, 1024), (("b", (8, 64, 1024)),)),
        Memory("Slice", SLICE, (8, 64, 2048)),
        Memory("Clip", "l = Constant<value = float {0.0}>() y = Clip(x, l)", wide),
        Memory("Where", "z = Constant<value = float {0.0}>() c = Less(x, z) y = Where(c, x, b)", wide, (("b", wide),)),
    ]
    return out


def model_of(row: Memory) -> onnx.ModelProto:
    args = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in (("x", row.shape), *row.extra))
    kind = "int64" if "ArgMax" in row.text else "float"
    graph = f"g ({args}) => ({kind}[{','.join('abcd'[: len(row.shape)])}] y) {{ {row.text} }}"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 17]> {graph}')
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


def plan_of(model: onnx.ModelProto, target: Target) -> Plan | None:
    """The plan of the one kernel a model becomes; None if it becomes several."""
    source = read(model)
    evaluator = lambda node, arrays: evaluate(node, arrays, source.graph.opset, source.graph.imports)  # noqa: E731
    prepared = prepare(source.graph, PrepareConfig(), evaluator, source.hints)
    partition = layout(fuse(lower(atomize(prepared.typed)), FusionConfig()), target)
    plans = plan(kernelize(partition), target).plans
    whole = len(plans) == 1 and len(plans[0].kernel.inputs) == len(model.graph.input)
    return plans[0] if whole else None


TASKS = """
define void @run_tasks(ptr %run, ptr %env, ptr %bufs, ptr %packed, ptr %scratch, i64 %count) {
entry:
  br label %task
task:
  %k = phi i64 [ 0, %entry ], [ %next, %task ]
  call void %run(ptr %env, ptr %bufs, ptr %packed, ptr %scratch, i64 %k)
  %next = add i64 %k, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %task, label %done
done:
  ret void
}
"""


def without_python(call: Call, target: Target) -> Callable[[], object]:
    """The tasks of a call, one after another, from machine code: a call from Python takes microseconds for each."""
    code = load_object(compile_module(TASKS, target, exports=("run_tasks",)).data, target)
    loop = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5, ctypes.c_int64)(code.address("run_tasks"))
    env, bufs, scratch = call.env.ctypes.data, call.bufs.ctypes.data, call.scratch.address
    packed = None if call.packed is None else call.packed.address
    phases = [
        (ctypes.cast(run, ctypes.c_void_p), tasks(env))  # type: ignore[arg-type]
        for run, tasks in zip(call.variant.run, call.variant.tasks, strict=True)
    ]

    def run(_keep: object = code) -> None:
        for address, count in phases:
            loop(address, env, bufs, packed, scratch, count)

    return run


class Places:
    """Memory that everything compared works in, the copy too: pages and caches make two arrays of one size differ.

    Inputs lie in one block, the output in another, both in huge pages (numpy asks for them).
    """

    def __init__(self, inputs: Sequence[np.ndarray], output: np.ndarray) -> None:
        sizes = [-(-a.nbytes // HUGE) * HUGE for a in inputs]
        half = (sum(a.nbytes for a in inputs) + output.nbytes) // 2
        read = self._block(max(sum(sizes) + SKEW * len(sizes), half))
        written = self._block(max(output.nbytes, half) + 2 * SKEW)[2 * SKEW :]  # not at the input's place of a page
        self.inputs, at = [], 0
        for a, size in zip(inputs, sizes, strict=True):
            self.inputs.append(read[at : at + a.nbytes].view(a.dtype).reshape(a.shape))
            self.inputs[-1][...] = a
            at += size + SKEW
        self.output = written[: output.nbytes].view(output.dtype).reshape(output.shape)
        self.source, self.sink = read[:half], written[:half]

    def _block(self, nbytes: int) -> np.ndarray:
        whole = np.ones(nbytes + 2 * HUGE, np.uint8)
        start = -whole.ctypes.data % HUGE
        return whole[start : start + nbytes]


def bench_memory(row: Memory, rounds: int, target: Target) -> None:
    model = model_of(row)
    made = plan_of(model, target)
    if made is None:
        print(f"{row.name:24} is not one kernel")
        return
    rng = np.random.default_rng(0)
    names = [v.name for v in model.graph.input]
    shapes = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input]
    given = [rng.random(shape, np.float32) + 0.1 for shape in shapes]
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    s = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    want = s.run(None, dict(zip(names, given, strict=True)))[0]
    places = Places(given, want)
    binding = s.io_binding()
    for name, a in zip(names, places.inputs, strict=True):
        binding.bind_input(name, "cpu", 0, a.dtype, a.shape, a.ctypes.data)
    binding.bind_output("y", "cpu", 0, want.dtype, want.shape, places.output.ctypes.data)
    code = jit(made, target)  # owns the machine code: must outlive the call
    call = code.prepare(places.inputs)
    call.run()
    error = float(np.abs(call.finish()[0].reshape(want.shape) - want).max() / (np.abs(want).max() + 1e-30))
    call.bufs[:] = [a.ctypes.data for a in (*places.inputs, places.output)]
    runs: list[Callable[[], object]] = [
        without_python(call, target),
        lambda: s.run_with_iobinding(binding),
        lambda: np.copyto(places.sink, places.source),
    ]
    repeat = [max(1, int(1e-3 / max(once(fn, 3), 1e-7))) for fn in runs]
    times: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        for k, fn in enumerate(runs):
            times[k].append(once(fn, repeat[k]))
    ours, other, copy = (min(t) for t in times)
    print(
        f"{row.name:24} ours {ours * 1e6:9.1f} us  ort {other * 1e6:9.1f} us  ratio {other / ours:5.2f}"
        f"  copy {100 * copy / ours:4.0f} %  error {error:.1e}  {made.schedule.vector}",
        flush=True,
    )


def session(row: Row, arrays: list[np.ndarray], profile: str = "") -> ort.InferenceSession:
    names = [v.name for v in row.kernel.inputs]
    domain = "com.microsoft" if row.op == "FusedMatMul" else ""
    attrs: dict[str, Any] = dict(row.attrs)
    node = helper.make_node(row.op, names, ["out"], domain=domain, **attrs)
    consts = {v.name for v in row.kernel.consts}
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape)
            for n, a in zip(names, arrays, strict=True)
            if n not in consts
        ],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a, n) for n, a in zip(names, arrays, strict=True) if n in consts],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def node_time(row: Row, arrays: list[np.ndarray]) -> float:
    """Best seconds of the operator's node alone, without layout reorders."""
    with tempfile.TemporaryDirectory() as tmp:
        s = session(row, arrays, str(Path(tmp) / "p"))
        feed = feeds(row, arrays)
        for _ in range(NODE_RUNS):
            s.run(None, feed)
        events = json.loads(Path(s.end_profiling()).read_text())
    times = [e["dur"] for e in events if e.get("cat") == "Node" and row.op in e["args"].get("op_name", "")]
    return min(times[2:]) * 1e-6 if times else 0.0


def feeds(row: Row, arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
    return {v.name: a for v, a in zip(row.kernel.inputs, arrays, strict=True) if v not in row.kernel.consts}


def once(fn: Callable[[], object], repeat: int) -> float:
    """Processor time, so that other load on the machine counts less."""
    start = time.thread_time()
    for _ in range(repeat):
        fn()
    return (time.thread_time() - start) / repeat


def fastest(fn: Callable[[], object], runs: int) -> float:
    """Seconds of the fastest single run: what the profiler tells of a node is measured so."""
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        fn()
        best = min(best, time.perf_counter() - start)
    return best


def bench(row: Row, rounds: int, target: Target) -> None:
    arrays = random(row.kernel, np.random.default_rng(0))
    found = row.template.propose(row.kernel, target)
    if isinstance(found, Refusal):
        print(f"{row.name:36} refused: {found}")
        return
    code = jit(Plan(row.kernel, found[0], row.template), target)  # owns the machine code: must outlive the call
    call = code.prepare(arrays)
    s = session(row, arrays)
    binding = s.io_binding()
    for name, a in feeds(row, arrays).items():
        binding.bind_cpu_input(name, a)
    binding.bind_output("out")

    def theirs() -> None:
        s.run_with_iobinding(binding)

    ours = call.run
    ours()
    theirs()
    got, want = call.finish()[0], binding.copy_outputs_to_cpu()[0]
    error = float(np.abs(got - want).max() / (np.abs(want).max() + 1e-30))
    repeat = max(1, int(3e-3 / max(once(theirs, 3), 1e-6)))
    pairs = [(once(ours, repeat), once(theirs, repeat)) for _ in range(rounds)]
    mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    best, node = fastest(ours, 4 * NODE_RUNS), min(node_time(row, arrays) for _ in range(4))
    rate = row.flops / mine * 1e-9
    print(
        f"{row.name:36} ours {mine * 1e3:8.3f} ms {rate:6.1f} GF  ort {other * 1e3:8.3f} ms  ratio {other / mine:5.2f}"
        f"  best {best * 1e3:8.3f} ms  node {node * 1e3:8.3f} ms ratio {node / best:5.2f}  error {error:.1e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="regular expression on the name of the row")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", action="store_true", help="what is bound by memory")
    parser.add_argument("--target-cpu", default="native", help="a narrower target than this machine's")
    args = parser.parse_args()
    target = by_name(args.target_cpu, host_features())
    if args.rows:
        for memory in (m for m in memory_rows() if re.search(args.only, m.name)):
            bench_memory(memory, args.rounds, target)
        return
    for row in rows():
        if re.search(args.only, row.name):
            bench(row, args.rounds, target)


if __name__ == "__main__":
    main()
