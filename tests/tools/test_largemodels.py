"""The models of tools/soak.py, in small: they are valid, distinct where they should be, and survive optimization."""

from collections import Counter

import largemodels
import numpy as np
import onnx
import onnxruntime

from onnxfuse import InferenceSession, optimize
from onnxfuse.emit import DOMAIN

X = {"x": np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)}


def agrees(path, model: onnx.ModelProto) -> bool:
    want = onnxruntime.InferenceSession(model.SerializeToString()).run(None, X)[0]
    bare = onnxruntime.InferenceSession(path).run(None, X)[0]
    return np.allclose(InferenceSession(path).run(None, X)[0], want, rtol=1e-4) and np.allclose(bare, want, rtol=1e-4)


def test_groups_of_distinct_structure_are_kernels_of_their_own(tmp_path):
    model = largemodels.groups(20)
    onnx.checker.check_model(model, full_check=True)
    bundle = optimize(model, verify=False)
    ours = Counter(n.op_type for n in bundle.model.graph.node if n.domain == DOMAIN)
    assert len(ours) == 21
    assert agrees(bundle.save(tmp_path / "g.onnx").model, model)


def test_equal_blocks_share_a_kernel_whatever_their_names(tmp_path):
    """Names longer than a file name may be: they are nowhere used as one."""
    model = largemodels.long(200, prefix="layer/" * 100)
    bundle = optimize(model, verify=False)
    ours = Counter(n.op_type for n in bundle.model.graph.node if n.domain == DOMAIN)
    assert len(ours) <= 5
    assert max(ours.values()) >= 18
    assert agrees(bundle.save(tmp_path / "l.onnx").model, model)


def test_the_big_model_in_small(tmp_path):
    largest = largemodels.big(tmp_path / "big.onnx", gib=0.01)
    bundle = optimize(tmp_path / "big.onnx")
    written = bundle.save(tmp_path / "out.onnx")
    assert largest > 3_000_000
    assert written.model.stat().st_size > 2 * largest
    assert any(n.domain == DOMAIN for n in bundle.model.graph.node)


def test_the_model_of_many_tensors_in_small(tmp_path):
    largest = largemodels.many(tmp_path / "many.onnx", gib=0.05)
    bundle = optimize(tmp_path / "many.onnx")
    assert largest == 16 << 20
    assert sum(n.domain == DOMAIN for n in bundle.model.graph.node) >= 3
