"""How long the fusion takes on large graphs, stage by stage.

    python tools/scaling.py [--nodes N] [--memory] [SHAPE...]

SHAPE is one of tests/fuse/graphs.py (chain, ladder, skips, fan, norms, views, mixed; default all), N the number of
nodes (default 100000). `classify` reads kinds and index maps off the loops, A to C are the stages of the fusion,
`settle` says what became of every pair, `groups` puts the result together. Seconds of CPU time. With --memory the
peak of what the fusion allocates, in bytes a node (slow: every allocation is watched).
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fused import table

from onnxfuse.config import FusionConfig
from onnxfuse.fuse import fuse, no_collector, partition
from onnxfuse.fuse.facts import facts
from onnxfuse.fuse.horizontal import join_siblings
from onnxfuse.fuse.merge import Merger
from onnxfuse.fuse.order import quotient_order
from onnxfuse.fuse.products import join_products
from onnxfuse.fuse.rowblocks import join_row_blocks
from onnxfuse.fuse.settle import settle
from onnxfuse.fuse.stage_a import stage_a
from onnxfuse.fuse.vertical import grow, place_views
from onnxfuse.ir.loops import LoopGraph
from tests.fuse.graphs import SHAPES

STAGES = ("classify", "A", "B", "C", "settle", "groups")


def timed(loops: LoopGraph) -> tuple[list[float], int]:
    """Seconds of every stage, and the number of groups."""
    config = FusionConfig()
    marks = [time.process_time()]

    def mark() -> None:
        marks.append(time.process_time())

    known = facts(loops, config)
    mark()
    growth, _ = stage_a(known, config)
    mark()
    m = Merger(known, growth.root, quotient_order(known.succ, growth.root), config, loops.consts.keys())
    grow(m)
    mark()
    join_siblings(m)
    join_row_blocks(m)
    join_products(m)
    place_views(m)
    mark()
    records = settle(m)
    mark()
    made = partition(loops, known, m.home, records)
    mark()
    return [b - a for a, b in pairwise(marks)], len(made.groups)


def peak(loops: LoopGraph) -> int:
    """Most bytes that were allocated at a time."""
    tracemalloc.start()
    fuse(loops, FusionConfig())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    rows = []
    for name in args.shapes or SHAPES:
        loops = SHAPES[name](args.nodes)
        n = len(loops.items)
        if args.memory:
            rows.append([name, n, peak(loops) // n])
            continue
        with no_collector():
            seconds, groups = timed(loops)
        rows.append([name, n, groups, *(f"{s:.2f}" for s in seconds), f"{sum(seconds):.2f}"])
    heads = ["shape", "nodes", "bytes/node"] if args.memory else ["shape", "nodes", "groups", *STAGES, "total"]
    print(table(heads, [[str(c) for c in row] for row in rows]))


if __name__ == "__main__":
    main()
