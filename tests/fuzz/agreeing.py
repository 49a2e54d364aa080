"""What the tests of this folder share: models as text, and the promise that the optimized one computes the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser

import onnxfuse
from onnxfuse.config import FusionMode, VerifyConfig
from onnxfuse.verify import ort
from onnxfuse.verify.values import compare_results

Feeds = dict[str, np.ndarray]


def model(text: str, opset: int = 17) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')


def agrees(folder: Path, m: onnx.ModelProto, *feeds: Feeds) -> None:
    """At every mode, compiled (nothing is refused for a fault of ours), without and with the library."""
    plain = ort.session(m)
    expected = [ort.run(plain, f) for f in feeds]
    for mode in FusionMode:
        bundle = onnxfuse.optimize(m, fusion_mode=mode, verify=False)
        assert not [r for r in bundle.plans.refused.values() if r.code in ("UN_COMPILE", "UN_INTERNAL")]
        written = bundle.save(folder / f"{mode}.onnx")
        for libraries in ([], [written.library] if written.library else []):
            session = ort.session(written.model, libraries=libraries)
            for f, want in zip(feeds, expected, strict=True):
                reports = compare_results(want, ort.run(session, f), VerifyConfig())
                assert all(r.ok for r in reports), (mode, libraries, reports)


def by_kernels(folder: Path, m: onnx.ModelProto, feeds: Feeds) -> dict[str, ort.Result]:
    """What the library makes of it, whatever this onnxruntime would."""
    written = onnxfuse.optimize(m, verify=False).save(folder / "out.onnx")
    assert written.library is not None
    assert not {n.op_type for n in onnx.load(written.model).graph.node} & {n.op_type for n in m.graph.node}
    return ort.run(ort.session(written.model, libraries=[written.library]), feeds)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
