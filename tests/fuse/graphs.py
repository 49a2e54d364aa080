"""Large loop graphs: what grows with the number of nodes in the fusion, and how fast.

Every builder takes a number of Computes and makes about that many.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import LoopGraph
from tests.fuse.dsl import Build


def chain(n: int) -> LoopGraph:
    """One unary operator after another."""
    g = Build()
    x = g.input("x")
    for i in range(n):
        x = g.E(f"e{i}", x)
    return g.outputs(x)


def ladder(n: int) -> LoopGraph:
    """Diamonds in a row."""
    g = Build()
    x = g.input("x")
    for i in range(n // 3):
        x = g.E(f"s{i}", g.E(f"p{i}", x), g.E(f"q{i}", x))
    return g.outputs(x)


def skips(n: int) -> LoopGraph:
    """Every node reads the one before and one of the thousand before."""
    g = Build()
    made = [g.input("x")]
    for i in range(n):
        far = made[max(0, len(made) - 1 - (i * 7919) % 1000)]
        made.append(g.E(f"e{i}", made[-1], far))
    return g.outputs(made[-1])


def fan(n: int) -> LoopGraph:
    """One value read by everything, as a mask or a position is; every reader is an output."""
    g = Build()
    x = g.input("x")
    return g.outputs(*(g.E(f"e{i}", x) for i in range(n)))


def norms(n: int) -> LoopGraph:
    """Softmaxes in a row."""
    g = Build()
    x = g.input("x")
    for i in range(n // 6):
        e = g.E(f"exp{i}", g.pointwise(f"sub{i}", "sub", x, g.R(f"max{i}", x, op="max")), prim="exp")
        x = g.E(f"post{i}", g.pointwise(f"div{i}", "div", e, g.R(f"sum{i}", e)))
    return g.outputs(x)


def views(n: int) -> LoopGraph:
    """Row reductions with a reshape behind each, which stage B has to split off again."""
    g = Build((2, 4, 8))
    x = g.input("x")
    for i in range(n // 5):
        d = g.pointwise(f"sub{i}", "sub", x, g.R(f"mean{i}", x, mean=True))
        y = g.E(f"act{i}", g.reshape(f"flat{i}", d, (8, 8)))
        x = g.reshape(f"back{i}", y, (2, 4, 8))
    return g.outputs(x)


def mixed(n: int) -> LoopGraph:
    """A random DAG with all kinds: reductions, transposes, contractions, nodes that stay, long skips."""
    rng = random.Random(n)
    g = Build()
    made: list[Value] = [g.input("x"), g.input("y")]

    def near() -> Value:
        return made[-rng.randint(1, min(len(made), 8))]

    for i in range(n):
        x, name = near() if rng.random() < 0.9 else rng.choice(made), f"v{i}"
        kind = rng.choices("EPRICO", [11, 3, 3, 2, 1, 1])[0]
        if kind == "E":
            made.append(g.E(name, x))
        elif kind == "P":
            made.append(g.E(name, x, near()))
        elif kind == "R":
            made.append(g.E(name, x, g.R(f"{name}r", x)))
        elif kind == "I":
            made.append(g.I(name, x))
        else:
            made.append(g.C(name, x) if kind == "C" else g.O(name, x))
    return g.outputs(*made[-3:])


SHAPES: dict[str, Callable[[int], LoopGraph]] = {
    f.__name__: f for f in (chain, ladder, skips, fan, norms, views, mixed)
}
