"""Plans -> Library: one module per distinct kernel, compiled side by side, linked behind the onnxruntime glue.

A kernel that cannot be compiled is refused with the code UN_COMPILE and its groups stay with onnxruntime; under
`strict` it is an error. The library's bytes depend on the text of the modules, the target and the versions of LLVM and
of this package only: not on time, place, or the number of workers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import llvmlite
import llvmlite.binding as llvm

from onnxfuse.codegen.abi import EXPORTS, GENERAL, Part, glue_module
from onnxfuse.codegen.build import Builder
from onnxfuse.codegen.dims import emit_dims
from onnxfuse.codegen.object import (
    Compiler,
    Object,
    check_object,
    check_symbols,
    compile_module,
    default_workers,
    link,
    outcome,
)
from onnxfuse.errors import CompileError, Refusal
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.plan import Emitted, Library, Plan, Plans
from onnxfuse.target import Target

UN_COMPILE = "UN_COMPILE"
NO_DIGEST = "0" * 64  # stands for the digest while it is worked out

# Baselines the glue is compiled for: it has to run where the kernels cannot.
_BASELINE = {"x86_64": ("x86-64", ()), "aarch64": ("generic", ("neon",))}


@dataclass(frozen=True, slots=True)
class Module:
    """The text of one kernel's module and what the glue must know about it."""

    text: str
    part: Part


def generate(
    plans: Plans, target: Target, *, keep_llvm: bool = False, strict: bool = False, workers: int | None = None
) -> Library:
    """Compile and link all plans.

    keep_llvm   also return the optimised LLVM text
    strict      a kernel that does not compile raises CompileError instead of being refused
    workers     compiler processes; None chooses, 0 stays in this process
    """
    count = default_workers(len(plans.plans)) if workers is None else workers
    done: list[tuple[Module, Object]] = []
    failed: dict[Kernel, CompileError] = {}
    with Compiler(target, count, keep_ir=keep_llvm) as compiler:
        started = [(plan, _start(plan, target, compiler)) for plan in plans.plans]
        for plan, job in started:
            result = job if isinstance(job, CompileError) else _checked(outcome(job[1]))
            if isinstance(result, CompileError):
                failed[plan.kernel] = _named(result, plan)
            elif not isinstance(job, CompileError):
                done.append((job[0], result))
    if failed and strict:
        raise next(iter(failed.values()))
    modules = [m for m, _ in done]
    digest, glue = glue_object(modules, target, keep_llvm)
    image = link([glue.data, *(o.data for _, o in done)], target, EXPORTS)
    check_symbols(image, EXPORTS)
    llvm_text = "\n".join([*(o.ir for _, o in done), glue.ir]) if keep_llvm else ""
    return Library(image, target, _surviving(plans, failed), digest, llvm_text)


def emit_module(plan: Plan, target: Target) -> Module:
    """The module of one kernel: its dims function, the fast variant, and the general one if there is any."""
    kernel = plan.kernel
    build = Builder(target, kernel.name)
    faults = emit_dims(build, kernel)
    fast = plan.template.emit(build, plan.code, plan.schedule, target)
    general = None
    if plan.general is not None:
        general = _emit_general(build, plan, target)
    part = Part(kernel, fast, general, faults)
    _check_complete(build, part)
    return Module(str(build.module), part)


def _check_complete(build: Builder, part: Part) -> None:
    missing = [name for name in part.symbols() if not getattr(build.module.globals.get(name), "blocks", None)]
    if missing:
        raise CompileError("E_TEMPLATE", f"the template did not write {', '.join(missing)}")


def _emit_general(build: Builder, plan: Plan, target: Target) -> Emitted:
    assert plan.general is not None
    prefix = build.prefix
    build.prefix = f"{prefix}.{GENERAL}"
    try:
        return plan.general.template.emit(build, plan.general.code, plan.general.schedule, target)
    finally:
        build.prefix = prefix


def glue_object(modules: Sequence[Module], target: Target, keep_llvm: bool = False) -> tuple[str, Object]:
    """The digest of the library and the compiled glue, which holds it."""
    cpu, features = _BASELINE.get(target.triple.split("-", 1)[0], ("generic", ()))
    baseline = replace(target, cpu=cpu, features=features, vector_bits=128)
    text = glue_module([m.part for m in modules], baseline, NO_DIGEST, required=target.features)
    digest = library_digest([*(m.text for m in modules), text], target)
    return digest, compile_module(text.replace(NO_DIGEST, digest), baseline, exports=EXPORTS, keep_ir=keep_llvm)


def library_digest(texts: Sequence[str], target: Target) -> str:
    """Content hash of a library: everything its bytes depend on."""
    h = hashlib.sha256()
    versions = (_own_version(), llvmlite.__version__, ".".join(map(str, llvm.llvm_version_info)))
    for part in (*versions, repr(target), *texts):
        data = part.encode("utf-8")
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()


def _own_version() -> str:
    try:
        return importlib.metadata.version("onnxfuse")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a source tree that is not installed


def _checked(result: Object | CompileError) -> Object | CompileError:
    """One kernel that calls out of the library must not spoil the linking of all."""
    if isinstance(result, CompileError):
        return result
    try:
        check_object(result.data)
    except CompileError as e:
        return e
    return result


def _start(plan: Plan, target: Target, compiler: Compiler) -> tuple[Module, Future[Object]] | CompileError:
    try:
        module = emit_module(plan, target)
    except CompileError as e:
        return e
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
        # A template that trips over one kernel must not sink the model: the kernel is refused, strict shows it.
        return CompileError("E_EMIT", f"template {plan.schedule.template} failed", f"{type(e).__name__}: {e}")
    return module, compiler.submit(module.text)


def _named(error: CompileError, plan: Plan) -> CompileError:
    out = CompileError(error.code, f"kernel {plan.kernel.name}: {error.what}", error.why, error.hint)
    out.add_note(f"schedule: {plan.schedule}")
    out.add_note(f"nodes: {', '.join(plan.kernel.origin) or 'unknown'}")
    return out


def _surviving(plans: Plans, failed: dict[Kernel, CompileError]) -> Plans:
    """The plans that compiled; groups of the others are refused."""
    if not failed:
        return plans
    refused = dict(plans.refused)
    calls = {}
    for group, call in plans.calls.items():
        if call.kernel in failed:
            e = failed[call.kernel]
            refused[group] = Refusal(UN_COMPILE, f"{e.code} {e.what}" + (f": {e.why}" if e.why else ""))
        else:
            calls[group] = call
    kept = tuple(p for p in plans.plans if p.kernel not in failed)
    return replace(plans, plans=kept, calls=calls, refused=refused)


__all__ = ["UN_COMPILE", "Module", "emit_module", "generate", "glue_object", "library_digest"]
