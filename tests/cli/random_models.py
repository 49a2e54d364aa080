"""Random small models for properties of what is said about them."""

from hypothesis import strategies as st
from onnx import parser

from onnxfuse import pipeline
from onnxfuse.config import Config, FusionConfig, FusionMode
from onnxfuse.ir.plan import Plans
from onnxfuse.trace import Stopped, Trace

UNARY = ("Exp", "Relu", "Neg", "Softmax", "NonZero", "LayerNormalization")


@st.composite
def models(draw):
    """(ModelProto, mode): up to 9 nodes over [n, 8] and [n, 1] matrices, several outputs."""
    rows = draw(st.sampled_from(["4", "n"]))
    wide, thin, lines, loose = ["x"], [], [], []
    for k in range(draw(st.integers(1, 9))):
        name = f"v{k}"
        a = draw(st.sampled_from(wide))
        kind = draw(st.sampled_from([*UNARY, "Add", "Reduce", "Bias", "Gemm", "Turn"]))
        if kind == "NonZero":
            lines.append(f"{name} = NonZero({a})")
            loose.append(name)
            continue
        if kind == "Reduce":
            lines.append(f"{name} = ReduceMax<axes=[1], keepdims=1>({a})")
            thin.append(name)
            continue
        text = {
            "Add": f"Add({a}, {draw(st.sampled_from(wide))})",
            "Bias": f"Sub({a}, {draw(st.sampled_from(thin or wide))})",
            "Gemm": f"MatMul({a}, w)",
            "LayerNormalization": f"LayerNormalization({a}, s)",
        }.get(kind, f"{kind}({a})")
        if kind == "Turn":
            lines.append(f"{name}t = Transpose<perm=[1, 0]>({a})")
            text = f"Transpose<perm=[1, 0]>({name}t)"
        lines.append(f"{name} = {text}")
        wide.append(name)
    outputs = [f"float[{rows}, 8] {v}" for v in dict.fromkeys([wide[-1], draw(st.sampled_from(wide))]) if v != "x"]
    outputs += [f"float[{rows}, 1] {v}" for v in thin[-1:]] + [f"int64[2, k{v}] {v}" for v in loose[-1:]]
    numbers = ", ".join(map(str, range(64)))
    weights = f"float[8, 8] w = {{{numbers}}}, float[8] s = {{1, 2, 3, 4, 5, 6, 7, 8}}"
    head = '<ir_version: 8, opset_import: ["": 17]>'
    text = f"{head} g (float[{rows}, 8] x) => ({', '.join(outputs)}) <{weights}> {{ {' '.join(lines)} }}"
    return parser.parse_model(text), draw(st.sampled_from(list(FusionMode)))


def planned(model, mode):
    """The graph as read, the plans, and the partition before kernelize."""
    trace = Trace(stop_after="plan")
    try:
        pipeline.optimize(model, Config(fusion=FusionConfig(mode=mode), target="x86-64-v3"), trace)
    except Stopped as stopped:
        plans = stopped.result
    assert isinstance(plans, Plans)
    return trace.result("read").graph, plans, trace.result("layout")
