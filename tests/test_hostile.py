"""A model is untrusted input: names, paths and sizes go nowhere unescaped, out of its folder or unbounded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxfuse
from onnxfuse.cli import run_arguments
from onnxfuse.errors import UsageError
from onnxfuse.inspection import inspect_all
from onnxfuse.verify import ort

NAMES = (
    'quote " and \' and `',
    "two\nlines\r\n",
    "nul\0inside",
    "日本語 \u202e right to left, \U0001f600",
    "../../../etc/passwd",
    "/absolute/path",
    "n" * 10_000,
    '%0 = add i64 1, 2 ; } define void @f() { "\\22\\00',
    "@llvm.memcpy $(id) `id` ; rm -rf ~",
    "%s%n%p {0} {why} ${x}",
    "<b>&amp;[red]rich markup[/red]",
    "comma, = ( ) [ ] { } | -> #",
    "-o", "*", " ", "\u0007\u001b[31m",
)  # fmt: skip
X = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)


def hostile_model() -> onnx.ModelProto:
    """Every name is one of NAMES: nodes, values, symbols, function, domain, metadata, documentation."""
    nodes = []
    last = f"in {NAMES[0]}"
    for k, name in enumerate(NAMES):
        made = f"{name}{k}"
        op = ("Exp", "Tanh", "Sigmoid", "Neg")[k % 4]
        nodes.append(helper.make_node(op, [last], [made], name=name, doc_string=name))
        last = made
    nodes.append(helper.make_node(NAMES[0], [last], [NAMES[1]], name="call", domain=NAMES[4]))
    nodes.append(helper.make_node("Add", [NAMES[1], NAMES[7]], [NAMES[5]], name=NAMES[6] + "2"))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(NAMES[4], 1)]
    body = [helper.make_node("Abs", [NAMES[2]], [NAMES[3]], name=NAMES[8])]
    function = helper.make_function(NAMES[4], NAMES[0], [NAMES[2]], [NAMES[3]], body, opsets[:1])
    graph = helper.make_graph(
        nodes,
        NAMES[7],
        [helper.make_tensor_value_info(f"in {NAMES[0]}", TensorProto.FLOAT, [NAMES[2], NAMES[8]])],
        [helper.make_tensor_value_info(NAMES[5], TensorProto.FLOAT, [NAMES[2], NAMES[8]])],
        [numpy_helper.from_array(np.ones(3, np.float32), NAMES[7])],
        doc_string=NAMES[1],
    )
    model = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=8, producer_name=NAMES[2])
    helper.set_model_props(model, dict(zip(NAMES, reversed(NAMES), strict=True)))
    return model


def same_numbers(model: onnx.ModelProto, path: Path, library: Path | None) -> None:
    name = model.graph.input[0].name
    (want,) = ort.run(ort.session(model), {name: X}).values()
    (got,) = ort.run(ort.session(path, libraries=[library] if library else []), {name: X}).values()
    np.testing.assert_allclose(got, want, rtol=1e-5)


# ---- names


def test_names_of_any_kind_go_through_every_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    model = hostile_model()
    onnx.save(model, "in.onnx")
    for _ in ("compiled", "from the cache"):
        assert run_arguments(["optimize", "in.onnx", "out.onnx"]) == 0, capsys.readouterr().err
        same_numbers(model, tmp_path / "out.onnx", None)
        same_numbers(model, tmp_path / "out.onnx", tmp_path / "out.so")
    for arguments in (
        ["inspect", "out.onnx"],
        ["inspect", "in.onnx", "--json"],
        ["explain", "in.onnx", "--node", NAMES[7]],
        ["trace", "in.onnx", "--print-after", "all", "--dump", "dump"],
        ["trace", "in.onnx", "--export-stage", "fuse", "stage.onnx"],
    ):
        assert run_arguments(arguments) == 0, (arguments, capsys.readouterr().err)
    same_numbers(model, tmp_path / "stage.onnx", None)
    said = capsys.readouterr().out
    assert not set(said) & {"\0", "\u001b", "\u202e", "\u0007"}
    made = {p.relative_to(tmp_path).parts[0] for p in tmp_path.rglob("*")}
    assert made == {"in.onnx", "out.onnx", "out.so", "stage.onnx", "dump", "cache"}


def test_what_others_read_is_kept():
    model = hostile_model()
    made = onnxfuse.optimize(model, verify=False).model
    assert [i.name for i in made.graph.input] == [i.name for i in model.graph.input]
    assert [o.name for o in made.graph.output] == [o.name for o in model.graph.output]
    kept = {p.key: p.value for p in made.metadata_props}
    assert all(kept[p.key] == p.value for p in model.metadata_props)


# ---- external data


def external(folder: Path, **info: str) -> Path:
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
    )
    w = graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[4])
    w.data_location = TensorProto.EXTERNAL
    for key, value in info.items():
        w.external_data.add(key=key, value=value)
    folder.mkdir(exist_ok=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "in.onnx").write_bytes(model.SerializeToString())
    return folder / "in.onnx"


def outside(folder: Path) -> Iterator[str]:
    """Places a model must not read from: data that fit lie at each of them."""
    secret = folder / "secret.bin"
    secret.write_bytes(bytes(16))
    home = folder / "home"
    home.mkdir()
    (home / "link.bin").symlink_to(secret)
    (home / "out").symlink_to(folder)
    os.mkfifo(home / "pipe.bin")
    yield from ("../secret.bin", str(secret), "link.bin", "out/secret.bin", "home/../../secret.bin", "./../secret.bin")
    yield from ("/dev/zero", "/proc/self/environ", "pipe.bin", ".", "", "nul\0.bin", "n" * 5000, "file:///etc/passwd")


def test_external_data_may_not_leave_the_folder(tmp_path):
    for place in outside(tmp_path):
        path = external(tmp_path / "home", location=place)
        with pytest.raises(UsageError, match=r"E_EXTERNAL_PATH|E_EXTERNAL_MISSING"):
            onnxfuse.optimize(path, verify=False)


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        ("0", "32"), ("-4", "16"), ("8", "16"), ("0", "15"), (str(2**63), "16"), ("0", str(2**63)), ("0", "-16"),
        ("1e3", "16"), (str(-(2**63)), "16"), ("0x0", "16"), ("9" * 5000, "16"),
    ],
)  # fmt: skip
def test_external_data_lie_inside_their_file(tmp_path, offset, length):
    path = external(tmp_path, location="w.bin", offset=offset, length=length)
    (tmp_path / "w.bin").write_bytes(bytes(16))
    with pytest.raises(UsageError, match="E_EXTERNAL_SIZE"):
        onnxfuse.optimize(path, verify=False)


def test_data_are_written_beside_the_output_and_not_through_a_link(tmp_path):
    (tmp_path / "w.bin").write_bytes(np.ones(4, np.float32).tobytes())
    path = external(tmp_path, location="w.bin")
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    bundle = onnxfuse.optimize(path, verify=False, save_as_external_data=True)
    data = bundle.save(tmp_path / "first.onnx").data
    assert data is None or data.parent == tmp_path
    for name in ("out.onnx", "out.so", "out.onnx.data"):
        (tmp_path / name).symlink_to(victim)
    bundle.save(tmp_path / "out.onnx")
    assert victim.read_bytes() == b"precious"


# ---- shapes and sizes


def node_model(text: str, opset: int = 17) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')


HUGE = 1 << 62


@pytest.mark.parametrize(
    "text",
    [
        f"(float[{HUGE},4] x) => (float[a,b] y) {{ y = Exp(x) }}",
        f"(float[{HUGE},{HUGE},{HUGE}] x) => (float[a] y) <int64[1] k = {{-1}}> {{ f = Exp(x)  y = Reshape(f, k) }}",
        f"(float[4] x) => (float[a] y) <int64[1] r = {{{HUGE}}}> {{ t = Tile(x, r)  y = Exp(t) }}",
        f"(float[4] x) => (float[a] y) <int64[2] p = {{{HUGE},{HUGE}}}> {{ t = Pad(x, p)  y = Exp(t) }}",
        f"(float[1] x) => (float[a,b] y) <int64[2] s = {{{HUGE},8}}> {{ t = Expand(x, s)  y = Exp(t) }}",
        f"(float[1] x) => (float[a,b] y) <int64[2] s = {{{HUGE},8}}> {{ t = ConstantOfShape(s)  y = Add(t, x) }}",
        f"(float[1] x) => (float[a] y) <int64 l = {{{HUGE}}}, int64 z = {{0}}, int64 o = {{1}}> "
        "{ r = Range(z, l, o)  f = Cast<to = 1>(r)  y = Add(f, x) }",
        f"(int64[4] x, float[2] v) => (float[a,b] y) <int64 d = {{{HUGE}}}> {{ y = OneHot(x, d, v) }}",
        f"(float[1,1,4,4] x) => (float[a,b,c,d] y) <int64[4] s = {{1,1,{HUGE},{HUGE}}}> {{ y = Resize(x, , , s) }}",
        f"(float[1,1,4,4] x) => (float[a,b,c,d] y) {{ y = MaxPool<kernel_shape = [{HUGE},{HUGE}]>(x) }}",
        f"(float[1,1,4,4] x) => (float[a,b,c,d] y) {{ y = AveragePool<kernel_shape = [2,2], pads = "
        f"[1,1,1,1], strides = [{HUGE},{HUGE}]>(x) }}",
        f"(float[1,{HUGE},1,1] x) => (float[a,b,c,d] y) {{ y = DepthToSpace<blocksize = {1 << 31}>(x) }}",
    ],
)
def test_sizes_nobody_can_hold(text):
    """The model is refused, or goes through without anything of that size having been made."""
    try:
        bundle = onnxfuse.optimize(node_model(text), verify=False)
    except UsageError:
        return
    assert bundle.model.ByteSize() < 1 << 20


@pytest.mark.parametrize(
    "text",
    [
        f"(float[4] x) => (float[a] y) <int64[1] r = {{{HUGE}}}> {{ y = Tile(x, r) }}",  # 2**64 elements are not 0
        f"(float[4,{HUGE}] x) => (float[a] y) <int64[1] k = {{-1}}> {{ y = Reshape(x, k) }}",
        f"(float[4,{HUGE},N] x) => (float[a,b] y) {{ y = Flatten<axis = 2>(x) }}",
    ],
)
def test_sizes_do_not_wrap_around(text):
    (left,) = inspect_all(onnxfuse.optimize(node_model(text), verify=False).plans).left
    assert left.code == "UN_MISFIT"
    assert "18446744073709551616 is out of the range of a dimension" in left.why


def test_dimensions_of_a_tensor_whose_product_overflows():
    model = node_model("(float[4] x) => (float[4] y) { y = Add(x, w) }")
    model.graph.initializer.append(TensorProto(name="w", data_type=1, dims=[1 << 40, 1 << 40], raw_data=b""))
    with pytest.raises(UsageError, match="E_TENSOR"):
        onnxfuse.optimize(model, verify=False)


@pytest.mark.parametrize(
    "text",
    [
        f"(float[4] x) => (float[a] y) {{ y = Sum({', '.join(['x'] * 1000)}) }}",
        f"(float[4] x) => (float[a] y) {{ y = Concat<axis = 0>({', '.join(['x'] * 1000)}) }}",
        f"(float[4] x, float[4] z) => (float[a] y) {{ y = Concat<axis = 0>({', '.join(['x', 'z'] * 500)}) }}",
        "(float[1,1,300,300] x) => (float[a,b,c,d] y) { y = MaxPool<kernel_shape = [200,200]>(x) }",
        "(float[2,2,2,2,2,2,2,2,2,2,2,2] x) => (float[a] y) <int64[1] k = {-1}> "
        "{ t = Transpose(x)  e = Exp(t)  y = Reshape(e, k) }",
    ],
    ids=["sum", "concat", "concat of two", "window", "axes"],
)
def test_code_stays_small(text):
    """What would be much code is a loop, or stays with the runtime with a reason."""
    bundle = onnxfuse.optimize(node_model(text), verify=False)
    assert bundle.library is None or len(bundle.library.image) < 1 << 20
    assert bundle.library is not None or bundle.plans.refused or bundle.partition.left


# ---- what arrives at run time


@pytest.mark.parametrize("bad", [3, -4, 1 << 62, -(1 << 63)])
@pytest.mark.parametrize(
    "text",
    [
        "(float[N,4] x, int64[M] i) => (float[a,b] y) { t = Exp(x)  y = Gather(t, i) }",
        "(float[N,4] x, int64[M] i) => (float[a,b] y) "
        "{ t = Gather(x, i)  m = ReduceMean<axes = [1]>(t)  y = Sub(t, m) }",
        "(float[3,4] x, int64[M] i) => (float[a,b] y) <int64[2] s = {1, -1}> "
        "{ r = Reshape(i, s)  t = GatherElements(x, r)  y = Exp(t) }",
        "(float[3,4] x, int64[M] i) => (float[a,b] y) <int64[2] s = {-1, 1}> "
        "{ r = Reshape(i, s)  t = GatherND(x, r)  y = Exp(t) }",
        "(float[3,4] x, int64[2] i) => (float[a,b] y) <int64[2] s = {-1, 1}, float[2,4] u = {0,0,0,0, 0,0,0,0}> "
        "{ r = Reshape(i, s)  y = ScatterND(x, r, u) }",
    ],
    ids=["gather", "gather in a chain", "elements", "slices", "scatter"],
)
def test_an_index_out_of_range_is_refused_and_reads_nothing(tmp_path, text, bad):
    written = onnxfuse.optimize(node_model(text), verify=False).save(tmp_path / "out.onnx")
    feeds = {"x": np.zeros((3, 4), np.float32), "i": np.array([0, bad])}
    for libraries in ([], [written.library] if written.library else []):
        session = ort.session(written.model, libraries=libraries)
        with pytest.raises(ort.ORT_ERRORS, match=r"out of data bounds|[Oo]ut of range|invalid ind"):
            ort.run(session, feeds)


@pytest.mark.parametrize("op", ["Conv", "MaxPool", "AveragePool", "ConvTranspose"])
@pytest.mark.parametrize(
    "attr",
    [
        "strides = [0,0]", "strides = [-1,-1]", "dilations = [-1,-1]", f"dilations = [{HUGE},{HUGE}]",
        "pads = [-1,-1,-1,-1]", "kernel_shape = [0,0]", "kernel_shape = [3,3]",
    ],
)  # fmt: skip
def test_no_kernel_is_made_of_windows_that_leave_their_input(op, attr):
    pool = "Pool" in op
    if pool and attr == "kernel_shape = [3,3]":
        pytest.skip("a pool has no weight it could contradict")
    attrs = attr if not pool or "kernel" in attr else f"kernel_shape = [2,2], {attr}"
    weight = "" if pool else ", w"
    model = node_model(
        f"(float[1,2,5,5] x, float[2,2,2,2] w) => (float[a,b,c,d] y) {{ y = {op}<{attrs}>(x{weight}) }}", 19
    )
    bundle = onnxfuse.optimize(model, verify=False)
    assert [n.code for n in inspect_all(bundle.plans).left] == ["UN_ATTR"]
    assert not bundle.plans.plans
