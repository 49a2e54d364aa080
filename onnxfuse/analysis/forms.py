"""Forms: Computes, and groups of them, that differ only in which values and axes they are written with.

A deep model repeats its blocks, and what is true of one is true of all: `Forms` numbers Computes by their form, a group
by the forms of its members and how they read each other. Names of values are no part of a form; names of axes and
symbols are, because messages print them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import TypeVar

from onnxfuse.ir.expr import Apply, Expr, Load, var, walk
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis, Compute

T = TypeVar("T")
Form = tuple[int, ...]


class Forms:
    """Numbers of the forms that were met, and what was found out about groups of a form."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[Value, tuple[int, tuple[Value, ...]]] = {}
        self._found: dict[Hashable, object] = {}

    def group(self, members: Iterable[Compute], marked: Container[Value]) -> tuple[Form, dict[Value, int]]:
        """The form of a group, and a number for every value it makes (first, in order) or reads.

        marked: values of members that mean something else than the others: those that leave the group.
        """
        number = {c.out: k for k, c in enumerate(members)}
        form: list[int] = []
        for v in tuple(number):
            own, sources = self._known[v]
            form += (own, v in marked)
            form += [number.setdefault(s, len(number)) for s in sources]
        return tuple(form), number

    def meet(self, members: Iterable[Compute]) -> None:
        """Number members that were not seen before; to be done before `group`."""
        for c in members:
            if c.out not in self._known:
                key, sources = _form(c)
                self._known[c.out] = self._numbers.setdefault(key, len(self._numbers)), sources

    def once(self, what: Hashable, members: Sequence[Compute], marked: Container[Value], make: Callable[[], T]) -> T:
        """What `make` finds out about `members`, asked once of every form; it may depend on nothing else."""
        self.meet(members)
        key = (what, self.group(members, marked)[0])
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]  # type: ignore[return-value]


def axes_in_order(c: Compute) -> tuple[Axis, ...]:
    """Axes of a Compute, those it reduces last."""
    return c.axes if c.reduce is None else (*c.axes, *c.reduce.axes)


def _form(c: Compute) -> tuple[Hashable, tuple[Value, ...]]:
    """The form of one Compute, and the values it reads in the order in which the form counts them."""
    axes = axes_in_order(c)
    at: dict[Expr, int] = {var(a): -1 - k for k, a in enumerate(axes)}  # axes count down, what is computed up
    sources: dict[Value, int] = {}
    code: list[Hashable] = []
    for e in walk(*c.roots):
        if isinstance(e, Load):
            code.append((sources.setdefault(e.source, len(sources)), *[at[i] for i in e.index]))
        elif isinstance(e, Apply):
            code.append((e.prim.name, e.dtype, *[at[a] for a in e.args]))
        elif e in at:
            continue
        else:
            code.append(e)
        at[e] = len(code)
    r = c.reduce
    over = None if r is None else (len(r.axes), r.combine.name, r.init, r.acc)
    types = tuple([(v.tensor.dtype, v.tensor.shape) for v in sources])
    loops = tuple([(a.name, a.extent) for a in axes])
    return (c.out.tensor.dtype, loops, over, types, tuple([at[e] for e in c.roots]), *code), tuple(sources)
