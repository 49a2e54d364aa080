"""Forms: Computes, and groups of them, that differ only in which values and axes they are written with.

A deep model repeats its blocks, and what is true of one is true of all: `Forms` numbers Computes by their form, a group
by the forms of its members and how they read each other. Names of values are no part of a form; names of axes and
symbols are, because messages print them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable
from typing import NamedTuple, TypeVar

from onnxfuse.ir.expr import Apply, Expr, Load, Var
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis, Compute

T = TypeVar("T")
Form = tuple[int, ...]


class Formed(NamedTuple):
    """The number of a Compute's form, the values it reads in the order in which the form counts them, its loads."""

    number: int
    sources: tuple[Value, ...]
    loads: list[Load]


class Forms:
    """Numbers of the forms that were met, and what was found out about groups of a form."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[Value, Formed] = {}
        self._found: dict[Hashable, object] = {}

    def meet(self, c: Compute) -> Formed:
        """The form of a Compute."""
        known = self._known.get(c.out)
        if known is None:
            key, sources, loads = _form(c)
            known = self._known[c.out] = Formed(self._numbers.setdefault(key, len(self._numbers)), sources, loads)
        return known

    def group(self, members: Iterable[Compute], marked: Container[Value]) -> tuple[Form, dict[Value, int]]:
        """The form of a group, and a number for every value it makes (first, in order) or reads.

        marked: values of members that mean something else than the others: those that leave the group.
        """
        number = {c.out: k for k, c in enumerate(members)}
        form: list[int] = []
        for v in tuple(number):
            own, sources, _ = self._known[v]
            form += (own, v in marked)
            form += [number.setdefault(s, len(number)) for s in sources]
        return tuple(form), number

    def once(self, what: Hashable, members: Iterable[Compute], marked: Container[Value], make: Callable[[], T]) -> T:
        """What `make` finds out about `members`, asked once of every form; it may depend on nothing else."""
        key = (what, self.group(members, marked)[0])
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]  # type: ignore[return-value]


def axes_in_order(c: Compute) -> tuple[Axis, ...]:
    """Axes of a Compute, those it reduces last."""
    return c.axes if c.reduce is None else (*c.axes, *c.reduce.axes)


def _form(c: Compute) -> tuple[Hashable, tuple[Value, ...], list[Load]]:
    """The form of one Compute, the values it reads, its loads (as `ir.expr.loads` orders them)."""
    axes, roots = axes_in_order(c), c.roots
    place = {a: ~k for k, a in enumerate(axes)}  # axes count down, what is computed up
    at: dict[Expr, int] = {}
    sources: dict[Value, int] = {}
    found: list[Load] = []
    code: list[Hashable] = []
    stack = list(reversed(roots))
    while stack:
        e = stack[-1]
        below = e.args if isinstance(e, Apply) else e.index if isinstance(e, Load) else ()
        missing = []
        for x in below:
            if x not in at:
                if isinstance(x, Var) and x.axis in place:
                    at[x] = place[x.axis]
                else:
                    missing.append(x)
        if missing:
            stack += reversed(missing)
            continue
        stack.pop()
        if e in at:
            continue
        if isinstance(e, Load):
            found.append(e)
            code.append((sources.setdefault(e.source, len(sources)), *[at[x] for x in below]))
        elif isinstance(e, Apply):
            code.append((e.prim.name, e.dtype, *[at[x] for x in below]))
        else:
            code.append(e)
        at[e] = len(code)
    r = c.reduce
    over = None if r is None else (len(r.axes), r.combine.name, r.init, r.acc)
    types = tuple([(v.tensor.dtype, v.tensor.shape) for v in sources])
    loops = tuple([(a.name, a.extent) for a in axes])
    key = (c.out.tensor.dtype, loops, over, types, tuple([at[e] for e in roots]), *code)
    return key, tuple(sources), found
