"""Make a model that shows a fault as small as it gets. (model, feeds, still_fails) -> (model, feeds), and a test of it.

Greedy, in rounds, until nothing helps: fewer outputs, nodes cut off (their result becomes an input), nodes replaced by
one of their inputs, attributes dropped, initializers and inputs smaller, dimensions smaller, numbers plainer. Whatever
onnxruntime then refuses does not fail in the same way, so no candidate has to be valid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnx.printer
from fuzz_graph import REFUSALS
from fuzz_parts import alone
from onnx import helper, numpy_helper

Feeds = Mapping[str, np.ndarray]
Case = tuple[onnx.ModelProto, Feeds]
Fails = Callable[[onnx.ModelProto, Feeds], bool]


def shrink(model: onnx.ModelProto, feeds: Feeds, fails: Fails, seconds: float = 90.0) -> Case:
    """The smallest case found in that time."""
    end = time.monotonic() + seconds
    best: Case = (model, feeds)
    better = True
    while better:
        better = False
        for step in (_fewer_outputs, _cut, _bypass, _untyped, _plainer_attributes, _smaller_dims, _plainer_numbers):
            again = True
            while again:
                again = False
                for candidate in step(*best):
                    if time.monotonic() > end:
                        return best
                    if fails(*candidate):
                        best, better, again = candidate, True, True
                        break
    return best


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    out = onnx.ModelProto()
    out.CopyFrom(model)
    return out


def _fed(model: onnx.ModelProto, feeds: Feeds) -> Case:
    return model, {i.name: feeds[i.name] for i in model.graph.input if i.name in feeds}


def _fewer_outputs(model: onnx.ModelProto, feeds: Feeds) -> Iterator[Case]:
    names = [o.name for o in model.graph.output]
    if len(names) > 1:
        for n in names:
            yield _fed(alone(model, [n]), feeds)
        for n in names:
            yield _fed(alone(model, [m for m in names if m != n]), feeds)
    elif len(alone(model, names).graph.node) < len(model.graph.node):
        yield _fed(alone(model, names), feeds)


def _values(model: onnx.ModelProto, feeds: Feeds) -> dict[str, np.ndarray]:
    """Every value of the main graph, by onnxruntime."""
    from onnxfuse.verify import ort

    whole = _copy(model)
    there = {o.name for o in whole.graph.output}
    for name in {o for n in whole.graph.node for o in n.output if o} - there:
        whole.graph.output.append(onnx.ValueInfoProto(name=name))
    try:
        made = ort.run(ort.session(whole), feeds)
    except REFUSALS:
        return {}
    return {k: v for k, v in made.items() if isinstance(v, np.ndarray) and v.dtype.kind != "O"}


def _cut(model: onnx.ModelProto, feeds: Feeds) -> Iterator[Case]:
    """A node goes, its results are inputs of the same data; the last nodes: their operands become outputs."""
    values = _values(model, feeds)
    for k, node in enumerate(model.graph.node):
        made = [o for o in node.output if o]
        if all(o in values for o in made):
            small = _copy(model)
            del small.graph.node[k]
            outs = {o.name for o in small.graph.output}
            if outs & set(made):
                if len(outs) == 1 and len(node.input):
                    yield from _output_before(model, feeds, k, values)
                continue
            for o in made:
                shape: list[int | str] = [f"{o}_d{j}" for j in range(values[o].ndim)]
                kind = helper.np_dtype_to_tensor_dtype(values[o].dtype)
                small.graph.input.append(helper.make_tensor_value_info(o, kind, shape))
            small = alone(small, [o.name for o in small.graph.output])
            yield _fed(small, {**feeds, **values})


def _output_before(model: onnx.ModelProto, feeds: Feeds, k: int, values: Feeds) -> Iterator[Case]:
    for i in dict.fromkeys(model.graph.node[k].input):
        if i not in values:
            continue
        small = _copy(model)
        del small.graph.output[:]
        kind = helper.np_dtype_to_tensor_dtype(values[i].dtype)
        small.graph.output.append(helper.make_tensor_value_info(i, kind, [f"{i}_{d}" for d in range(values[i].ndim)]))
        yield _fed(alone(small, [i]), feeds)


def _bypass(model: onnx.ModelProto, feeds: Feeds) -> Iterator[Case]:
    """What read a node's result reads one of its inputs."""
    for k, node in enumerate(model.graph.node):
        if not node.output or node.output[0] in {o.name for o in model.graph.output}:
            continue
        for i in dict.fromkeys(n for n in node.input if n):
            small = _copy(model)
            for reader in small.graph.node:
                reader.input[:] = [i if n == node.output[0] else n for n in reader.input]
            del small.graph.node[k]
            yield _fed(alone(small, [o.name for o in small.graph.output]), feeds)


def _untyped(model: onnx.ModelProto, feeds: Feeds) -> Iterator[Case]:
    """Names of nodes and sizes of outputs go; free dimensions of inputs become fixed."""
    for what in ("names", "dims"):
        small = _copy(model)
        changed = False
        if what == "names":
            for node in small.graph.node:
                changed |= bool(node.name)
                node.name = ""
        else:
            for info in small.graph.input:
                for d, n in zip(info.type.tensor_type.shape.dim, feeds[info.name].shape, strict=True):
                    changed |= d.dim_value != n or bool(d.dim_param)
                    d.dim_value = n
        if changed:
            yield small, feeds


def _plainer_attributes(model: onnx.ModelProto, feeds: Feeds) -> Iterator[Case]:
    for k, node in enumerate(model.graph.node):
        for a in range(len(node.attribute)):
            small = _copy(model)
            del small.graph.node[k].attribute[a]
            yield small, feeds
    for t in model.graph.initializer:  # an initializer as an input, or a smaller one
        array = numpy_helper.to_array(t)
        for plain in _plain(array):
            small = _copy(model)
            for s in small.graph.initializer:
                if s.name == t.name:
                    s.CopyFrom(numpy_helper.from_array(plain, t.name))
            yield small, feeds


def _smaller_dims(model: onnx.ModelProto, feeds: Feeds) -> Iterator[Case]:
    """One extent smaller wherever it stands: in inputs, in initializers' shapes."""
    arrays = dict(feeds) | {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    extents = sorted({n for a in arrays.values() for n in a.shape if n > 1}, reverse=True)
    for n in extents:
        for to in dict.fromkeys((1, 2, n // 2, n - 1)):
            if 0 < to < n:
                yield _resized(model, feeds, arrays, n, to, None)
                for name in arrays:
                    if n in arrays[name].shape:
                        yield _resized(model, feeds, arrays, n, to, name)


def _resized(
    model: onnx.ModelProto, feeds: Feeds, arrays: Mapping[str, np.ndarray], n: int, to: int, only: str | None
) -> Case:
    small = _copy(model)
    new = dict(feeds)
    for name, a in arrays.items():
        if n not in a.shape or (only is not None and name != only):
            continue
        cut = np.ascontiguousarray(a[tuple(slice(0, to) if d == n else slice(None) for d in a.shape)])
        if name in feeds:
            new[name] = cut
            for info in small.graph.input:
                if info.name == name:
                    for d in info.type.tensor_type.shape.dim:
                        if d.dim_value == n:
                            d.dim_value = to
        else:
            for t in small.graph.initializer:
                if t.name == name:
                    t.CopyFrom(numpy_helper.from_array(cut, name))
    for o in small.graph.output:
        for d, dim in enumerate(o.type.tensor_type.shape.dim):
            if dim.HasField("dim_value"):
                dim.dim_param = f"{o.name}_{d}"
    return small, new


def _plain(a: np.ndarray) -> Iterator[np.ndarray]:
    """The same shape with less in it."""
    if not a.size:
        return
    one = np.ones_like(a)
    if a.dtype.kind in "iub" or a.dtype.itemsize == 0:
        if a.dtype.kind != "b" and not (a == one).all() and a.size > 8:
            yield one
        return
    if not (a == one).all():
        yield one
    with np.errstate(all="ignore"):
        rounded = np.asarray(np.round(a.astype(np.float64), 1)).astype(a.dtype)
    if rounded.tobytes() != a.tobytes():
        yield rounded


def _plainer_numbers(model: onnx.ModelProto, feeds: Feeds) -> Iterator[Case]:
    for name, a in feeds.items():
        if a.dtype.kind == "i" and a.size and not (a == 1).all():
            yield model, {**feeds, name: np.ones_like(a)}
        for plain in _plain(a):
            yield model, {**feeds, name: plain}


# --- as a test -----------------------------------------------------------------------------------------------------
def as_test(model: onnx.ModelProto, feeds: Feeds, name: str, mode: str, remark: str) -> str:
    """A test function for tests/fuzz/test_found.py."""
    text = onnx.printer.to_text(model)
    try:
        onnx.parser.parse_model(text)
    except onnx.parser.ParseError as error:
        text = f"(onnx cannot read its own text: {' '.join(str(error).split())[:200]})\n{text}"
    lines = "\n".join("    " + line for line in text.strip().splitlines())
    given = ", ".join(f'"{k}": {literal(v)}' for k, v in feeds.items())
    head = f"def test_{name}(tmp_path: Path) -> None:\n    # {remark} (mode {mode})"
    call = f"    agrees(tmp_path, onnx.parser.parse_model(text), {{{given}}})"
    return f'{head}\n    text = """\n{lines}\n    """\n{call}\n'


def literal(a: np.ndarray) -> str:
    """An array as Python source."""
    dtype = "ml_dtypes.bfloat16" if a.dtype == ml_dtypes.bfloat16 else f"np.{a.dtype.name.replace('bool', 'bool_')}"
    if a.size > 1 and a.dtype.kind in "fiu" and len({x.tobytes() for x in a.reshape(-1)}) == 1:
        return f"np.full({a.shape}, {_number(a.reshape(-1)[0])}, {dtype})"
    if not a.size:
        return f"np.zeros({a.shape}, {dtype})"
    body = str([_number(x) for x in a.reshape(-1)]).replace("'", "")
    flat = f"np.array({body}, {dtype})"
    return flat if a.ndim == 1 else f"{flat}.reshape({a.shape})"


def _number(x: object) -> str:
    text = repr(x.item() if hasattr(x, "item") else x)
    if text in ("nan", "inf", "-inf"):
        return text.replace("nan", "np.nan").replace("inf", "np.inf")
    return text
