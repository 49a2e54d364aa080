"""Which kernels are slower than what onnxruntime makes of the same nodes? Measured, in a process of its own.

    measure_kernels   every distinct kernel of an optimized model as a model of one node: its function body, as
                      onnxruntime runs it at ORT_ENABLE_ALL, against the kernel, on the values that reach it in a run
    measure_models    whole optimized models against the original, in the place they will have

Both interleave the contestants (see bench.py): the machine's moods hit all alike. A kernel loses when it is slower in
three rounds of four; a close call stays. Kernels are judged alone, where onnxruntime may have to convert layouts it
would keep inside a model: that is what the comparison of whole models is for.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from onnxfuse.config import VerifyConfig
from onnxfuse.files import private_folder
from onnxfuse.verify import ort
from onnxfuse.verify.bench import Contestant, bench
from onnxfuse.verify.child import apart
from onnxfuse.verify.inputs import Sample
from onnxfuse.verify.speed import Candidate, first_sample, speeds

DOMAIN = "onnxfuse"
SECONDS = 0.5  # of measuring for one kernel; a whole model gets SECONDS_MODEL
SECONDS_MODEL = 4.0
Step = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """One kernel. `ratio` = onnxruntime's time / the kernel's, with quartiles; `ms` of one run of the kernel."""

    op_type: str
    ratio: float
    ratio_low: float
    ratio_high: float
    ms: float
    calls: int

    @property
    def loses(self) -> bool:
        """Slower in three rounds of four."""
        return self.ratio_high < 1.0

    def json(self) -> dict[str, object]:
        return {**asdict(self), "loses": self.loses}


@dataclass(frozen=True, slots=True)
class Job:
    """What both measurements need: the original, what its inputs shall be, and how many threads run it."""

    original: Path
    candidates: tuple[Candidate, ...]
    config: VerifyConfig = field(default_factory=VerifyConfig)
    custom_op_libraries: tuple[Path, ...] = ()
    threads: int = 0

    def feeds(self) -> Sample:
        """The first sample: the user's data, or the first random one that the original accepts."""
        return first_sample(self.original, self.config, self.custom_op_libraries, self.threads)


@dataclass(frozen=True, slots=True)
class KernelsJob(Job):
    """`measure_kernels`, for a child."""

    def run(self, step: Step) -> tuple[Measured, ...]:
        return tuple(_kernels(self, step))


@dataclass(frozen=True, slots=True)
class ModelsJob(Job):
    """`measure_models`, for a child."""

    def run(self, step: Step) -> tuple[float, ...]:
        step("timing the original model and the optimized ones")
        found = speeds(
            self.original,
            self.candidates,
            self.feeds(),
            custom_op_libraries=self.custom_op_libraries,
            threads=self.threads,
            seconds=SECONDS_MODEL,
        )
        return tuple(t.ratio for t in found)


def measure_kernels(job: KernelsJob) -> tuple[Measured, ...]:
    """Every distinct kernel of the only candidate. Raises UsageError, VerifyError E_VERIFY_CRASH."""
    return apart(job)


def measure_models(job: ModelsJob) -> tuple[float, ...]:
    """Time of the original / time of each candidate. Raises UsageError, VerifyError E_VERIFY_CRASH."""
    return apart(job)


def _kernels(job: Job, step: Step) -> Iterator[Measured]:
    (candidate,) = job.candidates
    if candidate.library is None:
        return
    libraries = (*job.custom_op_libraries, candidate.library)
    model = onnx.load(os.fspath(candidate.model), load_external_data=False)
    chosen: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        if node.domain == DOMAIN:
            chosen.setdefault(node.op_type, []).append(node)
    weights = {t.name: t for t in model.graph.initializer}
    sample = job.feeds()
    step("recording what the kernels read")
    first = [nodes[0] for nodes in chosen.values()]
    seen = _record(model, candidate.model.parent, [n for node in first for n in node.input], sample, libraries)
    with private_folder() as folder:
        for (op_type, nodes), node in zip(chosen.items(), first, strict=True):
            step(f"timing {op_type}")
            reads = {n: seen[n] for n in node.input if n in seen}
            path = folder / "kernel.onnx"
            onnx.save(_alone(model, node, reads, weights, candidate.model.parent), os.fspath(path))
            found = bench(
                [Contestant("body", path, job.custom_op_libraries), Contestant("kernel", path, libraries)],
                reads,
                {},
                threads=job.threads,
                seconds=SECONDS,
            )
            t = found.timings[1]
            yield Measured(op_type, t.ratio, t.ratio_low, t.ratio_high, t.median_ms, len(nodes))


def _record(
    model: onnx.ModelProto, folder: Path, names: Sequence[str], sample: Sample, libraries: Sequence[Path]
) -> dict[str, ort.Result]:
    """The values of these names in a run of the model; what is an initializer is left out."""
    inputs = {i.name for i in model.graph.input}
    weights = {t.name for t in model.graph.initializer}
    outputs = {o.name for o in model.graph.output}
    inner = [n for n in dict.fromkeys(names) if n and n not in weights | inputs | outputs]
    more = onnx.ModelProto()
    more.CopyFrom(model)
    more.graph.output.extend(onnx.ValueInfoProto(name=n) for n in inner)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".recorded-", suffix=".onnx") as f:  # beside the external data
        f.write(more.SerializeToString())
        f.flush()
        found = ort.run(ort.session(f.name, libraries=libraries), sample.feeds)
    wanted = set(names) - weights
    return {n: v for n, v in {**sample.feeds, **found}.items() if n in wanted}


def _alone(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    reads: Mapping[str, ort.Result],
    weights: Mapping[str, onnx.TensorProto],
    folder: Path,
) -> onnx.ModelProto:
    """One node as a model: weights inside, what else it reads as inputs of their very shape."""
    graph = onnx.GraphProto(name=node.name)
    graph.node.append(node)
    for name in dict.fromkeys(node.input):
        if name in weights:
            t = graph.initializer.add()
            t.CopyFrom(weights[name])
            if uses_external_data(t):
                load_external_data_for_tensor(t, os.fspath(folder))
        elif name:
            array = np.asarray(reads[name])
            code = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            graph.input.append(onnx.helper.make_tensor_value_info(name, code, array.shape))
    graph.output.extend(onnx.ValueInfoProto(name=n) for n in node.output if n)
    out = onnx.ModelProto(ir_version=model.ir_version, graph=graph)
    out.opset_import.extend(model.opset_import)
    out.functions.extend(f for f in model.functions if f.name == node.op_type or f.domain != DOMAIN)
    return out


__all__ = [
    "Candidate", "KernelsJob", "Measured", "ModelsJob", "measure_kernels", "measure_models",
]  # fmt: skip
