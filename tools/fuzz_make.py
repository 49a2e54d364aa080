"""A random graph from a seed: inputs, moves until it is large enough, perhaps wrapped.

Seeds are of four kinds, so that no dimension of the space drowns in the others: the plain moves alone, the rarer forms
of operators among them, patterns of networks among them, and all of these on sizes around the templates' own.
"""

from __future__ import annotations

import contextlib
import random
from math import prod

import numpy as np
import onnx
import onnxruntime
from fuzz_graph import DTYPES, NEWEST, OLDEST, REFUSALS, WIDE, Made, Rejected, Writer
from fuzz_more import MORE
from fuzz_moves import MOVES
from fuzz_patterns import PATTERNS
from fuzz_wrap import wrapped

from onnxfuse.verify import ort


def random_graph(seed: int, opset: int | None = None, nodes: int | None = None) -> Made | None:
    """One graph of a few nodes; None when the seed gives none."""
    head = random.Random(seed)
    w = Writer(seed, opset or random_opset(head))
    kind = w.rng.choice(("plain", "more", "patterns", "wide"))
    moves = [(m, p * share) for table, share in TABLES[kind] for m, p in table]
    if kind == "wide":
        w.range = WIDE
    makers, weights = [m for m, _ in moves], [p for _, p in moves]
    wanted = nodes or w.rng.choices((1, 2, 3, 4, 5, 6, 8, 12, 20), (2, 4, 6, 6, 5, 4, 3, 2, 1))[0]
    for _ in range(w.rng.choice((1, 1, 2, 3))):
        with contextlib.suppress(Rejected):
            start(w)
    for _ in range(wanted * 6):
        if len(w.ops) >= wanted:
            break
        with contextlib.suppress(Rejected, IndexError, ValueError):
            w.rng.choices(makers, weights)[0](w)
    made = w.finish()
    if made is None or not runs(made):
        return None
    if w.chance(0.2):
        other = wrapped(made, w.rng)
        if other is not None and runs(other):
            return other
    return made


TABLES = {
    "plain": ((MOVES, 1.0),),
    "more": ((MORE, 2.0), (MOVES, 0.7)),
    "patterns": ((PATTERNS, 3.0), (MOVES, 0.5)),
    "wide": ((MORE, 1.0), (MOVES, 0.7), (PATTERNS, 1.0)),
}


def runs(made: Made) -> bool:
    """Onnxruntime takes the whole as it took the parts, and so does the specification (it does not check all types)."""
    try:
        onnx.checker.check_model(made.model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    try:
        session = ort.session(made.model)
        made.feeds[:] = [f for k, f in enumerate(made.feeds) if k == 0 or _accepts(session, f)]
        ort.run(session, made.feeds[0])
    except REFUSALS:
        return False
    return True


def _accepts(session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray]) -> bool:
    try:
        ort.run(session, feeds)
    except ort.ORT_ERRORS:
        return False
    return True


def random_opset(rng: random.Random) -> int:
    """Any supported opset, the usual ones more often."""
    usual = (13, 14, 15, 16, 17, 17, 17, 18, 18, 19, 20, 21, 22)
    chosen: int = rng.choice((*range(OLDEST, NEWEST + 1), *usual))
    return chosen


def start(w: Writer) -> str:
    """A graph input of any type, rank and sizes."""
    dtype = w.rng.choices([d for d, _ in DTYPES], [p for _, p in DTYPES])[0]
    if w.dims and w.chance(0.5):  # like another one, so that they meet
        x = w.rng.choice(list(w.dims))
        dims = list(w.dims[x])
        keep = w.rng.randint(0, len(dims))
        dims = [1 if w.chance(0.15) else d for d in dims[keep:]] if w.chance(0.4) else dims
        return w.input(w.dtype(x) if w.chance(0.7) else dtype, dims)
    rank = w.rng.choices((0, 1, 2, 3, 4, 5, 6), (1, 2, 5, 5, 5, 1, 0.5))[0]
    while True:
        sizes = [w.rng.choice(w.range.extents) for _ in range(rank)]
        if prod(sizes) <= w.range.largest // 4:
            break
    if sizes and w.chance(0.03):
        sizes[w.rng.randrange(rank)] = 0
    return w.input(dtype, [w.dim(s) for s in sizes])
