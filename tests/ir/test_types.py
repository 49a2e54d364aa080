import numpy as np
import pytest

from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import sym
from onnxfuse.ir.simplify import same
from onnxfuse.ir.types import tensor

N = sym("N")
COMPUTABLE = [d for d in DType if d.computable]


def test_types_print_as_in_the_grammar():
    assert str(tensor(DType.F32, (1, N, 256))) == "f32[1,N,256]"
    assert str(tensor(DType.BOOL, ())) == "bool[]"
    assert str(tensor(DType.I64, (N * 2 + 1,))) == "i64[N * 2 + 1]"


def test_types_compare_by_value_with_dims_in_normal_form():
    assert tensor(DType.F32, ((N + 2 - 3) // 1 + 1,)) == tensor(DType.F32, (N,))
    assert tensor(DType.F32, (N,)) != tensor(DType.F16, (N,))
    assert tensor(DType.F32, (N,)) != tensor(DType.F32, (N + 1,))
    assert len({tensor(DType.F32, (N, 2)), tensor(DType.F32, (N, 2))}) == 1


def test_size_and_static():
    assert tensor(DType.F32, (3, 4)).size == 12
    assert tensor(DType.F32, ()).size == 1
    assert tensor(DType.F32, (3, 4)).static
    assert not tensor(DType.F32, (N, 4)).static
    assert same(tensor(DType.F32, (N, 4)).size, N * 4)


@pytest.mark.parametrize("dtype", COMPUTABLE, ids=str)
def test_element_types_go_through_numpy_and_onnx(dtype):
    assert DType.from_numpy(dtype.numpy) is dtype
    assert DType.from_onnx(dtype.onnx) is dtype
    assert np.zeros(3, dtype.numpy).nbytes == 3 * dtype.bytes
    assert dtype.compute.computable
    assert dtype.is_float + dtype.is_int + (dtype is DType.BOOL) == 1


def test_every_element_type_has_its_own_onnx_code():
    assert len({d.onnx for d in DType}) == len(DType)
    assert DType.from_onnx(0) is None
