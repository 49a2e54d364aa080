"""Optimized models in one process and in many: right kernels, threads, fork, and libraries that do not belong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

from onnxfuse import InferenceSession, optimize
from onnxfuse.runtime.session import library_path

X = np.linspace(-3, 3, 4096, dtype=np.float32).reshape(64, 64)
TEXTS = {
    "softmax": "y = Softmax(x)",
    "gelu": "a = Mul(x, half) e = Erf(a) s = Add(e, one) y = Mul(x, s)",
    "norm": """m = ReduceMean<axes = [1]>(x) d = Sub(x, m) q = Mul(d, d) v = ReduceMean<axes = [1]>(q) s = Sqrt(v)
        y = Div(d, s)""",
    "product": "p = MatMul(x, x) r = Relu(p) y = Add(r, x)",
}


def source(name: str) -> onnx.ModelProto:
    return parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]> g (float[N,64] x) => (float[N,64] y)
        <float one = {{1.0}}, float half = {{0.7071}}> {{ {TEXTS[name]} }}""")


def expected(name: str, x: np.ndarray = X) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(source(name).SerializeToString(), options).run(None, {"x": x})[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {n: optimize(source(n), verify=False).save(folder / f"{n}.onnx").model for n in TEXTS}


def near(name: str, got: np.ndarray, x: np.ndarray = X) -> bool:
    return np.allclose(got, expected(name, x), rtol=1e-5, atol=1e-5)


def in_threads(count: int, work) -> None:
    failed: list[BaseException] = []

    def guarded(k: int) -> None:
        try:
            work(k)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(k,)) for k in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed, failed


def test_models_with_libraries_of_their_own_run_side_by_side(models):
    sessions = {n: InferenceSession(p) for n, p in models.items()}
    for _ in range(3):
        for name, session in sessions.items():
            assert near(name, session.run(None, {"x": X})[0])
    in_threads(8, lambda k: [sessions[n].run(None, {"x": X}) for n in list(models)[k % 4 :]] and None)
    del sessions["softmax"]  # what one session releases the others do not need
    assert near("gelu", sessions["gelu"].run(None, {"x": X})[0])


@pytest.mark.parametrize("threads", [2, 8])
def test_threads_share_a_session_and_get_the_bits_of_one(models, threads):
    for name in ("softmax", "product"):
        session = InferenceSession(models[name])
        inputs = [X[: 1 + 7 * k] * (1 + k) if name == "softmax" else X * (1 + k) for k in range(threads)]
        alone = [session.run(None, {"x": x})[0] for x in inputs]

        def work(k: int, session=session, inputs=inputs, alone=alone) -> None:
            for _ in range(20):
                np.testing.assert_array_equal(session.run(None, {"x": inputs[k]})[0], alone[k])

        in_threads(threads, work)


def test_many_sessions_of_one_library_at_once(models):
    def work(_k: int) -> None:
        for _ in range(5):
            assert near("norm", InferenceSession(models["norm"]).run(None, {"x": X})[0])

    in_threads(8, work)


def test_a_library_of_another_model_is_not_mistaken(models, tmp_path):
    """onnxruntime alone, wrong file beside the model: the nodes find no kernel of their name and run their bodies."""
    for name, other in (("softmax", "norm"), ("norm", "gelu"), ("product", "softmax")):
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(library_path(models[other])))
        session = ort.InferenceSession(models[name], options, providers=["CPUExecutionProvider"])
        assert near(name, session.run(None, {"x": X})[0])


def test_kernel_names_carry_enough_of_their_hash():
    """Two kernels that differ in one constant: nothing but the hash tells them apart."""
    names = set()
    for number in ("0.5", "0.25"):
        text = f"""<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] y)
            <float c = {{{number}}}> {{ a = Mul(x, c) y = Tanh(a) }}"""
        (node,) = optimize(parser.parse_model(text), verify=False).model.graph.node
        label, _, digest = node.op_type.rpartition("_")
        assert label == "mul_tanh"
        assert len(digest) == 16
        names.add(digest)
    assert len(names) == 2


def test_a_child_of_fork_runs_what_its_parent_loaded(models):
    """With one thread: onnxruntime's own pool does not survive a fork, with or without us."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = InferenceSession(models["softmax"], options)
    session.run(None, {"x": X})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            np.testing.assert_allclose(session.run(None, {"x": X})[0].sum(axis=1), 1, rtol=1e-5)
            again = ort.SessionOptions()
            again.intra_op_num_threads = 1
            InferenceSession(models["norm"], again).run(None, {"x": X})
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert near("softmax", session.run(None, {"x": X})[0])


SCRIPT = """
import sys, numpy as np
from onnxfuse import InferenceSession
x = np.linspace(-3, 3, 4096, dtype=np.float32).reshape(64, 64)
for path in sys.argv[1:]:
    session = InferenceSession(path)
    for _ in range(200):
        session.run(None, {"x": x})
"""


def test_two_processes_use_the_same_files(models):
    command = [sys.executable, "-c", SCRIPT, *map(str, models.values())]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        _, said = process.communicate()
        assert process.returncode == 0, said


def test_new_files_over_loaded_ones(models, tmp_path):
    """A session keeps what it loaded; the next one sees the new pair."""
    path = tmp_path / "m.onnx"
    for file in (models["softmax"], library_path(models["softmax"])):
        shutil.copy(file, path.with_suffix(file.suffix))
    old = InferenceSession(path)
    optimize(source("norm"), verify=False).save(path)
    new = InferenceSession(path)
    assert near("softmax", old.run(None, {"x": X})[0])
    assert near("norm", new.run(None, {"x": X})[0])
