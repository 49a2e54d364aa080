"""A library is a function of its kernels: the same bytes each time; what does not compile is refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

from onnxfuse.codegen.generate import UN_COMPILE, generate
from onnxfuse.codegen.glue.layout import EXPORTS
from onnxfuse.codegen.object import dynamic_symbols
from onnxfuse.errors import CompileError
from onnxfuse.ir.dtypes import DType
from onnxfuse.ir.expr import apply, sym
from onnxfuse.ir.plan import Schedule
from onnxfuse.runtime.session import library_digest
from onnxfuse.target import by_name
from tests.codegen.tiny import Broken, model_of, native, plan_of, plans_of, pointwise, save, value

N = sym("N")


def kernel(name: str, plus: float = 0.0):
    x, z = value("x", DType.F32, N), value("z", DType.F32, N)
    return pointwise(name, [x], z, lambda a: apply("max", a + plus, 0.0))


def several(count: int):
    return plans_of(*(plan_of(kernel(f"k{i}", i)) for i in range(count)))


def test_same_bytes_whatever_the_workers():
    plans = several(4)
    first = generate(plans, native(), workers=0)
    again = generate(plans, native(), workers=0)
    side_by_side = generate(plans, native(), workers=2)
    assert first.image == again.image == side_by_side.image
    assert first.digest == side_by_side.digest


def test_digest_depends_on_code_schedule_and_target():
    digests = [
        generate(several(1), native()).digest,
        generate(plans_of(plan_of(kernel("k0", 7))), native()).digest,
        generate(plans_of(plan_of(kernel("k0"), Schedule("scalar", unroll=2))), native()).digest,
        generate(several(1), by_name("x86-64-v2")).digest,
    ]
    assert len(set(digests)) == len(digests)


def test_digest_is_in_the_file(tmp_path):
    lib = generate(several(1), native())
    path = tmp_path / "lib.so"
    path.write_bytes(lib.image)
    assert library_digest(path) == lib.digest


@pytest.mark.parametrize("at", ["emit", "llvm", "libm", "phase"])
def test_kernel_that_does_not_compile_is_refused_and_the_rest_stands(at, tmp_path):
    good = kernel("good")
    plans = plans_of(plan_of(kernel("bad"), template=Broken(at)), plan_of(good))
    lib = generate(plans, native())
    assert [p.kernel.name for p in lib.plans.plans] == ["good"]
    assert list(lib.plans.calls) == [1]
    assert lib.plans.refused[0].code == UN_COMPILE
    assert "kernel bad" in lib.plans.refused[0].why
    path = save(tmp_path, model_of(good, [helper.make_node("Relu", ["x"], ["z"])]), lib)
    so = ort.SessionOptions()
    so.register_custom_ops_library(str(path.with_suffix(".so")))
    s = ort.InferenceSession(str(path), so, providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(s.run(None, {"x": np.array([-1, 2], np.float32)})[0], [0, 2])


def test_strict_raises_with_kernel_and_nodes():
    plans = plans_of(plan_of(kernel("bad"), template=Broken("emit")))
    with pytest.raises(CompileError, match="kernel bad: this template never works") as caught:
        generate(plans, native(), strict=True)
    assert "nodes: bad_node" in caught.value.__notes__


def test_general_variant_has_its_own_symbols():
    plan = plan_of(kernel("k"), general=Schedule("scalar", unroll=2))
    lib = generate(plans_of(plan), native(), keep_llvm=True)
    for symbol in ("k.dims", "k.run.0", "k.general.run.0", "k.general.run.1"):
        assert f"@{symbol}(" in lib.llvm or f'@"{symbol}"(' in lib.llvm


def test_llvm_text_only_when_asked():
    assert generate(several(1), native()).llvm == ""
    assert "RegisterCustomOps" in generate(several(1), native(), keep_llvm=True).llvm


def test_library_without_kernels_is_valid():
    lib = generate(plans_of(), native())
    assert set(dynamic_symbols(lib.image)[0]) == set(EXPORTS)


@pytest.mark.parametrize("name", ["x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64"])
def test_every_target_gives_a_self_contained_library(name):
    lib = generate(several(1), by_name(name))
    defined, undefined = dynamic_symbols(lib.image)
    assert set(defined) == set(EXPORTS)
    assert undefined == ()


def test_awkward_names(tmp_path):
    name = "fused_Conv/1.λ 'x\\"
    k = replace(kernel(name), origin=("a/b", "ü" * 300, "x" * 3000))
    lib = generate(plans_of(plan_of(k)), native())
    assert set(dynamic_symbols(lib.image)[0]) == set(EXPORTS)
