"""`rows` for many groups: a form (forms.py) is judged once, and the answer put in the words of every group of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from onnxfuse.analysis.footing import Footing, footing
from onnxfuse.analysis.forms import Form, Forms, axes_in_order
from onnxfuse.analysis.rows import RowMap, Unfit, bare, on_rows
from onnxfuse.errors import Refusal
from onnxfuse.ir.expr import Load, loads
from onnxfuse.ir.graph import Value
from onnxfuse.ir.loops import Axis, Compute
from onnxfuse.ir.text import value_text
from onnxfuse.ir.types import Dim

Place = tuple[int, int]  # of an axis: which member, which of its axes


@dataclass(frozen=True, slots=True)
class _Printed:
    """A value as expressions write it."""

    number: int


@dataclass(frozen=True, slots=True)
class _Unfit:
    """A refusal; values by number."""

    code: str
    words: tuple[str | int | _Printed, ...]

    def of(self, values: Sequence[Value]) -> Refusal:
        return Refusal(self.code, "".join([_spelt(w, values) for w in self.words]))


@dataclass(frozen=True, slots=True)
class _Shared:
    """What a RowMap and a Footing have in common; members by number, axes by place."""

    outer: tuple[Place, ...]
    axis_of: tuple[tuple[Place, Place], ...]
    inline: tuple[int, ...]

    def of(self, members: Sequence[Compute]) -> tuple[tuple[Axis, ...], dict[Axis, Axis], frozenset[Value]]:
        axes = [axes_in_order(c) for c in members]
        return (
            tuple([axes[k][d] for k, d in self.outer]),
            {axes[k][d]: axes[i][e] for (k, d), (i, e) in self.axis_of},
            frozenset([members[k].out for k in self.inline]),
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """A RowMap; members by number."""

    shared: _Shared
    level: tuple[int, ...]
    buffers: tuple[tuple[int, Dim], ...]

    def of(self, members: Sequence[Compute]) -> RowMap:
        return RowMap(
            *self.shared.of(members),
            {c.out: n for c, n in zip(members, self.level, strict=True)},
            tuple([(members[k].out, n) for k, n in self.buffers]),
        )


@dataclass(frozen=True, slots=True)
class _Footing:
    """A Footing."""

    shared: _Shared
    reducing: bool
    bytes: int

    def of(self, members: Sequence[Compute]) -> Footing:
        return Footing(*self.shared.of(members), self.reducing, self.bytes)


class RowForms:
    """Remembers what `rows` said, and how groups stand."""

    def __init__(self, forms: Forms, loads_of: Callable[[Compute], list[Load]]) -> None:
        self.forms = forms
        self._loads_of = loads_of
        self._known: dict[Form, _Rows | _Unfit] = {}
        self._stand: dict[Form, _Footing] = {}
        self._bare: dict[int, tuple[int, ...]] = {}

    def rows(self, members: Sequence[Compute], writes: Collection[Value]) -> RowMap | Refusal:
        """As `analysis.rows.rows`."""
        return self._rows(members, writes, *self.forms.group(members, set(writes)))

    def barely_read(self, c: Compute) -> list[Value]:
        """Values that `c` reads by bare variables, every element once."""
        number, sources, found = self.forms.meet(c)
        known = self._bare.get(number)
        if known is None:
            plain = {ld.source for ld in found if bare(ld)}
            known = self._bare[number] = tuple([k for k, v in enumerate(sources) if v in plain])
        return [sources[k] for k in known]

    def footing(
        self, members: Sequence[Compute], writes: Collection[Value], quick: Callable[[], Footing | None] = lambda: None
    ) -> Footing | Refusal:
        """The footing of members that stand on rows; `quick` may find it without looking at all of them."""
        form, number = self.forms.group(members, set(writes))
        known = self._stand.get(form)
        if known is not None:
            return known.of(members)
        how = None if form in self._known else quick()
        if how is None:
            found = self._rows(members, writes, form, number)
            if isinstance(found, Refusal):
                return found
            how = footing(found, members)
        self._stand[form] = _standing(how, members)
        return how

    def _rows(
        self, members: Sequence[Compute], writes: Collection[Value], form: Form, number: dict[Value, int]
    ) -> RowMap | Refusal:
        known = self._known.get(form)
        if known is None:
            found = on_rows(members, writes, self._loads_of)
            made = _unfit(found, number) if isinstance(found, Unfit) else _rows(found, members)
            if made is not None:
                self._known[form] = made
            return found.refusal if isinstance(found, Unfit) else found
        return known.of(members) if isinstance(known, _Rows) else known.of(tuple(number))


def _shared(how: RowMap | Footing, members: Sequence[Compute]) -> _Shared:
    place = {a: (k, d) for k, c in enumerate(members) for d, a in enumerate(axes_in_order(c))}
    return _Shared(
        tuple([place[a] for a in how.outer]),
        tuple([(place[a], place[b]) for a, b in how.axis_of.items()]),
        tuple([k for k, c in enumerate(members) if c.out in how.inline]),
    )


def _standing(how: Footing, members: Sequence[Compute]) -> _Footing:
    return _Footing(_shared(how, members), how.reducing, how.row_bytes(lambda: members))


def _rows(found: RowMap, members: Sequence[Compute]) -> _Rows:
    member = {c.out: k for k, c in enumerate(members)}
    return _Rows(
        _shared(found, members),
        tuple(found.level[c.out] for c in members),
        tuple((member[v], n) for v, n in found.buffers),
    )


def _unfit(found: Unfit, number: dict[Value, int]) -> _Unfit | None:
    """None where the words hold names that cannot be told from the rest."""
    words: list[str | int | _Printed] = []
    for w in found.words:
        if isinstance(w, str):
            words.append(w)
        elif isinstance(w, Value):
            words.append(number[w])
        else:
            source = value_text(w.source.name)
            if loads(*w.index) or not str(w).startswith(source):
                return None
            words += (_Printed(number[w.source]), str(w).removeprefix(source))
    return _Unfit(found.code, tuple(words))


def _spelt(word: str | int | _Printed, values: Sequence[Value]) -> str:
    if isinstance(word, str):
        return word
    return values[word].name if isinstance(word, int) else value_text(values[word.number].name)
