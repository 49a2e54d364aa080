"""Hand-made kernels, a plain scalar template, and models around them: what the tests of codegen and runtime run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from onnxfuse.codegen.build import F64, I8, I64, PTR, VOID, Builder
from onnxfuse.codegen.object import host_features
from onnxfuse.codegen.scalar_expr import Buffer, emit_dim, emit_store, open_kernel
from onnxfuse.errors import CompileError, Refusal
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import Expr, load, sym, var
from onnxfuse.ir.graph import Value
from onnxfuse.ir.kernel import DimBinding, DimCheck, Kernel, Stage, Store
from onnxfuse.ir.loops import Axis, LoopGraph
from onnxfuse.ir.partition import Partition
from onnxfuse.ir.plan import Call, Emitted, Library, Plan, Plans, Schedule
from onnxfuse.ir.types import Dim, TensorType, tensor
from onnxfuse.target import Target, by_name


def native() -> Target:
    return by_name("native", host_features())


class Scalar:
    """Pointwise kernels, one task per step of the first axis, one scalar store after another.

    schedule.pack    names of const inputs to copy into the packed buffer
    schedule.grain   > 1: bytes of scratch per task, written and read back
    schedule.unroll  2: a second phase, which does the second half of the tasks
    """

    name = "scalar"

    def propose(self, kernel: Kernel, target: Target) -> Sequence[Schedule] | Refusal:
        return [Schedule(self.name)]

    def emit(self, build: Builder, kernel: Kernel, schedule: Schedule, target: Target) -> Emitted:
        packed = [v for v in kernel.inputs if v.name in schedule.pack]
        with build.function("scratch", I64, [PTR]) as fn:
            tasks = self.tasks(build, kernel, fn.args[0])
            build.ret(build.mul(tasks, schedule.grain if schedule.grain > 1 else 0))
        for phase in range(schedule.unroll):
            with build.function(f"tasks.{phase}", I64, [PTR]) as fn:
                tasks = self.tasks(build, kernel, fn.args[0])
                half = build.udiv(tasks, 2)
                build.ret(tasks if schedule.unroll == 1 else half if phase == 0 else build.sub(tasks, half))
            self.run(build, kernel, schedule, phase, packed)
        if packed:
            self.pack(build, kernel, packed)
        return Emitted(schedule.unroll, bool(packed))

    def tasks(self, build: Builder, kernel: Kernel, env_ptr):
        env = open_kernel(build, kernel, env_ptr, None)
        return build.i64(emit_dim(build, env, kernel.outer[0].extent if kernel.outer else 1))

    def run(self, build: Builder, kernel: Kernel, schedule: Schedule, phase: int, packed: list[Value]) -> None:
        (stage,) = kernel.stages
        with build.function(f"run.{phase}", VOID, [PTR, PTR, PTR, PTR, I64]) as fn, ExitStack() as loops:
            env_ptr, bufs, packed_ptr, scratch, task = fn.args
            if phase == 1:
                task = build.add(task, build.udiv(self.tasks(build, kernel, env_ptr), 2))
            env = open_kernel(build, kernel, env_ptr, bufs)
            if schedule.grain > 1:
                mine = build.offset(scratch, build.mul(task, schedule.grain), I8)
                build.store(task, mine)
                task = build.load(mine, I64)
            at = 0
            for v in packed:
                old = env.buffers[v]
                env = env.at(buffers={v: Buffer(build.offset(packed_ptr, at, I8), old.dtype, old.strides)})
                at += v.tensor.size * v.tensor.dtype.bytes
            axes = {kernel.outer[0]: task} if kernel.outer else {}
            for axis in kernel.outer[1:]:
                axes[axis] = loops.enter_context(build.loop(0, emit_dim(build, env, axis.extent)))
            env = env.at(axes=axes)
            for store in stage.stores:
                emit_store(build, env, store.target, store.index, store.value)

    def pack(self, build: Builder, kernel: Kernel, packed: list[Value]) -> None:
        sizes = [v.tensor.size * v.tensor.dtype.bytes for v in packed]
        with build.function("packed_bytes", I64, []):
            build.ret(sum(sizes))
        with build.function("pack", VOID, [PTR, PTR]) as fn:
            bufs, to = fn.args
            for v, size in zip(packed, sizes, strict=True):
                source = build.load(build.offset(bufs, kernel.inputs.index(v), PTR), PTR)
                with build.loop(0, size) as k:
                    build.store(build.load(build.offset(source, k, I8), I8), build.offset(to, k, I8))
                to = build.offset(to, size, I8)


class Broken(Scalar):
    """Fails when emitting, by text that LLVM refuses, by a call of libm, or by a function that is not there."""

    name = "broken"

    def __init__(self, at: str) -> None:
        self.at = at

    def emit(self, build: Builder, kernel: Kernel, schedule: Schedule, target: Target) -> Emitted:
        if self.at == "emit":
            raise CompileError("E_TEST", "this template never works", "on purpose")
        out = super().emit(build, kernel, schedule, target)
        if self.at == "llvm":
            build.module.triple = 'x"\n garbage'
        if self.at == "libm":
            with build.function("run.9", F64, [F64]) as fn:
                build.ret(build.call("tgamma", F64, list(fn.args)))
        return Emitted(2) if self.at == "phase" else out


def value(name: str, dtype: DType, *shape: Dim) -> Value:
    return Value(name, tensor(dtype, shape))


def bindings(inputs: Sequence[Value]) -> tuple[tuple[DimBinding, ...], tuple[DimCheck, ...]]:
    """The first place of a symbol binds it, the others are checked."""
    bound: dict[Expr, DimBinding] = {}
    checks = []
    for v in inputs:
        for axis, dim in enumerate(v.tensor.shape):
            if isinstance(dim, int):
                continue
            if dim in bound or dim is not sym(str(dim)):
                checks.append(DimCheck(v, axis, dim))
            else:
                bound[dim] = DimBinding(dim, v, axis)
    return tuple(bound.values()), tuple(checks)


def pointwise(
    name: str,
    inputs: Sequence[Value],
    out: Value | Sequence[Value],
    body: Callable[..., Expr | tuple[Expr, ...]],
    consts: Sequence[Value] = (),
    **more: object,
) -> Kernel:
    """out[i...] = body(inputs at i...); a shorter input is aligned at the last axes."""
    outs = (out,) if isinstance(out, Value) else tuple(out)
    axes = tuple(Axis(f"i{k}", d) for k, d in enumerate(outs[0].tensor.shape))
    index = tuple(var(a) for a in axes)
    reads = [load(v, index[len(index) - v.tensor.rank :], v.tensor.dtype) for v in inputs]
    results = body(*reads)
    results = (results,) if isinstance(results, Expr) else results
    stores = tuple(Store(o, index, r) for o, r in zip(outs, results, strict=True))
    dims, checks = bindings(inputs)
    fields = {"dims": dims, "checks": checks, "origin": (f"{name}_node",), **more}
    return Kernel(name, tuple(inputs), outs, axes, (Stage((), stores),), consts=frozenset(consts), **fields)


def plans_of(*plans: Plan) -> Plans:
    loops = LoopGraph("tiny", (), (), ())
    partition = Partition(loops, (), (), ())
    calls = {i: Call(p.kernel, p.kernel.inputs, p.kernel.outputs, f"node{i}") for i, p in enumerate(plans)}
    return Plans(partition, plans, calls)


def plan_of(kernel: Kernel, schedule: Schedule | None = None, general: Schedule | None = None, template=None) -> Plan:
    template = template or Scalar()
    other = None if general is None else Plan(kernel, general, template)
    return Plan(kernel, schedule or Schedule("scalar"), template, other)


# ---- models ----


def shape_of(t: TensorType) -> list[int | str]:
    return [d if isinstance(d, int) else str(d) for d in t.shape]


def model_of(
    kernel: Kernel,
    body: Sequence[onnx.NodeProto],
    initializers: Sequence[onnx.TensorProto] = (),
    overridable: bool = False,
    digest: str = "",
    opset: int = 17,
) -> onnx.ModelProto:
    """A model with one custom node that carries `body` as its FunctionProto."""
    fixed = {t.name for t in initializers}
    ins = [v for v in kernel.inputs if overridable or v.name not in fixed]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node(
                kernel.name, [v.name for v in kernel.inputs], [v.name for v in kernel.outputs], domain="onnxfuse"
            )
        ],
        "tiny",
        [info(v.name, v.tensor.dtype.onnx, shape_of(v.tensor)) for v in ins],
        [info(v.name, v.tensor.dtype.onnx, shape_of(v.tensor)) for v in kernel.outputs],
        list(initializers),
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("onnxfuse", 1)]
    names_in, names_out = [v.name for v in kernel.inputs], [v.name for v in kernel.outputs]
    function = helper.make_function("onnxfuse", kernel.name, names_in, names_out, list(body), imports[:1])
    model = helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=8)
    if digest:
        helper.set_model_props(model, {"onnxfuse.library_digest": digest})
    return model


def save(folder: Path, model: onnx.ModelProto, library: Library | None, name: str = "m") -> Path:
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    if library is not None:
        path.with_suffix(".so").write_bytes(library.image)
    return path


__all__ = ["Broken", "Scalar", "TensorProto", "bindings", "model_of", "native", "plan_of", "plans_of", "pointwise"]
