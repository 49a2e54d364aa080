"""Stage A gives TVM's partition, at every cap, and its groups have the properties proved in FUSION.md 1.5."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.fuse.dominators import post_dominators
from onnxfuse.fuse.group import ANCHOR, FUSED, OPAQUE, Growth, grow
from tests.fuse.oracle import oracle

Dag = tuple[list[int], list[list[int]], list[list[int]], list[bool]]


def random_dag(rng: random.Random, n: int) -> Dag:
    """Mixed kinds, skips, several uses, outputs in the middle, duplicate edges, dead nodes; labels per edge."""
    near = rng.choice([2, 4, 30])
    weights = rng.choice([[6, 2, 3, 1, 1, 0], [6, 2, 2, 1, 1, 1], [3, 1, 1, 0, 2, 0], [1, 0, 0, 0, 0, 0]])
    kind = [rng.choices([0, 1, 2, 3, 4, 8], weights)[0] for _ in range(n)]
    succ: list[list[int]] = [[] for _ in range(n)]
    label: list[list[int]] = [[] for _ in range(n)]
    per_edge = rng.random() < 0.5
    for v in range(1, n):
        for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3])):
            u = max(0, v - rng.randint(1, near))
            succ[u].append(v)
            easier = per_edge and kind[v] <= 2
            label[u].append(rng.randint(0, kind[v]) if easier else kind[v])
    extern = [not s or rng.random() < 0.05 for s in succ]
    if n > 3:
        extern[rng.randrange(n)] = False  # dead, perhaps
    return kind, succ, label, extern


def run(dag: Dag, cap: int, bonus: int = 0) -> Growth:
    kind, succ, label, extern = dag
    return grow(kind, succ, extern, post_dominators(kind, succ, label, extern), cap, bonus)


def first_of(root: list[int]) -> list[int]:
    seen: dict[int, int] = {}
    return [seen.setdefault(r, v) for v, r in enumerate(root)]


@pytest.mark.parametrize("cap", [3, 5, 8, 64, 256])
@pytest.mark.parametrize("bonus", [0, 1])
def test_equal_to_the_literal_algorithm(cap: int, bonus: int) -> None:
    rng = random.Random(cap * 2 + bonus)
    for _ in range(150):
        dag = random_dag(rng, rng.randint(1, 45))
        assert first_of(run(dag, cap, bonus).root) == oracle(*dag, cap, bonus), dag


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([3, 8, 64]))
def test_groups_have_one_exit_one_anchor_and_respect_the_cap(seed: int, n: int, cap: int) -> None:
    dag = random_dag(random.Random(seed), n)
    kind, succ, _, extern = dag
    root = run(dag, cap).root
    members: dict[int, list[int]] = {}
    for v, r in enumerate(root):
        members.setdefault(r, []).append(v)
    for r, group in members.items():
        assert len(group) <= cap
        assert max(group) == r
        assert sum(kind[v] == ANCHOR for v in group) <= 1
        assert len(group) == 1 or all(kind[v] != OPAQUE for v in group)
        exits = [v for v in group if extern[v] or any(root[c] != r for c in succ[v])]
        assert all(v == r for v in exits)
    # Roots in order are a topological order of the quotient graph.
    assert all(root[u] == root[v] or root[u] < root[v] for u in range(n) for v in succ[u])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 60))
def test_every_node_with_consumers_has_a_code(seed: int, n: int) -> None:
    dag = random_dag(random.Random(seed), n)
    growth = run(dag, 8)
    for v in range(n):
        assert bool(growth.code[v]) == bool(dag[1][v])
        if growth.code[v] == FUSED:
            assert growth.root[v] != v


def chain(n: int) -> Dag:
    return [0] * n, [[v + 1] if v + 1 < n else [] for v in range(n)], [[0]] * n, [v + 1 == n for v in range(n)]


def test_a_chain_of_300_is_cut_at_256() -> None:
    root = run(chain(300), 256).root
    assert root[0] == 255
    assert root[256] == 299


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 200), st.integers(2, 40), st.integers(0, 40))
def test_a_higher_cap_never_cuts_a_chain_more(n: int, cap: int, more: int) -> None:
    assert len(set(run(chain(n), cap + more).root)) <= len(set(run(chain(n), cap).root))


def ladder(n: int) -> Dag:
    """Diamonds in a row."""
    kind, succ = [0] * (3 * n + 1), [[] for _ in range(3 * n + 1)]
    for i in range(n):
        a = 3 * i
        succ[a] += [a + 1, a + 2]
        succ[a + 1] += [a + 3]
        succ[a + 2] += [a + 3]
    return kind, succ, [[0] * len(s) for s in succ], [not s for s in succ]


def skips(n: int) -> Dag:
    """Every node also feeds the last one."""
    succ = [[v + 1, n - 1] if v + 2 < n else [n - 1] if v + 1 < n else [] for v in range(n)]
    return [0] * n, succ, [[0] * len(s) for s in succ], [not s for s in succ]


def fibonacci(n: int) -> Dag:
    succ = [[c for c in (v + 1, v + 2) if c < n] for v in range(n)]
    return [0] * n, succ, [[0] * len(s) for s in succ], [not s for s in succ]


SHAPES = [chain, lambda n: ladder(n // 3), skips, fibonacci]


@pytest.mark.parametrize("shape", SHAPES)
def test_large_graphs_need_no_recursion(shape) -> None:
    dag = shape(20_000)
    root = run(dag, 64).root
    assert len(root) == len(dag[0])


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_hundred_thousand_nodes(shape) -> None:
    assert len(run(shape(100_000), 256).root) >= 99_000


def test_one_diamond_too_large_for_the_cap_stays_apart() -> None:
    dag = fibonacci(1000)
    root = run(dag, 256).root
    assert len({r for v, r in enumerate(root) if v >= 1000 - 256}) == 1
    assert len(set(root)) == 1000 - 255
