"""Bodies of control flow compared one by one: what a run of the whole model does not reach is compared all the same.

A body runs as a model of its own, on the values it would get in a run of the model around it (of a loop: in the first
iteration), whatever branch that run takes, and on random ones where nothing is known about its inputs. Outer bodies
come first, so that the values for inner ones can be had from them. A body that the original cannot run on what there
is (a branch may rely on its condition) is reported as not compared, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime

from onnxfuse.config import VerifyConfig
from onnxfuse.errors import UsageError
from onnxfuse.ir.bodies import BodyFiles, FormalInput
from onnxfuse.verify import ort
from onnxfuse.verify.compare import Report, compare_many
from onnxfuse.verify.inputs import Sample, specs
from onnxfuse.verify.running import How, in_parts, opened, samples

if TYPE_CHECKING:
    import onnx

_CANNOT: tuple[type[Exception], ...] = (UsageError, KeyError, IndexError, *ort.ORT_ERRORS)
_TAP_LIMIT = 1 << 30  # bytes of a model that is loaded once more for the values inside


@dataclass(frozen=True, slots=True)
class BodiesJob:
    """The comparison of all bodies of `model`, for verify/child.py; those numbered in `skip` are left out."""

    model: Path
    bodies: tuple[BodyFiles, ...]
    libraries: tuple[Path | None, ...]
    config: VerifyConfig = field(default_factory=VerifyConfig)
    custom_op_libraries: tuple[Path, ...] = ()
    skip: frozenset[int] = frozenset()

    def run(self, step: Callable[[str], None] | None = None) -> tuple[Report, ...]:
        say = step or (lambda _: None)
        say("running the original model")
        feeds: dict[int, Mapping[str, object]] = {0: _main_feeds(self)}
        models = {0: self.model} | {b.number: b.before for b in self.bodies}
        reports: list[Report] = []
        for body in self.bodies:
            if body.number in self.skip:
                reports.append(not_compared(self, body, "the original ends the process on these inputs"))
                continue
            say(f"{step_of(body)}: running the original model")
            found = _feeds(self, body, models[body.parent], feeds.get(body.parent))
            if found is not None:
                feeds[body.number] = found
            reports += _compare(self, body, found, say)
        return tuple(reports)


def step_of(body: BodyFiles) -> str:
    """How the steps of the comparison call a body."""
    return f"body {body.number} ({body.name})"


def not_compared(job: BodiesJob, body: BodyFiles, why: str) -> Report:
    """A report that says so."""
    return Report(f"body {body.name}", f"body {body.name}", (), (), skipped=why)


def _main_feeds(job: BodiesJob) -> Mapping[str, object]:
    model = opened(job.model, How(job.custom_op_libraries, threads=1), job.config)
    sample, _ = next(samples(model, replace(job.config, runs=1, shapes=1)))
    return sample.feeds


def _compare(
    job: BodiesJob, body: BodyFiles, feeds: Mapping[str, object] | None, say: Callable[[str], None]
) -> tuple[Report, ...]:
    given = [] if feeds is None else [Sample("values of the model around it", feeds)]
    if not given and not body.free:
        return (not_compared(job, body, "no values for its inputs could be had"),)
    config = replace(job.config, input_data=None, test_shapes={}, val_ranges={})
    try:
        found = compare_many(
            body.before,
            body.after,
            job.libraries,
            config=config,
            custom_op_libraries=job.custom_op_libraries,
            step=lambda text: say(f"{step_of(body)}: {text}"),
            given=given,
        )
    except UsageError as error:  # the reference does not load alone, or takes none of the inputs
        return (not_compared(job, body, error.why or error.what),)
    name = f"body {body.name}"
    return tuple(replace(r, reference=name, candidate=name, narrowed=()) for r in found)


# --- what a body gets ------------------------------------------------------------------------------------------------
def _feeds(
    job: BodiesJob, body: BodyFiles, around: Path, outer: Mapping[str, object] | None
) -> Mapping[str, object] | None:
    """Values for every input of the body; None if one cannot be had or the original refuses them."""
    if outer is None:
        return None
    try:
        _declare(job, body, around, outer)
        alone = ort.session(body.before, libraries=job.custom_op_libraries)
        wanted = [s.name for s in specs(alone)]
        formal = {f.name: f for f in body.formals}
        names = {f.source for f in body.formals if f.source} | {n for n in wanted if n not in formal}
        values = dict(outer) | _tapped(job, around, outer, [n for n in names if n not in outer])
        feeds = {n: _formal(formal[n], values, alone) if n in formal else values[n] for n in wanted}
        ort.run(alone, feeds)
    except _CANNOT:
        return None
    return feeds


def _declare(job: BodiesJob, body: BodyFiles, around: Path, outer: Mapping[str, object]) -> None:
    """Inputs of unknown type (what an If makes, say) get that of their value: onnxruntime asks for it in a model."""
    import onnx  # here: most processes that compare do without

    protos = {path: onnx.load(path, load_external_data=False) for path in (body.before, body.after)}
    bare = {i.name for i in protos[body.before].graph.input if not i.type.tensor_type.elem_type and not _other(i)}
    if not bare:
        return
    sources = {n: next((f.source for f in body.formals if f.name == n), n) for n in bare}
    values = dict(outer) | _tapped(job, around, outer, [s for s in sources.values() if s and s not in outer])
    for path, proto in protos.items():
        for info in (i for i in proto.graph.input if i.name in bare):
            made = values[sources[info.name]]
            info.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.asarray(made).dtype)
        path.write_bytes(proto.SerializeToString())


def _other(info: onnx.ValueInfoProto) -> bool:
    """A sequence, a map or an optional."""
    return info.type.WhichOneof("value") not in (None, "tensor_type")


def _formal(f: FormalInput, values: Mapping[str, object], sess: onnxruntime.InferenceSession) -> object:
    rank = next(len(i.shape) for i in sess.get_inputs() if i.name == f.name)
    match f.role:
        case "counter":
            return np.zeros([1] * rank, np.int64)
        case "goes on":
            return np.ones([1] * rank, np.bool_)
        case "slice":
            return np.take(np.asarray(values[f.source]), -1 if f.backwards else 0, axis=f.axis)
    return values[f.source]


def _tapped(job: BodiesJob, model: Path, feeds: Mapping[str, object], names: Sequence[str]) -> dict[str, object]:
    """Values inside a model, by making them outputs."""
    if not names:
        return {}
    parts = in_parts(model, How(job.custom_op_libraries, threads=1), job.config)
    if parts is not None:
        return dict(parts.tapped(names).run(feeds))
    if model.stat().st_size > _TAP_LIMIT:
        raise KeyError(names[0])
    import onnx  # here as well

    proto = onnx.load(model, load_external_data=False)
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names)
    options = ort.options(libraries=job.custom_op_libraries)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.path.dirname(model))
    sess = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    taken = {i.name for i in sess.get_inputs()} | {i.name for i in sess.get_overridable_initializers()}
    return dict(ort.run(sess, {k: v for k, v in feeds.items() if k in taken}))


__all__ = ["BodiesJob", "not_compared", "step_of"]
