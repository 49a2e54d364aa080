"""onnxfuse behind ONNX's own interface for backends (onnx.backend.base), on the CPU.

    import onnxfuse.backend
    rep = onnxfuse.backend.prepare(model, "CPU", fusion_mode="full")     # any keyword of onnxfuse.optimize
    outputs = rep.run([x, y])                                            # or a dict by name; outputs in order

The model is optimized (without the numeric check: callers of this interface compare by themselves) and runs in
onnxruntime with the library. A model that onnxruntime itself refuses raises BackendIsNotSupposedToImplementIt.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import defs, helper
from onnx.backend.base import Backend, BackendRep

from onnxfuse.api import optimize
from onnxfuse.errors import UsageError
from onnxfuse.verify import ort

if TYPE_CHECKING:
    import onnxruntime


class OnnxfuseRep(BackendRep):
    """A model ready to run. Its folder, with the library, lives as long as this does."""

    def __init__(self, session: onnxruntime.InferenceSession, home: str) -> None:
        self.session = session
        weakref.finalize(self, shutil.rmtree, home, ignore_errors=True)

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """All outputs, in order. `inputs`: arrays in the order of the model's inputs, or by name."""
        return tuple(ort.run(self.session, self._feeds(inputs)).values())

    def _feeds(self, inputs: Any) -> dict[str, object]:
        """By name; an optional input that is None is left out."""
        if isinstance(inputs, Mapping):
            return dict(inputs)
        names = [i.name for i in self.session.get_inputs()]
        given = list(inputs) if isinstance(inputs, Sequence) and not isinstance(inputs, str) else [inputs]
        if len(given) > len(names):
            names += [i.name for i in self.session.get_overridable_initializers()]
        return {name: value for name, value in zip(names, given, strict=False) if value is not None}


class OnnxfuseBackend(Backend):
    """The backend; its methods are the module's functions."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Does onnxruntime, which runs what is not compiled, take the model?"""
        try:
            ort.session(model)
        except UsageError:
            return False
        return cls.supports_device(device)

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> OnnxfuseRep:
        """Optimize the model (`kwargs` as for onnxfuse.optimize) and load it in onnxruntime."""
        if not cls.supports_device(device):
            raise UsageError("E_DEVICE", f"device {device!r} is not supported", "only the CPU is")
        super().prepare(model, device)
        home = tempfile.mkdtemp(prefix="onnxfuse-")
        try:
            return OnnxfuseRep(_session(model, Path(home) / "model.onnx", kwargs), home)
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)
            raise

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one operator. `outputs_info` (dtype and shape of each output) is not needed.

        `opset_version` among the kwargs is the opset of its default domain; the newest if absent.
        """
        opset = kwargs.pop("opset_version", None)
        super().run_node(node, inputs, device, outputs_info, **({} if opset is None else {"opset_version": opset}))
        given = list(inputs) if isinstance(inputs, Sequence) else [inputs]
        arrays = {n: np.asarray(v) for n, v in zip(filter(None, node.input), given, strict=True)}
        infos = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for n, v in arrays.items()
        ]
        outputs = [onnx.ValueInfoProto(name=n) for n in node.output if n]
        graph = helper.make_graph([node], "node", infos, outputs)
        version = opset or defs.onnx_opset_version()
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=_IR)
        return cls.run_model(onnx.shape_inference.infer_shapes(model), arrays, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Only the CPU, with or without a number."""
        return device.partition(":")[0] == "CPU"


_IR = 8  # of models made here; every supported onnxruntime reads it


def _session(model: onnx.ModelProto, path: Path, options: Mapping[str, Any]) -> onnxruntime.InferenceSession:
    optimize(model, verify=False, **options).save(path)
    library = path.with_suffix(".so")
    try:
        return ort.session(path, level=ort.Level.ALL, libraries=[library] if library.exists() else [])
    except UsageError as error:
        _blame(model, error)
        raise


def _blame(model: onnx.ModelProto, error: UsageError) -> None:
    """Raise BackendIsNotSupposedToImplementIt when onnxruntime does not take the original model either."""
    from onnx.backend.test.runner import BackendIsNotSupposedToImplementIt  # test machinery: only when it is needed

    try:
        ort.session(model)
    except UsageError as plain:
        raise BackendIsNotSupposedToImplementIt(f"onnxruntime: {plain.why}") from error


is_compatible = OnnxfuseBackend.is_compatible
prepare = OnnxfuseBackend.prepare
run = OnnxfuseBackend.run_model
run_model = OnnxfuseBackend.run_model
run_node = OnnxfuseBackend.run_node
supports_device = OnnxfuseBackend.supports_device
