"""The cases of onnx.backend.test, by suite, with their data.

node       one case per behaviour of an operator, made by onnx at run time
simple     pytorch-converted  pytorch-operator     small models in the onnx wheel, each with test_data_set_*
light      networks in the onnx wheel whose weights are constants, with their expected outputs
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

SUITES = ("node", "simple", "light", "pytorch-converted", "pytorch-operator")
_HOME = Path(onnx.__file__).parent.parent


def cases(suites: tuple[str, ...], text: str = "", limit: int = 0) -> list[TestCase]:
    """The cases whose name contains `text`, suite after suite; the models of files are not read yet."""
    found: list[TestCase] = []
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # the cases overflow on purpose
        for suite in suites:
            made = load_model_tests(kind="real" if suite == "light" else suite)
            found += [c for c in made if text in c.name and (suite != "light" or "/light/" in (c.url or ""))]
    return found[:limit] if limit else found


def loaded(case: TestCase) -> TestCase:
    """The case with its model and data."""
    if case.model is not None:
        return case
    if case.model_dir is None:
        return _light(case)
    folder = Path(case.model_dir)
    model = onnx.load(folder / "model.onnx")
    sets = [
        (_files(d, "input", model.graph.input), _files(d, "output", model.graph.output))
        for d in sorted(folder.glob("test_data_set*"))
    ]
    return dataclasses.replace(case, model=model, data_sets=sets)


def _files(folder: Path, kind: str, infos: Any) -> list[Any]:
    count = len(list(folder.glob(f"{kind}_*.pb")))
    return [_value(folder / f"{kind}_{i}.pb", infos[i].type) for i in range(count)]


def _value(path: Path, kind: onnx.TypeProto) -> Any:
    data = path.read_bytes()
    if kind.HasField("sequence_type"):
        return onnx.numpy_helper.to_list(onnx.SequenceProto.FromString(data))
    if kind.HasField("optional_type"):
        return onnx.numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
    return onnx.numpy_helper.to_array(onnx.TensorProto.FromString(data))


def model_of(case: TestCase) -> onnx.ModelProto:
    """The model of a loaded case."""
    assert case.model is not None, case.name
    return case.model


def data_of(case: TestCase) -> Sequence[tuple[Sequence[Any], Sequence[Any]]]:
    """(inputs, outputs) of a loaded case."""
    assert case.data_sets is not None, case.name
    return case.data_sets


def _light(case: TestCase) -> TestCase:
    """A network of the wheel, on the input onnx's own runner makes."""
    path = _HOME / str(case.url)
    model = onnx.load(path)
    weights = {t.name for t in model.graph.initializer}
    given = [Runner.generate_dummy_data(i, name=case.name) for i in model.graph.input if i.name not in weights]
    expected = [
        onnx.numpy_helper.to_array(
            onnx.TensorProto.FromString(Path(f"{path.with_suffix('')}_output_{k}.pb").read_bytes())
        )
        for k in range(len(model.graph.output))
    ]
    return dataclasses.replace(case, model=model, data_sets=[(given, expected)])


def freeze(case: TestCase) -> TestCase:
    """The case with every input but the first as an initializer; as it is where that cannot be said."""
    if len(data_of(case)) != 1 or model_of(case).ir_version < 4:
        return case
    given, expected = data_of(case)[0]
    model = onnx.ModelProto()
    model.CopyFrom(model_of(case))
    fed: list[Any] = []
    kept: list[onnx.ValueInfoProto] = []
    for info, value in zip(model.graph.input, given, strict=False):
        array = plain(value)
        if kept and isinstance(array, np.ndarray) and info.type.HasField("tensor_type"):
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, info.name))
            continue
        kept.append(onnx.ValueInfoProto.FromString(info.SerializeToString()))
        fed.append(value)
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return dataclasses.replace(case, model=model, data_sets=[(fed, expected)])


def plain(value: object) -> object:
    """A value of a case as onnxruntime wants it: arrays, and lists of them."""
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    if isinstance(value, list):
        return [plain(v) for v in value]
    return np.asarray(value) if isinstance(value, np.generic) else value


def op(case: TestCase) -> str:
    """The op a case is about: its only node's, or of an expanded function the name in the case."""
    if case.model is None:
        return f"{case.kind} models"
    nodes = case.model.graph.node
    if len(nodes) == 1:
        return str(nodes[0].op_type)
    return "expanded functions" if "expanded" in case.name else "graphs of several nodes"
