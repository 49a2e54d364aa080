"""What ONNX ops mean; the only place with op names.

In: nothing. Out: the table (`lookup`, `lower_node`, `expand`, ...). An op is one decorated function; the decorator is
its family. Add an op: write the function in the fitting file, `pytest tests/ops -k MyOp`, regenerate the docs.
"""

from onnxfuse.ops import (
    attention,
    choice,
    composite,
    contract,
    gather,
    opaque,
    pointwise,
    quantised,
    recurrent,
    reduce,
    resize,
    sample,
    scan,
    scatter,
    transform,
    view,
    window,
)
from onnxfuse.ops.table import OPS, entries, lookup

__all__ = [
    "OPS",
    "attention",
    "choice",
    "composite",
    "contract",
    "entries",
    "gather",
    "lookup",
    "opaque",
    "pointwise",
    "quantised",
    "recurrent",
    "reduce",
    "resize",
    "sample",
    "scan",
    "scatter",
    "transform",
    "view",
    "window",
]
