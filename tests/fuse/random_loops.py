"""Random loop graphs with real index maps: mixed kinds, skips, several uses, outputs in the middle,
duplicates, dead nodes, dynamic dims.
"""

from __future__ import annotations

import random

from onnxfuse.ir.expr import sym
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import LoopGraph
from tests.fuse.dsl import Build


def random_loops(seed: int, n: int) -> LoopGraph:
    rng = random.Random(seed)
    dynamic = rng.random() < 0.3
    full = (sym("N"), 4) if dynamic else rng.choice([(3, 4), (4, 4), (2, 3, 4), (2, 2, 4)])
    g = Build(full)
    pool: list[Value] = [g.input("x"), g.input("y")]
    weight = g.input("w", full[-1:])
    near = rng.choice([2, 4, 8])

    def pick() -> Value:
        return rng.choice(pool) if rng.random() < 0.06 else pool[-min(len(pool), rng.randint(1, near))]

    def like(x: Value) -> Value:
        """Another value whose shape broadcasts with x."""
        fits = [v for v in pool[-8:] if compatible(x, v)]
        return rng.choice(fits) if fits else x

    for i in range(n):
        x, name = pick(), f"v{i}"
        kind = rng.choices("ESXRIVCOPD", [8, 3, 3, 4, 2, 2, 1, 0.5, 1, 1])[0]
        static = all(isinstance(d, int) for d in x.tensor.shape)
        shape = x.tensor.shape
        if kind == "R" and len(shape) > 1:
            pool.append(g.R(name, x, over=rng.choice([-1, -1, -1, 0, len(shape) - 2]), mean=rng.random() < 0.3))
        elif kind == "S":
            pool.append(g.pointwise(name, "sub", x, like(x)))
        elif kind == "X":
            pool.append(g.E(name, x, prim=rng.choice(["exp", "sqrt", "neg"])))
        elif kind == "I" and len(shape) > 1:
            pool.append(g.I(name, x, perm=tuple(rng.sample(range(len(shape)), len(shape)))))
        elif kind == "V" and static and len(shape) > 1:
            a, b, *rest = (d for d in shape if isinstance(d, int))
            pool.append(
                g.reshape(name, x, (a * b, *rest) if rng.random() < 0.6 or len(shape) > 3 else (a, 1, b, *rest))
            )
        elif kind == "C" and static and len(shape) == 2:
            pool.append(g.C(name, x))
        elif kind == "O" and shape == full:
            pool.append(g.O(name, x))
        elif kind == "D":
            twice = [g.E(f"{name}{k}", x, prim="tanh") for k in "ab"]
            pool.append(g.E(name, *twice) if rng.random() < 0.5 else g.E(name, x, x))
        elif kind == "P" and shape[-1:] == full[-1:]:
            pool.append(g.E(name, x, weight))
        else:
            pool.append(g.E(name, x, like(x)))
    made = pool[2:]
    outs = [v for v in made if rng.random() < 0.08]
    return g.outputs(*dict.fromkeys([*outs, made[-1]]))


def compatible(a: Value, b: Value) -> bool:
    pairs = zip(reversed(a.tensor.shape), reversed(b.tensor.shape), strict=False)
    return all(p is q or p == q or 1 in (p, q) for p, q in pairs)
