"""Plans -> Library: one module per distinct kernel, compiled side by side, linked behind the onnxruntime glue.

A kernel that cannot be compiled is refused with the code UN_COMPILE and its groups stay with onnxruntime; under
`strict` it is an error. The library's bytes depend on the text of the modules, the target and the versions of LLVM and
of this package only: not on time, place, the number of workers, or what the cache knew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any

from onnxfuse.codegen.build import Builder
from onnxfuse.codegen.cache import Cache, Entry, hash_of, key_of, versions
from onnxfuse.codegen.dims import Fault, emit_dims
from onnxfuse.codegen.glue.layout import EXPORTS, GENERAL
from onnxfuse.codegen.glue.module import glue_module
from onnxfuse.codegen.glue.tables import Part
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
from onnxfuse.errors import SLIPS, CompileError, Refusal
from onnxfuse.ir.kernel import Kernel
from onnxfuse.ir.plan import Emitted, Library, Plan, Plans
from onnxfuse.ir.text import show
from onnxfuse.target import Target

UN_COMPILE = "UN_COMPILE"
NO_DIGEST = "0" * 64  # stands for the digest while it is worked out

# Baselines the glue is compiled for: it has to run where the kernels cannot.
_BASELINE = {"x86_64": ("x86-64", ()), "aarch64": ("generic", ("neon",))}


@dataclass(frozen=True, slots=True)
class Module:
    """What the linker and the glue must know about one compiled kernel; `digest`: of its module's text."""

    part: Part
    digest: str
    text: str = ""  # empty when the object came from the cache


@dataclass(frozen=True, slots=True)
class _Job:
    """A kernel on its way: compiling (`object` is a Future), done, or failed."""

    plan: Plan
    key: str  # "" = not to be cached
    module: Module | None
    object: Future[Object] | Object | CompileError
    cached: bool = False

    def result(self) -> Object | CompileError:
        return _checked(outcome(self.object)) if isinstance(self.object, Future) else self.object


def generate(
    plans: Plans,
    target: Target,
    *,
    keep_llvm: bool = False,
    strict: bool = False,
    workers: int | None = None,
    cache: Cache | None = None,
) -> Library:
    """Compile and link all plans.

    keep_llvm   also return the optimised LLVM text (the cache is then not used: it holds objects only)
    strict      a kernel that does not compile raises CompileError instead of being refused
    workers     compiler processes; None chooses, 0 stays in this process
    cache       kernels and libraries compiled before
    """
    cache = None if keep_llvm else cache
    keys = [_kernel_key(p, target) if cache is not None else "" for p in plans.plans]
    whole = key_of("library", *keys) if cache is not None and all(keys) else ""
    known = cache.get(whole) if cache is not None and whole else None
    if known is not None:
        return Library(known.data, target, plans, str(known.head["digest"]))
    done, failed = _compiled(plans, keys, target, cache, keep_llvm, workers)
    if failed and strict:
        raise next(iter(failed.values()))
    modules = [m for m, _ in done]
    digest, glue = glue_object(modules, target, keep_llvm)
    image = link([glue.data, *(o.data for _, o in done)], target, EXPORTS)
    check_symbols(image, EXPORTS)
    if cache is not None and whole and not failed:
        cache.put(whole, Entry({"digest": digest}, image))
    llvm_text = "\n".join([*(o.ir for _, o in done), glue.ir]) if keep_llvm else ""
    return Library(image, target, _surviving(plans, failed), digest, llvm_text)


def _compiled(
    plans: Plans, keys: Sequence[str], target: Target, cache: Cache | None, keep_llvm: bool, workers: int | None
) -> tuple[list[tuple[Module, Object]], dict[Kernel, CompileError]]:
    """Every kernel's module and object, and the kernels that failed."""
    count = default_workers(len(plans.plans)) if workers is None else workers
    done: list[tuple[Module, Object]] = []
    failed: dict[Kernel, CompileError] = {}
    with Compiler(target, count, keep_ir=keep_llvm) as compiler:
        for job in [_start(p, key, target, compiler, cache) for p, key in zip(plans.plans, keys, strict=True)]:
            result = job.result()
            if isinstance(result, CompileError) or job.module is None:
                assert isinstance(result, CompileError)
                failed[job.plan.kernel] = _named(result, job.plan)
                continue
            done.append((job.module, result))
            if cache is not None and job.key and not job.cached:
                cache.put(job.key, _entry(job.module, result))
    return done, failed


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
    text = str(build.module)
    return Module(part, hashlib.sha256(text.encode()).hexdigest(), text)


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
    digest = library_digest([*(m.digest for m in modules), text], target)
    return digest, compile_module(text.replace(NO_DIGEST, digest), baseline, exports=EXPORTS, keep_ir=keep_llvm)


def library_digest(texts: Sequence[str], target: Target) -> str:
    """Content hash of a library: everything its bytes depend on."""
    return hash_of(*versions(), repr(target), *texts)


def _checked(result: Object | CompileError) -> Object | CompileError:
    """One kernel that calls out of the library must not spoil the linking of all."""
    if isinstance(result, CompileError):
        return result
    try:
        check_object(result.data)
    except CompileError as e:
        return e
    return result


def _start(plan: Plan, key: str, target: Target, compiler: Compiler, cache: Cache | None) -> _Job:
    known = cache.get(key) if cache is not None and key else None
    if known is not None:
        module, found = _known(plan, known)
        return _Job(plan, key, module, found, cached=True)
    try:
        module = emit_module(plan, target)
    except CompileError as e:
        return _Job(plan, key, None, e)
    except SLIPS as e:
        # A template that trips over one kernel must not sink the model: the kernel is refused, strict shows it.
        why = f"{type(e).__name__}: {e}"
        return _Job(plan, key, None, CompileError("E_EMIT", f"template {plan.schedule.template} failed", why))
    return _Job(plan, key, module, compiler.submit(module.text))


# ---- the cache: what decides a kernel's code, and what is kept of it ----


def _kernel_key(plan: Plan, target: Target) -> str:
    """Hash of everything the object of a kernel depends on; empty for a template from outside this package."""
    plans = [plan] if plan.general is None else [plan, plan.general]
    if not all(type(p.template).__module__.startswith("onnxfuse.") for p in plans):
        return ""
    texts = [t for p in plans for t in (type(p.template).__qualname__, repr(p.schedule), show(p.kernel), show(p.code))]
    return key_of("kernel", repr(target), *texts)


def _entry(module: Module, made: Object) -> Entry:
    part = module.part
    head = {
        "digest": module.digest,
        "fast": asdict(part.fast),
        "general": None if part.general is None else asdict(part.general),
        "faults": [asdict(f) for f in part.faults],
    }
    return Entry(head, made.data)


def _known(plan: Plan, entry: Entry) -> tuple[Module, Object]:
    head: Any = entry.head  # JSON
    general = None if head["general"] is None else Emitted(**head["general"])
    part = Part(plan.kernel, Emitted(**head["fast"]), general, tuple(Fault(**f) for f in head["faults"]))
    return Module(part, head["digest"]), Object(entry.data)


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
