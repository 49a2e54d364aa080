"""The table's signatures against onnx's schemas, and nothing of the table or of the specification forgotten."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import onnx
import pytest
from onnx.defs import OpSchema

from onnxfuse.errors import Unsupported
from onnxfuse.ir.op import Family
from onnxfuse.ops import OPS, entries
from onnxfuse.ops.table import REDUCE_RULES, lookup, opaque, parameters, pointwise
from tests.ops.harness import NEWEST
from tests.ops.samples import samples
from tests.ops.test_ops import DECLINED, NOT_IN_ONNXRUNTIME, ONNX_SHAPES_WRONG, TESTED, opsets

OLDEST = 7
HISTORY: dict[str, list[OpSchema]] = {}
for _schema in onnx.defs.get_all_schemas_with_history():
    if _schema.domain == "":
        HISTORY.setdefault(_schema.name, []).append(_schema)
for _list in HISTORY.values():
    _list.sort(key=lambda s: s.since_version)

# Training attributes and others without meaning for inference; the entries take them and ignore them.
FREE_DEFAULTS = {("ConstantOfShape", "value"): "a tensor: the body makes f32 zero of None"}

# Schema changes after the entry's own that change nothing for it. Most only add element types.
TYPES = "more element types only"
SHAPES = "the shape inference is stated differently"
SAME = {
    "Add": {13: TYPES, 14: TYPES},
    "And": {},
    "AveragePool": {
        10: "ceil_mode is new, default 0",
        11: "auto_pad stated differently",
        19: "dilations are new, default 1",
        22: TYPES,
    },
    "ArgMax": {11: "negative axes", 12: "select_last_index is new; only the type of the result is stated", 13: TYPES},
    "ArgMin": {11: "negative axes", 12: "select_last_index is new; only the type of the result is stated", 13: TYPES},
    "BatchNormalization": {
        9: "spatial is gone; only its default was taken",
        14: "training_mode replaces the further outputs, which are declined",
        15: "types of scale and mean may differ from x; each input is widened by itself",
    },
    "BitShift": {28: TYPES},
    "Cast": {9: TYPES, 13: TYPES, 19: "saturate is for f8, which is not computed", 21: TYPES, 23: TYPES,
             24: "round_mode is for f8e8m0, which is not computed", 25: TYPES, 28: TYPES},
    "CastLike": {19: "see Cast", 21: TYPES, 23: TYPES, 24: "see Cast", 25: TYPES},
    "Clip": {12: TYPES, 13: TYPES},
    "Concat": {11: "negative axes", 13: TYPES},
    "Conv": {11: "auto_pad stated differently", 22: TYPES},
    "ConvTranspose": {11: "auto_pad stated differently", 22: TYPES},
    "DepthToSpace": {11: "mode is new, default DCR as before", 13: TYPES, 28: TYPES},
    "DequantizeLinear": {13: "axis is new", 19: TYPES, 21: "block_size is new", 23: "output_dtype is new", 24: TYPES,
                         25: TYPES, 28: TYPES},
    "Dropout": {13: TYPES, 22: TYPES},
    "Equal": {11: TYPES, 13: TYPES, 19: TYPES},
    "Flatten": {9: TYPES, 11: "negative axes", 13: TYPES, 21: TYPES, 23: TYPES, 24: TYPES, 25: TYPES},
    "GRU": {14: "layout is new, default 0", 22: TYPES},
    "Gather": {11: "negative indices", 13: TYPES},
    "GatherND": {12: "batch_dims is new, default 0", 13: TYPES},
    "Gemm": {9: TYPES, 11: "C is optional", 13: TYPES},
    "Greater": {9: TYPES, 13: TYPES},
    "GridSample": {22: TYPES},
    "Hardmax": {11: "negative axes", 13: "another axis; only the type of the result is stated"},
    "LSTM": {14: "layout is new, default 0", 22: TYPES},
    "Less": {9: TYPES, 13: TYPES},
    "LpPool": {11: "auto_pad stated differently", 18: "ceil_mode and dilations are new, with defaults", 22: TYPES},
    "Max": {8: "broadcasting, which equal shapes are a case of", 12: TYPES, 13: TYPES},
    "MaxPool": {8: "Indices are new, and declined", 10: "ceil_mode and dilations are new, with defaults",
                11: "auto_pad stated differently", 12: TYPES, 22: TYPES},
    "Mean": {8: "broadcasting, which equal shapes are a case of", 13: TYPES},
    "Min": {8: "broadcasting, which equal shapes are a case of", 12: TYPES, 13: TYPES},
    "Mod": {13: TYPES, 28: "what is undefined for a divisor of 0"},
    "OneHot": {11: "negative indices"},
    "PRelu": {9: TYPES, 16: TYPES},
    "Pad": {13: TYPES, 18: "axes are new and optional", 19: "mode wrap", 21: TYPES, 23: TYPES, 24: TYPES, 25: TYPES},
    "Pow": {12: "the exponent may be of another type", 13: TYPES, 15: TYPES},
    "QLinearMatMul": {21: TYPES},
    "QuantizeLinear": {13: "axis is new", 19: "saturate is new", 21: "block_size and output_dtype are new",
                       23: "precision is new", 24: TYPES, 25: TYPES, 28: TYPES},
    "RNN": {14: "layout is new, default 0", 22: TYPES},
    "Range": {27: TYPES},
    "Relu": {13: TYPES, 14: TYPES},
    "Reshape": {13: TYPES, 14: "allowzero is new, default 0", 19: TYPES, 21: TYPES, 23: TYPES, 24: TYPES, 25: TYPES},
    "Resize": {13: TYPES, 18: "antialias, axes and keep_aspect_ratio_policy are new, with defaults",
               19: "half_pixel_symmetric is new"},
    "RoiAlign": {16: "coordinate_transformation_mode is new; only the type of the result is stated", 22: TYPES},
    "ScatterElements": {13: TYPES, 16: "reduction is new; only the type of the result is stated", 18: TYPES},
    "ScatterND": {13: TYPES, 16: "reduction is new; only the type of the result is stated", 18: TYPES},
    "Shape": {13: TYPES, 15: "start and end are new, default everything", 19: TYPES, 21: TYPES, 23: TYPES, 24: TYPES,
              25: TYPES},
    "Slice": {11: "negative axes", 13: TYPES},
    "SpaceToDepth": {13: TYPES, 28: "mode is new, default DCR as before"},
    "Split": {11: "negative axes", 18: "num_outputs is new; sizes may be unequal"},
    "Sub": {13: TYPES, 14: TYPES},
    "Sum": {8: "broadcasting, which equal shapes are a case of", 13: TYPES},
    "ThresholdedRelu": {22: TYPES},
    "TopK": {11: "largest and sorted are new; only the types of the results are stated", 24: TYPES},
}  # fmt: skip
SAME |= {
    name: {11: "negative axes", 12: TYPES, 13: TYPES, 20: TYPES, 28: "the function body is stated differently"}
    for name in OPS_REDUCING
} if (OPS_REDUCING := {op.name for op in REDUCE_RULES} | {"ReduceLogSumExp"}) else {}  # fmt: skip


def typed_only(old: OpSchema, new: OpSchema) -> bool:
    """The two differ in element types (and texts) alone."""

    def form(s: OpSchema):
        params = [[(p.name, str(p.option)) for p in side] for side in (s.inputs, s.outputs)]
        return [len(side) for side in params], [o for side in params for _, o in side], attributes(s)

    return form(old) == form(new)


def attributes(s: OpSchema):
    return {n: (a.required, default(a)) for n, a in s.attributes.items()}


def default(a: OpSchema.Attribute):
    if a.default_value.type == onnx.AttributeProto.UNDEFINED:
        return None
    value = onnx.helper.get_attribute_value(a.default_value)
    if isinstance(value, bytes):
        return value.decode()
    return [v.decode() if isinstance(v, bytes) else v for v in value] if isinstance(value, list) else value


def schema_of(op) -> OpSchema:
    """The newest schema the entry stands for: later ones only add attributes with defaults."""
    later = [e.since for e in OPS[op.domain, op.name] if e.since > op.since]
    last = min(later) - 1 if later else NEWEST
    covered = [s for s in HISTORY[op.name] if s.since_version <= last]
    return [s for s in covered if not s.deprecated or s is covered[0]][-1]  # GroupNormalization was born deprecated


# onnx knows no schemas of other domains.
STANDARD = [op for op in TESTED if not op.domain]


@pytest.mark.parametrize("op", STANDARD, ids=lambda op: f"{op.name}-{op.since}")
def test_a_signature_is_the_schema(op):
    schema = schema_of(op)
    inputs, attrs = parameters(op)
    mine = {p.name: p for p in attrs if p.name != "outputs"}
    old = {n for s in HISTORY[op.name] for n in s.attributes}  # of an earlier opset the entry stands for as well
    assert set(schema.attributes) <= set(mine), "attributes are missing"
    assert set(mine) <= old, "attributes are invented"
    for name, attribute in schema.attributes.items():
        if (op.name, name) in FREE_DEFAULTS:
            continue
        empty = mine[name].default is inspect.Parameter.empty
        assert attribute.required == empty, name
        if not empty:
            compare_defaults(name, default(attribute), mine[name].default)
    variadic = [p for p in inputs if p.kind is inspect.Parameter.VAR_POSITIONAL]
    assert bool(variadic) == any(i.option == OpSchema.FormalParameterOption.Variadic for i in schema.inputs)
    if not variadic:
        optional = [i.option == OpSchema.FormalParameterOption.Optional for i in schema.inputs]
        assert [p.default is not inspect.Parameter.empty for p in inputs] == optional, [i.name for i in schema.inputs]


def compare_defaults(name: str, theirs, ours) -> None:
    if theirs is None:
        assert not ours or ours == 0 or name == "activations", name  # absent: None, or the zero that means it
    elif isinstance(theirs, float):
        assert np.float32(theirs) == np.float32(ours), name
    else:
        assert (list(ours) if isinstance(ours, tuple) else ours) == theirs, name


def test_every_op_of_the_specification_is_in_the_table():
    current = {n for n, schemas in HISTORY.items() if schemas[-1].since_version <= 26 and not schemas[-1].deprecated}
    assert current - {name for _, name in OPS} == {"Constant"}, "Constant is read as data (frontend/read.py)"
    foreign = {name for domain, name in OPS if not domain and name not in HISTORY}
    assert foreign == set()


@pytest.mark.parametrize("name", sorted({op.name for op in STANDARD}))
def test_every_schema_change_has_an_entry_or_a_reason(name):
    rows = {e.since for e in OPS["", name]}
    schemas = HISTORY[name]
    first = min(rows)
    for old, new in itertools.pairwise(schemas):
        v = new.since_version
        if v <= max(OLDEST, first) or new.deprecated or v in rows or v > NEWEST:
            continue
        assert v in SAME.get(name, {}) or typed_only(old, new), f"{name} changed in opset {v}"


def test_no_reason_is_stale():
    for name, versions in SAME.items():
        known = {s.since_version for s in HISTORY[name]}
        if name not in OPS_REDUCING:
            assert set(versions) <= known, name
    assert set(DECLINED) | set(NOT_IN_ONNXRUNTIME) <= {op.name for op in TESTED}
    assert {n for n, _ in ONNX_SHAPES_WRONG} <= {op.name for op in TESTED}


def test_an_entry_starts_where_the_operator_does():
    for op in (e for e in entries() if not e.domain):
        first = HISTORY[op.name][0].since_version
        assert op.since >= first or (op.since == 1 and first <= OLDEST) or op.fn is None, f"{op.name}@{op.since}"


@pytest.mark.parametrize("op", TESTED, ids=lambda op: f"{op.name}-{op.since}")
def test_every_entry_has_samples(op):
    assert all(samples(op, opset) for opset in opsets(op))


def test_duplicates_are_rejected():
    with pytest.raises(ValueError, match="duplicate op table entry Relu@1"):

        @pointwise
        def Relu(x):
            return x

    with pytest.raises(ValueError, match="duplicate"):
        opaque("If", "again")
    assert lookup("", "Relu", 17).doc != ""


def test_the_newest_entry_not_above_the_opset_wins():
    assert [lookup("", "Split", v).since for v in (7, 12, 13, 26)] == [2, 2, 13, 13]
    assert lookup("", "Gelu", 19) is None
    assert lookup("ai.onnx", "Relu", 7) is lookup("", "Relu", 7)
    assert lookup("my.domain", "Relu", 7) is None


def test_tolerances_are_stated_where_results_are_not_exact():
    """Only ops whose value goes through a transcendental, a quotient of sums or a sum may differ from onnxruntime."""
    for op in entries():
        if op.family is Family.OPAQUE:
            continue
        if op.family in (Family.VIEW, Family.SHAPE, Family.ALIAS):
            assert op.tol.kind == "exact" or op.name in ("GridSample", "Resize", "Upsample"), op.name
        if op.tol.kind == "ulp":
            assert op.family is Family.POINTWISE, op.name
            assert op.tol.ulp <= 32, op.name
            assert op.tol.floor <= 16, op.name


def test_an_attribute_the_entry_does_not_know_is_refused():
    from onnxfuse.ir.graph import Node, Value
    from onnxfuse.ops.lowering import arguments

    node = Node(lookup("", "Relu", 17), (Value("x", None),), (Value("y", None),), {"alpha": 1.0}, "n", ())
    with pytest.raises(Unsupported, match="alpha"):
        arguments(node)


def test_every_entry_says_what_it_is():
    for op in entries():
        assert op.reason if op.fn is None else op.doc, op.name
