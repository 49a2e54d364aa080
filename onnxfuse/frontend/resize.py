"""Symbolic dimensions made constant on request: --overwrite-input-shape and --dim-param.

The model's declared types are changed (inputs, and every place that names the same symbol), so that the optimized model
says what it accepts. An overwritten dimension that has a name sets that name everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import onnx

from onnxfuse.errors import UsageError

Shape = tuple[int | str, ...]


def override_shapes(
    proto: onnx.ModelProto, initializers: Collection[str], shapes: Mapping[str, Shape], params: Mapping[str, int]
) -> None:
    """Apply both options to `proto`; a request that does not fit the model is a UsageError."""
    fixed: dict[str, int] = {}
    infos = {i.name: i for i in proto.graph.input}
    for name, size in params.items():
        _set_symbol(fixed, name, _dim_param(proto, name, size), f"--dim-param {name}={size}")
    for name, shape in shapes.items():
        _overwrite(infos, initializers, name, shape, fixed)
    if fixed:
        for dim in _all_dims(proto):
            if dim.dim_param in fixed:
                dim.dim_value = fixed[dim.dim_param]


def _dim_param(proto: onnx.ModelProto, name: str, size: int) -> int:
    known = sorted({d.dim_param for i in proto.graph.input for d in _dims(i) if d.dim_param})
    if name not in known:
        raise UsageError(
            "E_DIM_PARAM",
            f"--dim-param {name}={size}: no input has a dimension {name!r}",
            f"symbolic dimensions of the inputs: {', '.join(known) or 'none'}",
        )
    if size < 1:
        raise UsageError("E_DIM_PARAM", f"--dim-param {name}={size}: a dimension is at least 1", f"got {size}")
    return size


def _overwrite(
    infos: Mapping[str, onnx.ValueInfoProto],
    initializers: Collection[str],
    name: str,
    shape: Shape,
    fixed: dict[str, int],
) -> None:
    flag = f"--overwrite-input-shape {name}:{','.join(map(str, shape))}"
    wanted = [n for n in infos if n not in initializers]
    if name not in infos or name in initializers:
        raise UsageError("E_INPUT_NAME", f"{flag}: no input is called {name!r}", f"inputs: {', '.join(wanted)}")
    info = infos[name]
    if info.type.WhichOneof("value") != "tensor_type":
        raise UsageError("E_INPUT_SHAPE", f"{flag}: input {name!r} is not a tensor")
    bad = [d for d in shape if isinstance(d, int) and d < 1]
    if bad:
        raise UsageError(
            "E_INPUT_SHAPE",
            f"{flag}: a dimension is at least 1",
            f"got {bad[0]}",
            "to keep a dimension dynamic write its name",
        )
    declared = info.type.tensor_type
    if not declared.HasField("shape"):
        for _ in shape:
            declared.shape.dim.add()
    if len(declared.shape.dim) != len(shape):
        raise UsageError(
            "E_INPUT_SHAPE",
            f"{flag}: input {name!r} has another rank",
            f"it has {len(declared.shape.dim)} dimensions, {len(shape)} were given",
        )
    for axis, (dim, new) in enumerate(zip(declared.shape.dim, shape, strict=True)):
        _overwrite_dim(dim, new, fixed, f"{flag}: axis {axis}")


def _overwrite_dim(dim: onnx.TensorShapeProto.Dimension, new: int | str, fixed: dict[str, int], what: str) -> None:
    if isinstance(new, str):
        if dim.WhichOneof("value") == "dim_value" and dim.dim_value >= 0:
            raise UsageError("E_INPUT_SHAPE", f"{what} is {dim.dim_value} in the model and cannot become {new!r}")
        dim.dim_param = new
        return
    if dim.WhichOneof("value") == "dim_value" and dim.dim_value >= 0 and dim.dim_value != new:
        raise UsageError("E_INPUT_SHAPE", f"{what} is fixed in the model", f"it is {dim.dim_value}, {new} was given")
    if dim.dim_param not in ("", "?"):  # "?" is a placeholder, not one symbol
        _set_symbol(fixed, dim.dim_param, new, what)
    else:
        dim.dim_value = new


def _set_symbol(fixed: dict[str, int], name: str, size: int, what: str) -> None:
    if fixed.setdefault(name, size) != size:
        raise UsageError("E_INPUT_SHAPE", f"{what}: dimension {name!r} gets two sizes", f"{fixed[name]} and {size}")


def _dims(info: onnx.ValueInfoProto) -> Iterator[onnx.TensorShapeProto.Dimension]:
    if info.type.WhichOneof("value") == "tensor_type":
        yield from info.type.tensor_type.shape.dim


def _all_dims(proto: onnx.ModelProto) -> Iterator[onnx.TensorShapeProto.Dimension]:
    for info in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        yield from _dims(info)
