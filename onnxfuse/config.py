"""Configuration: frozen records. Every threshold: default, unit, origin."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn

from onnxfuse.errors import UsageError


class _Choice(StrEnum):
    """One of a few words; another is the caller's mistake."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        what = f"{cls._called()} {value!r} does not exist"
        raise UsageError("E_FLAG", what, hint=f"one of: {', '.join(cls)}")

    @classmethod
    def _called(cls) -> str:
        """`fusion mode`: the class's name in words."""
        return re.sub("(?<=.)([A-Z])", r" \1", cls.__name__).lower()


class FusionMode(_Choice):
    """none: one op per group; tvm: stage A with node-kind edges; canfuse: A + B; full: A + B + C + D."""

    NONE = "none"
    TVM = "tvm"
    CANFUSE = "canfuse"
    FULL = "full"


class Precision(_Choice):
    """f32: as in the model; bf16: constant factors of products bound by reading them are rounded to bf16."""

    F32 = "f32"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class FusionConfig:
    """Thresholds of the fusion. Numbers from FUSION.md section 4 unless an origin is named."""

    mode: FusionMode = FusionMode.FULL
    max_nodes: int = 64  # atomic nodes per group; Ascend CanFuse and Inductor use 64 (an anchor group gets one more)
    max_nodes_tvm: int = 256  # TVM relax.FuseOps.max_depth
    max_inputs: int = 16  # external inputs per group
    max_outputs: int = 8  # outputs per group
    max_reduces: int = 5  # reductions per group; XLA CPU (LLVM compile time)
    min_saved_bytes: int = 64  # bytes a vertical merge must save
    local_budget: int = 256 * 1024  # bytes of private buffers per outer iteration: half an L2
    tail_columns: int = 1024  # columns of a product whose row program runs with it, at most: a block stays in L2
    tail_least: int = 512  # columns, at least: shorter rows gain less than the coarser tasks lose (measured)
    tail_depth: int = 768  # products summed, at most: deeper ones read their weights too often (measured)
    prologue_cost: int = 8  # of the steps on an operand of a product, per element: a tile has that much to spare
    prologue_rows: int = 17  # rows of a product from which its tiles share what one of them reads of an operand
    join_rows: int = 8  # the same where the operand is only put together from several values, which costs nothing
    rounds: int = 10  # merge rounds; Ascend and Inductor
    candidate_window: int = 64  # neighbours tried per value; Inductor
    max_sibling_nodes: int = 16  # atomic nodes of a group formed by a horizontal pair; Inductor's CPU backend
    sibling_window: int = 8  # siblings tried per reader of a value: as many as a group may have outputs
    span: int = 64  # groups between the two of a horizontal pair, in the order of execution; Inductor
    peak_memory: int = 13 << 30  # bytes of the outputs of a horizontal pair; Ascend CanFuse
    cycle_window: int = 8192  # groups visited by one cycle test
    skip: frozenset[str] = frozenset()  # rule codes switched off (--skip-fusion-patterns)
    keep: frozenset[str] = frozenset()  # node names that stay alone (--keep)


# Simplifications that can be left out, in the order they run (frontend/prepare.py).
PASSES = (
    "dead_code", "fold", "identity", "view_chains", "pad_into_conv", "bn_into_conv", "conv_before_resize", "cse",
    "affine", "integers", "concat_by_reader",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PrepareConfig:
    """Simplification before fusion."""

    fold_growth: int = 1 << 20  # bytes: a folded constant may exceed the inputs it frees by this much
    fold_total: int = 1 << 28  # bytes: all folded constants of a graph together may, by this much
    skip: frozenset[str] = frozenset()  # of PASSES

    def __post_init__(self) -> None:
        """Raises UsageError E_FLAG when a name in `skip` is none of PASSES."""
        if self.skip - set(PASSES):
            what = f"no simplification {min(self.skip - set(PASSES))!r}"
            raise UsageError("E_FLAG", what, hint=f"one of: {', '.join(sorted(PASSES))}")


@dataclass(frozen=True, slots=True)
class VerifyConfig:
    """Numeric check against onnxruntime at ORT_DISABLE_ALL."""

    enabled: bool = True
    runs: int = 1  # random input sets per sampled shape
    seed: int = 0
    rtol: float | None = None  # None: from the dtype (verify/values.py)
    atol: float | None = None
    shapes: int = 3  # distinct input shapes tried when the model has dynamic dimensions
    output_rtol: dict[str, float] = field(default_factory=dict)  # per output name; wins over rtol
    output_atol: dict[str, float] = field(default_factory=dict)
    allow_mismatches: dict[str, int] = field(default_factory=dict)  # elements that may differ; "" = any output
    input_data: str | tuple[str, ...] | None = None  # .npz, directory, test_data_set_*, name:file.npy
    test_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    val_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)  # per input name; "" = every input
    precision: Precision = Precision.F32  # of the candidate's weights: decides on the tolerance of f32 outputs
    speed: float = 0.0  # seconds of timing the result against the original once it agrees; 0: none
    whole: int = 1 << 29  # bytes: a model with more weights runs in parts, one session after another
    part: int = 1 << 28  # bytes of weights of one part, unless a single node has more


@dataclass(frozen=True, slots=True)
class Config:
    """Everything `optimize` can be told."""

    fusion: FusionConfig = FusionConfig()
    prepare: PrepareConfig = PrepareConfig()
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    target: str = "native"
    overwrite_input_shape: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    dim_params: dict[str, int] = field(default_factory=dict)
    save_as_external_data: bool = False
    include_subgraph: bool = False  # optimize bodies of control flow too
    strict: bool = False  # a refusal to compile is an error
    exact_conv: bool = False  # no Winograd: convolutions are plain sums of products
    precision: Precision = Precision.F32
    keep_llvm: bool = False
    tune: bool = False  # measure the kernels here and give those that lose back to onnxruntime
    custom_op_libraries: tuple[str, ...] = ()  # of the custom ops the model itself uses, to run it
    cache: bool = True  # kernels compiled before are taken from the disk
