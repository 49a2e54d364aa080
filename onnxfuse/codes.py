"""Every code onnxfuse gives as a reason: one literal catalogue (tests/test_codes.py keeps it complete).

Codes are stable API: `explain`, `inspect --json` and error messages carry them. A new code is one record here.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True, slots=True)
class Code:
    """One code.

    stage      who gives it (`STAGES`)
    meaning    one line, of the pair or node it is given for
    threshold  what the numbers are held against: a field of FusionConfig or PrepareConfig (`fusion.max_nodes`,
               `prepare.fold_growth`) or a constant (`fuse.rules:SERIAL_POINTS`); "" when there is no number
    origin     where the rule comes from
    said       the numbers of a refusal as a sentence, e.g. `nodes {nodes} > {cap}`; "" = name=value each
    optional   may be left out with --skip-fusion-patterns
    """

    code: str
    stage: str
    meaning: str
    threshold: str = ""
    origin: str = ""
    said: str = ""
    optional: bool = False


# In the order of the pipeline; what a stage is, for the tables of `onnxfuse rules`.
STAGES: dict[str, str] = {
    "prepare": "notes of the simplifications: what could have been expected and was not done",
    "lower": "why a node stays with onnxruntime",
    "A": "post-dominator grouping",
    "B": "pairwise growth of groups",
    "C": "groups that read the same value (codes of stage B as well)",
    "kernelize": "one kernel for one group",
    "plan": "a template for a kernel",
    "generate": "machine code for a kernel",
    "tune": "measured on this machine (--tune)",
    "error": "what the caller can fix, or the machine",
    "verify": "the result against onnxruntime",
    "check": "a check of onnxfuse's own data failed: a bug to report",
}

_TVM = "TVM FuseOps"
_ASCEND = "Ascend CanFuse"
_OURS = "onnxfuse"

CODES: tuple[Code, ...] = (
    # -- prepare
    Code(
        "FOLD_GROWTH",
        "prepare",
        "the folded constant would be larger than what it replaces (all together by `fold_total`)",
        "prepare.fold_growth",
    ),
    Code("FOLD_SIZE", "prepare", "not folded: the size of the result is not known"),
    Code("FOLD_DIVISOR", "prepare", "not folded: an integer division by zero, or the smallest integer by -1"),
    Code("FOLD_EVALUATE", "prepare", "not folded: onnxruntime did not compute the node"),
    Code("BN_KEPT", "prepare", "a BatchNormalization did not go into the weights before it"),
    Code("DQ_KEPT", "prepare", "a product of dequantised bytes did not become one of integers"),
    # -- lower
    Code("UN_OPAQUE", "lower", "the operator is never fused, or is not in the op table (`onnxfuse ops`)"),
    Code("UN_QUANTISED", "lower", "the model is quantised here: onnxruntime's integer kernels and every bit are kept"),
    Code("UN_SHAPE", "lower", "shape arithmetic: reads dimensions only and stays on the host"),
    Code("UN_DTYPE", "lower", "the operator is not implemented for this element type"),
    Code("UN_TYPE", "lower", "a value has no known element type or rank"),
    Code("UN_ATTR", "lower", "an attribute has a value that is not implemented"),
    Code("UN_AXIS", "lower", "an axis attribute is out of range"),
    Code("UN_ARITY", "lower", "inputs or outputs the op table's entry does not know"),
    Code("UN_OPSET", "lower", "the formula of the operator needs another opset"),
    Code("UN_DATA_DEPENDENT", "lower", "shape or index depends on data that is known only when the model runs"),
    Code("UN_MISFIT", "lower", "the node's attributes or shapes are not what its operator allows"),
    Code("UN_SHAPE_MISMATCH", "lower", "the shapes do not fit the operator"),
    Code("UN_FORMULA", "lower", "a composite operator could not be decomposed"),
    # -- stage A
    Code("FUSED", "A", "the two run in one kernel"),
    Code("NF_A_OPAQUE", "A", "one side stays with onnxruntime, or the user keeps it alone (--keep)", origin=_TVM),
    Code("NF_A_OUTPUT", "A", "the value is a graph output, so no later node dominates it", origin=_TVM),
    Code("NF_A_NO_POSTDOM", "A", "no single node through which every use of the value passes", origin=_TVM),
    Code("NF_A_EDGE_KIND", "A", "an edge on the way is too hard for the producer", origin=_TVM, said="edge is {kind}"),
    Code(
        "NF_A_PATH_KIND", "A", "a node on the way to the post-dominator is too hard", origin=_TVM, said="path is {kind}"
    ),
    Code("NF_A_SINK_KIND", "A", "the group it would join is too hard", origin=_TVM, said="target group is {kind}"),
    Code(
        "NF_A_DEPTH",
        "A",
        "the group would have too many nodes",
        "fusion.max_nodes",
        f"{_TVM} max_depth (256 in mode tvm: max_nodes_tvm)",
        "nodes {nodes} > {cap}",
        optional=True,
    ),
    Code("NF_A_REDUCE_NO_START", "A", "a reduction never starts a group in stage A (stage B may join it)", origin=_TVM),
    Code("NF_A_PHASE", "A", "an injective node waits for the second sweep", origin=_TVM),
    Code("NF_RECOMPUTE", "A", "fusing would repeat expensive work", "fuse.facts:REPEATS", _OURS),
    Code("NF_PEELED", "A", "joined by stage A, split again by stage B so that the producer could join its rows"),
    Code("NF_MODE", "A", "this --fusion-mode does not look at such a pair", "fusion.mode", said="mode {mode}"),
    # -- stage B
    Code("NF_OPAQUE", "B", "one side stays with onnxruntime", origin=_ASCEND),
    Code("NF_PINNED", "B", "the user keeps a node alone (--keep)", "fusion.keep", _OURS),
    Code(
        "NF_NO_SHARED_DATA",
        "B",
        "joining saves no memory traffic",
        "fusion.min_saved_bytes",
        f'{_ASCEND} NF1001 "no shared data"; Inductor score_fusion_memory',
        "saved {saved} < {least} bytes",
        optional=True,
    ),
    Code(
        "NF_NODE_CAP",
        "B",
        "too many atomic nodes in one kernel (an anchor's group gets one more)",
        "fusion.max_nodes",
        f'{_ASCEND} NF1010 "exceeds max fusion"; Inductor max_fusion_size',
        "nodes {nodes} > {cap}",
        optional=True,
    ),
    Code(
        "NF_TOO_MANY_REDUCES",
        "B",
        "too many reductions in one kernel",
        "fusion.max_reduces",
        "XLA CPU",
        "reductions {reduces} > {cap}",
        optional=True,
    ),
    Code("NF_TWO_ANCHORS", "B", "both groups are built around a contraction or window", origin=_TVM),
    Code(
        "FUSED_ATTENTION",
        "B",
        "two products and the row program between them run in one kernel, by blocks of rows; left out: they do not",
        origin=_OURS,
        optional=True,
    ),
    Code(
        "FUSED_ROW_TAIL",
        "B",
        "a product and the row program over its columns run in one kernel, by blocks of rows; left out: they do not",
        origin=_OURS,
        optional=True,
    ),
    Code(
        "NF_ROW_TAIL",
        "B",
        "a product has too many or too few columns, or is too deep, to gain by running with its row program",
        "fusion.tail_columns",
        _OURS,
        "{what} {size}, not {least} to {most}",
    ),
    Code("NF_ROW_BLOCK", "B", "the products around a row program cannot run with it", origin=_OURS, said="{why}"),
    Code(
        "NF_PROLOGUE",
        "B",
        "only views or few steps on an operand come before an anchor",
        origin="nvFuser",
        said="{why}",
    ),
    Code(
        "NF_KIND", "B", "the kinds of the two groups do not go together", origin=_ASCEND, said="producer is {producer}"
    ),
    Code(
        "NF_IO_CAP",
        "B",
        "too many tensors go into or out of the kernel",
        "fusion.max_inputs",
        f"{_ASCEND} NF1007 (outputs: max_outputs)",
        optional=True,
    ),
    Code("NF_GROUP_MERGE", "B", "the two groups keep different outer axes", origin=f"{_ASCEND} NF1009", said="{why}"),
    Code("NF_AXES_CONFLICT", "B", "an axis would stand for two others", origin=f"{_ASCEND} NF1006", said="{why}"),
    Code("NF_NOT_ROW_LOCAL", "B", "a member reads across the rows of the kernel", origin=_OURS, said="{why}"),
    Code("NF_VIEW_LEVEL", "B", "a view between the two bends the shared axes", origin=_OURS, said="{why}"),
    Code(
        "NF_LOCAL_BUFFER",
        "B",
        "what later stages need of one row does not stay in cache",
        "fusion.local_budget",
        "half an L2",
        "local buffers {bytes} > {budget} bytes",
        optional=True,
    ),
    Code(
        "NF_COST",
        "B",
        "large pointwise work would run in a single row, on one core",
        "fuse.rules:SERIAL_POINTS",
        _OURS,
        "{elements} elements in {rows} row > {most}",
        optional=True,
    ),
    Code(
        "NF_CYCLE",
        "B",
        "the consumer also depends on the producer through another kernel",
        origin=f'{_ASCEND} NF1002 "will create cycle"',
        said="through {through}",
    ),
    Code(
        "NF_CYCLE_BUDGET",
        "B",
        "the two are too far apart to test for a cycle",
        "fusion.cycle_window",
        _OURS,
        "window {window} > {most} groups",
    ),
    Code(
        "NF_ROUNDS",
        "B",
        "nothing keeps the two apart, but the last round was over",
        "fusion.rounds",
        f"{_ASCEND}; Inductor",
        "after {rounds} rounds",
    ),
    # -- stage C
    Code(
        "FUSED_PRODUCTS",
        "C",
        "products of one value with different constant weights run in one kernel; left out: they do not",
        origin=_OURS,
        optional=True,
    ),
    Code(
        "NF_INDEX_MISMATCH",
        "C",
        "the two read the same value, but not alike",
        "fusion.min_saved_bytes",
        _ASCEND,
        "read alike {alike} of {shared} bytes < {least}",
        optional=True,
    ),
    Code(
        "NF_SPAN",
        "C",
        "the two siblings are far apart in the order of execution",
        "fusion.span",
        f"{_ASCEND} NF1003; Inductor score_fusion proximity",
        "span {span} > {most} groups",
        optional=True,
    ),
    Code(
        "NF_PEAK_MEMORY",
        "C",
        "the outputs of the two siblings would take too much memory at once",
        "fusion.peak_memory",
        f"{_ASCEND} NF1003",
        "outputs {bytes} > {most} bytes",
        optional=True,
    ),
    # -- kernelize
    Code("NF_ONE_KERNEL", "kernelize", "the group cannot be one kernel and was split into its members", said="{why}"),
    Code("NF_FREE_VIEW", "kernelize", "only renames memory: the runtime does that without a copy"),
    Code("NF_TINY", "kernelize", "one operator on single numbers: calling a kernel costs what it saves"),
    Code("UN_INTERNAL", "kernelize", "a bug in onnxfuse, met while this kernel was made: its nodes stay as they are"),
    Code("UN_UNBOUND_DIM", "kernelize", "a run-time dimension cannot be read from the kernel's inputs"),
    # -- plan
    Code("UN_TEMPLATE", "plan", "no template runs this kernel"),
    Code("INT_RUNTIME", "plan", "onnxruntime's integer kernel is faster than one made of pairs of numbers"),
    Code("GEMM_FORM", "plan", "not a contraction with an epilogue"),
    Code("GEMM_PRODUCT", "plan", "what is summed is no product of two factors"),
    Code("GEMM_COMBINE", "plan", "the reduction is no sum from zero"),
    Code("GEMM_DTYPE", "plan", "the template does not accumulate in this element type"),
    Code("GEMM_K", "plan", "no axis is summed in both factors"),
    Code("GEMM_ROLES", "plan", "no axis belongs to one factor alone"),
    Code("GEMM_BCAST", "plan", "an operand broadcasts at run time"),
    Code("GEMM_SMALL", "plan", "too few products for a blocked contraction", "templates.gemm:MIN_WORK"),
    Code("GEMM_NARROW", "plan", "too few columns for vectors"),
    Code("ROWBLOCK_FORM", "plan", "not a product whose columns a row program reads"),
    Code("ROWBLOCK_DTYPE", "plan", "the template does not accumulate in this element type"),
    Code("SEVERAL_FORM", "plan", "not several products that do not need each other"),
    Code("WINDOW_FORM", "plan", "not a window that slides with constant steps"),
    Code("WINDOW_ROWS", "plan", "the weight has output axes of its own: a matrix product"),
    Code("WINDOW_TAPS", "plan", "the window's taps are not static, or too many", "templates.window:MAX_TAPS"),
    Code("WINDOW_GUARD", "plan", "the padding is not that of the source"),
    Code("WINDOW_DTYPE", "plan", "the template does not accumulate in this element type"),
    Code("WINDOW_NARROW", "plan", "output lines are shorter than a vector"),
    Code("BY_SIZE_KNOWN", "plan", "sizes known before the model runs need no choice in every call"),
    Code("BY_SIZE_ONE", "plan", "one way to run the convolution is predicted to be the better one at any size"),
    Code("WINOGRAD_FORM", "plan", "not a plain convolution of one group along one or two dimensions"),
    Code("WINOGRAD_WINDOW", "plan", "the window is not 3 or 5 wide, along one direction or both"),
    Code("WINOGRAD_WEIGHT", "plan", "the weights are no constant"),
    Code("WINOGRAD_MEMORY", "plan", "transformed weights would take too much memory"),
    Code("WINOGRAD_STEPS", "plan", "strides or dilations other than 1, or padding as long as the window"),
    Code("WINOGRAD_GUARD", "plan", "the padding is not that of the source"),
    Code("WINOGRAD_LANES", "plan", "the vectors of the target do not fit the tile"),
    # -- generate
    Code("UN_COMPILE", "generate", "LLVM or the linker failed on the kernel"),
    Code("E_DIM", "generate", "a dimension of the kernel is bound by no input"),
    Code("E_CPU_FEATURE", "generate", "no test is known for a CPU feature of the target"),
    Code("E_TEMPLATE", "generate", "the template did not write all functions of the kernel"),
    Code("E_EMIT", "generate", "a template failed while writing the code of a kernel"),
    Code("E_LLVM", "generate", "LLVM refused the generated code"),
    Code("E_LLVM_ASM", "generate", "inline assembly of another architecture"),
    Code("E_LLVM_CRASH", "generate", "LLVM gave up on the generated code"),
    Code("E_LLVM_TARGET", "generate", "LLVM cannot generate code for the target"),
    Code("E_LINK", "generate", "the linker failed"),
    Code("E_LINKER", "generate", "there is no linker (package ziglang)"),
    Code("E_LINK_TARGET", "generate", "there is no linker for the target"),
    Code("E_SYMBOLS", "generate", "the library is not self-contained"),
    # -- tune
    Code("NF_MEASURED_SLOWER", "tune", "onnxruntime runs the nodes faster on this machine"),
    # -- the caller's
    Code("E_BUG", "error", "an exception nobody expected: a bug in onnxfuse"),
    Code("E_FLAG", "error", "a flag or its value is wrong"),
    Code("E_SYSTEM", "error", "the machine refused: a disk that is full, memory, rights, too many open files"),
    Code("E_NO_FILE", "error", "a file does not exist or cannot be read"),
    Code("E_NO_OUTPUT", "error", "no output file was given"),
    Code("E_NO_NAME", "error", "the model has no node, value or operator of this name"),
    Code("E_NO_OP", "error", "the op table has no such operator"),
    Code("E_NO_CODE", "error", "there is no such code"),
    Code("E_STAGE", "error", "the stage cannot be written as an ONNX model"),
    Code("E_IS_DIRECTORY", "error", "a directory where a file should be"),
    Code("E_OUTPUT", "error", "the output cannot be written"),
    Code("E_SAME_FILE", "error", "the output is the input"),
    Code("E_EMPTY", "error", "the file is empty"),
    Code("E_NOT_MODEL", "error", "the file is no ONNX model"),
    Code("E_PARSE", "error", "the file is no ONNX model, or is truncated or damaged"),
    Code("E_TOO_LARGE", "error", "the file is larger than protobuf allows"),
    Code("E_INVALID_MODEL", "error", "the model is not valid ONNX"),
    Code("E_CYCLE", "error", "the graph, or its local functions, have a cycle"),
    Code("E_DUPLICATE_VALUE", "error", "a value is defined twice"),
    Code("E_UNDEFINED_VALUE", "error", "a value is read or returned that nothing defines"),
    Code("E_OPSET_IMPORT", "error", "a domain is not imported, or twice"),
    Code("E_UNKNOWN_OP", "error", "an operator that the default domain does not have"),
    Code("E_TENSOR", "error", "the data of a tensor do not fit its type or dimensions"),
    Code("E_EXTERNAL_MISSING", "error", "a file with external data is missing"),
    Code("E_EXTERNAL_PATH", "error", "external data lie outside the model's directory, or in a subgraph"),
    Code("E_EXTERNAL_SIZE", "error", "external data do not fit their file"),
    Code("E_DIM_PARAM", "error", "no input has this dimension, or its size is not at least 1"),
    Code("E_INPUT_NAME", "error", "the model has no input of this name"),
    Code("E_INPUT_SHAPE", "error", "a shape does not fit the input"),
    Code("E_INPUT_TYPE", "error", "an element type does not fit the input, or has no random data"),
    Code("E_INPUT_DATA", "error", "input data cannot be found or read"),
    Code("E_INPUT_MISSING", "error", "data are given for some inputs only"),
    Code("E_INPUT_REFUSED", "error", "the model refuses the inputs"),
    Code("E_INPUT", "error", "an array of another type or rank than the kernel's input"),
    Code("E_NO_INPUT", "error", "no random input was found that the model accepts"),
    Code("E_OUTPUT_DATA", "error", "an output cannot be saved"),
    Code("E_SHAPE", "error", "the shapes of a kernel's inputs do not fit each other"),
    Code("E_TARGET", "error", "no such target CPU, or this CPU is too old"),
    Code("E_TEXT", "error", "text of an IR level cannot be read"),
    Code("E_MODEL", "error", "the path is no ONNX model"),
    Code("E_LIBRARY", "error", "no library for the model, or that of another model"),
    Code("E_OPTIONS", "error", "the SessionOptions serve another model"),
    Code("E_DEVICE", "error", "a device other than the CPU was asked for (onnxfuse.backend)"),
    Code("E_ORT_LOAD", "error", "onnxruntime refuses to load the model"),
    Code("E_ORT_VERSION", "error", "this onnxruntime is too old for what is asked of it"),
    # -- verify
    Code("E_MISMATCH", "verify", "the optimized model does not agree with the original; nothing was written"),
    Code("E_VERIFY_CRASH", "verify", "the process that compares the models ended; nothing was written"),
    # -- our own checks
    Code("IR_ACC", "check", "an accumulator outside of a reduction's result, or of another type"),
    Code("IR_AXIS", "check", "an axis is not bound, or twice"),
    Code("IR_BODY", "check", "a function body does not compute the outputs of its node"),
    Code("IR_CONST", "check", "a constant is no input, or its data are not known"),
    Code("IR_DEFAULT", "check", "a default value of something that is no input"),
    Code("IR_DIM", "check", "a dimension is negative, not i64 or not in normal form"),
    Code("IR_DTYPE", "check", "an expression of the wrong element type"),
    Code("IR_EMIT", "check", "the optimized graph has a cycle"),
    Code("IR_GROUP", "check", "the groups do not cover the loops, or read and write something else"),
    Code("IR_KERNEL", "check", "a kernel without stage or output"),
    Code("IR_LOAD", "check", "a load with the wrong indices, or of no tensor"),
    Code("IR_NAME", "check", "two values have one name"),
    Code("IR_OPAQUE", "check", "nothing to run a node with"),
    Code("IR_ORDER", "check", "the groups are not in topological order"),
    Code("IR_OVERRUN", "check", "a kernel wrote beyond its buffers or into an input"),
    Code("IR_FLOAT_STATE", "check", "a kernel changed the rounding mode or another setting of floating point"),
    Code("IR_UNWRITTEN", "check", "a kernel calculates with memory that nobody wrote"),
    Code("IR_PLAN", "check", "calls and kernels do not fit each other"),
    Code("IR_PREPARE", "check", "a simplification broke the graph"),
    Code("IR_PRIM", "check", "a primitive with the wrong number of arguments"),
    Code("IR_RANK", "check", "a computed value has other axes than its type"),
    Code("IR_REDUCE", "check", "a reduction that is not one"),
    Code("IR_SSA", "check", "a value is defined twice"),
    Code("IR_STORE", "check", "a store out of range, or to no output or local"),
    Code("IR_SYM", "check", "a dimension is bound by no input, or twice"),
    Code("IR_SYMBOL", "check", "the template did not write a function"),
    Code("IR_TYPE", "check", "a computed value has no tensor type"),
    Code("IR_VALUE", "check", "a value is read before it is defined"),
)

BY_CODE: dict[str, Code] = {c.code: c for c in CODES}
OPTIONAL: frozenset[str] = frozenset(c.code for c in CODES if c.optional)


def default(code: Code) -> object:
    """The number behind the threshold as it is today; None without one."""
    if not code.threshold:
        return None
    config = import_module("onnxfuse.config")
    where, _, name = code.threshold.rpartition(":")
    if where:
        return getattr(import_module(f"onnxfuse.{where}"), name)
    part, _, name = code.threshold.partition(".")
    value = getattr(getattr(config.Config(), part), name)
    return value if isinstance(value, int | float | str) else sorted(value)


_KNOBS = {
    "NF_A_DEPTH": "raise --max-fusion-size",
    "NF_NODE_CAP": "raise --max-fusion-size",
    "NF_PINNED": "leave out --keep",
    "NF_MODE": "a wider --fusion-mode",
    "NF_OPAQUE": "see why the node stays: onnxfuse explain --node",
    "NF_A_OPAQUE": "see why the node stays: onnxfuse explain --node",
}


def advice(code: str) -> str:
    """What the user can do about a refusal; "" when no kernel runs the two together."""
    known = BY_CODE.get(code)
    if known is None or code.startswith("FUSED"):
        return ""
    skip = f"leave the rule out: --skip-fusion-patterns {code}" if known.optional else ""
    ways = [w for w in (_KNOBS.get(code, ""), skip) if w]
    return ", or ".join(ways)


def meaning(code: str) -> str:
    """One line about a code; "" for one that is not in the catalogue."""
    known = BY_CODE.get(code)
    return known.meaning if known is not None else ""


def sentence(code: str, numbers: tuple[tuple[str, int | float | str], ...]) -> str:
    """The numbers of a decision in words, e.g. `nodes 40+31 > 64`."""
    known = BY_CODE.get(code)
    given = dict(numbers)
    if known is not None and known.said:
        try:
            return known.said.format(**given)
        except KeyError:  # this refusal carries other numbers
            pass
    return " ".join(f"{k}={v}" for k, v in numbers)
