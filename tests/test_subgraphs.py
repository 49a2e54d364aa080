"""`--include-subgraph`: bodies of If, Loop and Scan are optimized like the main graph, with the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

import onnxfuse

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


def data(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def yes_and_no(**feeds: np.ndarray) -> list[dict[str, np.ndarray]]:
    return [{**feeds, "c": np.array(value)} for value in (True, False)]


# name -> (graph, groups per scope, feeds)
CASES = {
    "both branches": (
        """g (float[N,4] x, bool c) => (float[N,4] y) <float[4] w = {1,2,3,4}> {
            y = If (c) <
                then_branch = t () => (a) { p = Add(x, w) a = Relu(p) },
                else_branch = e () => (b) { q = Sub(x, w) b = Sigmoid(q) }>
        }""",
        {"If_0.then_branch": 1, "If_0.else_branch": 1},
        yes_and_no(x=data(3, 4)),
    ),
    "a captured value is an output of its group": (
        """g (float[N,4] x, bool c) => (float[N,4] y) {
            h = Exp(x)
            z = Relu(h)
            b = If (c) <
                then_branch = t () => (a) { p = Neg(h) a = Tanh(p) },
                else_branch = e () => (b0) { b0 = Mul(h, z) }>
            y = Add(z, b)
        }""",
        {"": 2, "If_2.then_branch": 1, "If_2.else_branch": 1},
        yes_and_no(x=data(3, 4)),
    ),
    "a branch that hands on an outer value": (
        """g (float[N,4] x, bool c) => (float[N,4] y) {
            h = Exp(x)
            y = If (c) <
                then_branch = t () => (a) { a = Identity(h) },
                else_branch = e () => (b) { p = Neg(h) b = Tanh(p) }>
        }""",
        {"": 1, "If_1.else_branch": 1},
        yes_and_no(x=data(3, 4)),
    ),
    "equal names in bodies that do not see each other": (
        """g (float[N,4] x, bool c) => (float[N,4] y) {
            h = Exp(x)
            y = If (c) <
                then_branch = t () => (a) { p = Neg(x) a = Tanh(p) },
                else_branch = e () => (a) { p = Abs(x) q = If (c) <
                    then_branch = t2 () => (r) { s = Sin(h) r = Cos(s) },
                    else_branch = e2 () => (r) { s = Sqrt(h) r = Neg(s) }>
                    a = Mul(q, p) }>
        }""",
        {},
        yes_and_no(x=data(3, 4)),
    ),
    "nested bodies read values of every level": (
        """g (float[N,4] x, bool c, bool d) => (float[N,4] y) <float[4] w = {1,2,3,4}> {
            h = Exp(x)
            y = If (c) <
                then_branch = t () => (a) {
                    k = Add(h, w)
                    m = Relu(k)
                    i = If (d) <
                        then_branch = t2 () => (i1) { u = Mul(m, h) v = Add(u, w) i1 = Tanh(v) },
                        else_branch = e2 () => (i2) { i2 = Identity(m) }>
                    a = Neg(i)
                },
                else_branch = e () => (b) { b = Identity(x) }>
        }""",
        {"": 1, "If_1.then_branch": 2, "If_1.then_branch/If_2.then_branch": 1},
        [{"x": data(2, 4), "c": np.array(c), "d": np.array(d)} for c in (True, False) for d in (True, False)],
    ),
    "loop with a carried value and a captured one": (
        """g (int64 n, float[N,4] x, bool go) => (float[N,4] y) <float[4] w = {1,2,3,4}> {
            h = Exp(x)
            y = Loop (n, go, x) <body = b (int64 i, bool ci, float[N,4] s) => (bool co, float[N,4] s2) {
                co = Identity(ci)
                p = Mul(s, h)
                q = Add(p, w)
                s2 = Tanh(q)
            }>
        }""",
        {"": 1, "Loop_1.body": 1},
        [{"n": np.array(n), "x": data(2, 4), "go": np.array(True)} for n in (0, 1, 5)],
    ),
    "loop whose value grows from iteration to iteration": (
        """g (int64 n, float[N,4] x, bool go) => (float[M,4] y) {
            y = Loop (n, go, x) <body = b (int64 i, bool ci, float[2,4] s) => (bool co, float[2,4] s2) {
                co = Identity(ci)
                p = Sigmoid(s)
                q = Neg(p)
                s2 = Concat<axis=0>(q, x)
            }>
        }""",
        {},
        [{"n": np.array(n), "x": data(2, 4), "go": np.array(True)} for n in (0, 1, 4)],
    ),
    "loop whose value changes its rank": (
        """g (int64 n, float[2] x, bool go) => (y) {
            y = Loop (n, go, x) <body = b (int64 i, bool ci, float[2] s) => (bool co, float[2] s2) {
                co = Identity(ci)
                p = Sigmoid(s)
                q = Neg(p)
                zero = Constant<value_ints=[0]>()
                s2 = Unsqueeze(q, zero)
            }>
        }""",
        {},
        [{"n": np.array(n), "x": data(2), "go": np.array(True)} for n in (1, 3)],
    ),
    "loop that counts, stops itself and collects": (
        """g (float[3] x, bool go) => (float[3] y, float[T,3] all) {
            none = Constant<value_int=100>()
            y, all = Loop (none, go, x) <body = b (int64 i, bool ci, float[3] s) => (bool co, s2, float[3] each) {
                f = Cast<to=1>(i)
                p = Add(s, f)
                s2 = Tanh(p)
                q = Mul(s2, f)
                each = Neg(q)
                five = Constant<value_int=5>()
                co = Less(i, five)
            }>
        }""",
        {"Loop_1.body": None},
        [{"x": data(3), "go": np.array(True)}, {"x": data(3), "go": np.array(False)}],
    ),
    "loop with a value that stays the same": (
        """g (int64 n, float[N,4] x, int64[2] shape, bool go) => (y, int64[2] t) {
            y, t = Loop (n, go, x, shape) <body = b (int64 i, bool ci, s, int64[2] k) => (bool co, s2, int64[2] k) {
                co = Identity(ci)
                p = Exp(s)
                q = Neg(p)
                s2 = Reshape(q, k)
            }>
        }""",
        {},
        [{"n": np.array(2), "x": data(2, 4), "shape": np.array([4, 2]), "go": np.array(True)}],
    ),
    "loop without a first value": (
        """g (int64 n, float[N,4] x, bool go) => (float[T,N,4] y) {
            y = Loop (n, go) <body = b (int64 i, bool ci) => (bool co, float[N,4] s) {
                co = Identity(ci)
                f = Cast<to=1>(i)
                p = Mul(x, f)
                s = Tanh(p)
            }>
        }""",
        {"Loop_0.body": 1},
        [{"n": np.array(3), "x": data(2, 4), "go": np.array(True)}],
    ),
    "scan forwards and backwards": (
        """g (float[3] h, float[T,3] x, float[2,T] z) => (float[3] last, float[T,3] y) {
            last, y = Scan <num_scan_inputs=2, scan_input_axes=[0,1], scan_input_directions=[0,1],
                body = b (float[3] s, float[3] xi, float[2] zi) => (float[3] s2, float[3] yi) {
                    p = Add(s, xi)
                    s2 = Tanh(p)
                    r = ReduceSum(zi)
                    q = Mul(s2, r)
                    yi = Neg(q)
            }> (h, x, z)
        }""",
        {"Scan_0.body": None},
        [{"h": data(3), "x": data(5, 3), "z": data(2, 5)}],
    ),
    "a body's own weights, and outer ones": (
        """g (float[N,4] x, bool c) => (float[N,2] y) <float[4,2] w = {1,2,3,4,5,6,7,8}, float[2] bias = {1,2}> {
            y = If (c) <
                then_branch = t () => (float[N,2] a) { p = MatMul(x, w) q = Add(p, bias) a = Relu(q) },
                else_branch = e () => (float[N,2] b) <float[4,2] v = {8,7,6,5,4,3,2,1}> {
                    r = MatMul(x, v) s = Add(r, bias) b = Tanh(s) }>
        }""",
        {"If_0.then_branch": 1, "If_0.else_branch": 1},
        yes_and_no(x=data(3, 4)),
    ),
    "constants fold inside": (
        """g (float[N,4] x, bool c) => (float[N,4] y) <float[4] w = {1,2,3,4}> {
            y = If (c) <
                then_branch = t () => (a) {
                    two = Constant<value_float=2.0>() k = Mul(w, two) p = Add(x, k) a = Relu(p) },
                else_branch = e () => (b) { b = Identity(x) }>
        }""",
        {"If_0.then_branch": 1},
        yes_and_no(x=data(3, 4)),
    ),
    "a condition that is an output too, empty tensors": (
        """g (float[N,4] x, bool c) => (float[N,4] y, float[N,4] h) {
            h = Exp(x)
            y = If (c) <
                then_branch = t () => (a) { p = Mul(h, x) a = Tanh(p) },
                else_branch = e () => (b) { b = Identity(h) }>
        }""",
        {"If_1.then_branch": 1},
        [*yes_and_no(x=data(0, 4)), *yes_and_no(x=data(1, 4))],
    ),
    "unnamed and equal node names, nodes out of order": (
        """g (float[N,4] x, bool c) => (float[N,4] y) {
            [n] y = If (c) <
                then_branch = t () => (a) { p = Neg(h) [n] a = Tanh(p) },
                else_branch = e () => (b) { [n] b = Abs(h) }>
            h = Exp(x)
        }""",
        {"": 1, "n.then_branch": 1, "n.else_branch": 1},
        yes_and_no(x=data(3, 4)),
    ),
    "a sequence in a body": (
        """g (float[N,4] x, bool c) => (float[N,4] y) {
            s = SequenceConstruct(x, x)
            y = If (c) <
                then_branch = t () => (a) { k = Constant<value_int=1>() p = SequenceAt(s, k) q = Neg(p) a = Tanh(q) },
                else_branch = e () => (b) { b = Identity(x) }>
        }""",
        {},
        yes_and_no(x=data(3, 4)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_stay(name: str, tmp_path: Path) -> None:
    text, groups, feeds = CASES[name]
    m = model(text)
    before = m.SerializeToString(deterministic=True)
    bundle = onnxfuse.optimize(m, include_subgraph=True)
    assert m.SerializeToString(deterministic=True) == before
    bundle.save(tmp_path / "out.onnx")
    if "type" not in complaint(m):
        assert not complaint(bundle.model)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    judge = ort.InferenceSession(m.SerializeToString(), options)
    ours = [ort.InferenceSession(tmp_path / "out.onnx", options)]
    ours += [onnxfuse.InferenceSession(tmp_path / "out.onnx")] if bundle.library is not None else []
    for session in ours:
        for feed in feeds:
            for a, b in zip(judge.run(None, feed), session.run(None, feed), strict=True):
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    found: dict[str, int] = {}
    for k, part in enumerate(bundle.plans.partitions):
        scope = part.loops.name if k else ""
        found[scope] = sum(g.id in bundle.plans.calls for g in part.groups)
    for scope, count in groups.items():
        assert found[scope] == count if count is not None else found[scope] > 0, found


def complaint(m: onnx.ModelProto) -> str:
    """What the checker says; onnxruntime asks for less: sorted nodes and types of all outputs of bodies."""
    try:
        onnx.checker.check_model(m, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return str(error)
    return ""


def every_name(m: onnx.ModelProto) -> tuple[list[str], list[str]]:
    values, nodes = [], []
    pending = [m.graph]
    for graph in pending:
        values += [i.name for i in graph.input] + [t.name for t in graph.initializer]
        for node in graph.node:
            values += [name for name in node.output if name]
            nodes.append(node.name)
            pending += [a.g for a in node.attribute if a.HasField("g")]
    return values, nodes


@pytest.mark.parametrize("name", CASES)
def test_every_name_is_there_once(name: str) -> None:
    made = onnxfuse.optimize(model(CASES[name][0]), include_subgraph=True, verify=False).model
    for names in every_name(made):
        assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)


@pytest.mark.parametrize("name", CASES)
def test_without_the_flag_bodies_stay_byte_for_byte(name: str) -> None:
    m = model(CASES[name][0])
    made = onnxfuse.optimize(m, verify=False).model
    old, new = ([a.g.SerializeToString() for n in x.graph.node for a in n.attribute] for x in (m, made))
    assert [b for b in old if b] == [b for b in new if b]
