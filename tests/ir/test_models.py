"""The levels of whole models: sound, readable back, and of one meaning (the oracle on each, onnxruntime at the end)."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from onnxfuse.config import Config
from onnxfuse.frontend.atomize import atomize
from onnxfuse.frontend.lower import lower
from onnxfuse.frontend.prepare import prepare
from onnxfuse.frontend.read import read
from onnxfuse.fuse import fuse
from onnxfuse.ir.check import check
from onnxfuse.ir.interp import run_kernel, run_loops
from onnxfuse.ir.parse import parse
from onnxfuse.ir.text import same, show
from onnxfuse.schedule.kernelize import kernelize
from onnxfuse.verify.evaluate import evaluate

MODELS = sorted((Path(__file__).parents[2] / "models").glob("*.onnx"))
TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_}


@pytest.fixture(params=MODELS, ids=lambda p: p.stem, scope="module")
def model(request):
    source = read(str(request.param)).graph

    def run(node, arrays):
        return evaluate(node, arrays, source.opset, source.imports)

    prepared = prepare(source, Config().prepare, run)
    atomized = atomize(prepared.typed)
    loops = lower(atomized)
    partition = fuse(loops, Config().fusion)
    return request.param, run, [source, prepared.graph, atomized.graph, loops, partition], kernelize(partition)


def draw(session, rng):
    shapes = {i.name: [d if isinstance(d, int) else 2 for d in i.shape] for i in session.get_inputs()}
    kinds = {i.name: TYPES[i.type] for i in session.get_inputs()}
    return {n: (rng.standard_normal(s) * 2).astype(kinds[n]) for n, s in shapes.items()}


def test_every_level_is_sound_and_reads_back(model):
    _, _, levels, kernels = model
    check(kernels)
    for ir in (*levels, *kernels.kernels):
        check(ir)
        assert same(parse(show(ir)), ir)
        assert show(parse(show(ir))) == show(ir)


def test_loops_mean_what_onnxruntime_computes_and_kernels_mean_the_loops(model, rng):
    path, run, _, kernels = model
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs = draw(session, rng)
    calls = kernels.calls.values()
    loops = kernels.partition.loops
    values = {v for call in calls for v in (*call.inputs, *call.outputs)}
    got = run_loops(loops, inputs, opaque=run, keep=values)
    for out, want in zip(session.get_outputs(), session.run(None, inputs), strict=True):
        np.testing.assert_allclose(got[out.name], want, rtol=1e-4, atol=1e-5)
    for call in calls:
        outs = run_kernel(call.kernel, [got[v.name] for v in call.inputs])
        for v, array in zip(call.outputs, outs, strict=True):
            np.testing.assert_allclose(array, got[v.name], rtol=1e-5, atol=1e-6, err_msg=call.name)
