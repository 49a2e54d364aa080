"""Memory order per value. Partition -> Partition.

In: a partition. Out: the same with `layouts` decided. Every value keeps the model's order (row-major, NCHW): the
convolution kernels read and write it at full speed by packing pixels into panels (docs/decisions/0003), so no
conversion is ever needed. A channels-last choice per chain belongs here, before kernelize, because loops follow the
memory order; `Partition.layouts` names only values that differ from the model.
"""

from __future__ import annotations

from onnxfuse.ir.partition import Partition
from onnxfuse.target import Target


def layout(partition: Partition, target: Target) -> Partition:
    """Decide the memory order of every value crossing a group border: as in the model, on every target so far."""
    del target
    return partition
