"""Trace: the one hook per stage. Check, remember, print, dump, compare, time, stop.

    graph = trace("read", read(model))

A stage that returns the object it was given prints as "(unchanged)". What is not an IR level (a library, a bundle) is
remembered and timed only. With `--include-subgraph` the stages up to layout run once per graph: `scope` names the body.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, get_args

from onnxfuse.ir.check import check
from onnxfuse.ir.text import IR, show

T = TypeVar("T")
_LEVELS = get_args(IR)


class Stopped(Exception):  # noqa: N818 - not an error: --stop-after did what it was asked
    """Raised after the stage named by `stop_after`; `result` is what that stage returned."""

    def __init__(self, stage: str, result: object) -> None:
        super().__init__(stage)
        self.stage = stage
        self.result = result


@dataclass(frozen=True, slots=True)
class Record:
    """One stage that has run: its result, and seconds spent in it and in checking it."""

    stage: str
    result: object
    view: IR | None
    seconds: float
    checking: float
    unchanged: bool
    scope: str = ""

    @property
    def title(self) -> str:
        """Stage, and the body it worked on."""
        return f"{self.stage} {self.scope}".rstrip()


@dataclass(slots=True)
class Trace:
    """The driver's companion (see the module docstring). Without arguments it only checks and remembers.

    print_after  stages to print ("all" for every one); `write` receives the text
    dump         directory for NN_stage.txt, and NN_stage.diff with `diff`
    stop_after   raise Stopped after this stage
    progress     called with the name of each finished stage and its seconds
    reproduce    command line that gets this far again, added to errors
    """

    print_after: frozenset[str] = frozenset()
    dump: Path | None = None
    diff: bool = False
    stop_after: str = ""
    checking: bool = True
    write: Callable[[str], None] = print
    progress: Callable[[str, float], None] | None = None
    reproduce: str = ""
    records: list[Record] = field(default_factory=list)
    mark: float = field(default_factory=time.perf_counter)

    def __call__(self, stage: str, result: T, view: IR | None = None, *, scope: str = "", last: bool = True) -> T:
        """Note that `stage` gave `result` and hand it on. `view` is what to show when `result` is no IR level.

        Not `last`: the stage goes on with other graphs, so it is not the place to stop yet.
        """
        seconds = time.perf_counter() - self.mark
        shown = result if view is None and isinstance(result, _LEVELS) else view
        before = self._last(scope)
        unchanged = shown is not None and before is not None and shown is before.view
        start = time.perf_counter()
        if self.checking and shown is not None and not unchanged:
            check(shown)
        record = Record(stage, result, shown, seconds, time.perf_counter() - start, unchanged, scope)
        self.records.append(record)
        if self.progress is not None:
            self.progress(record.title, seconds)
        self._print(record)
        self._dump(record, before)
        if last:
            self.done(stage, result)
        self.mark = time.perf_counter()
        return result

    def done(self, stage: str, result: object) -> None:
        """The stage is through with all graphs."""
        if stage == self.stop_after:
            raise Stopped(stage, result)

    def stage(self, name: str) -> _Stage:
        """`with trace.stage(name):` errors that pass through get a note (stage, and the command to get there again)."""
        return _Stage(name, self.reproduce)

    def result(self, stage: str) -> object:
        """What a stage returned for the main graph (the last one of that name); KeyError if it has not run."""
        for record in reversed(self.records):
            if record.stage == stage and not record.scope:
                return record.result
        raise KeyError(stage)

    def results(self, stage: str) -> tuple[object, ...]:
        """What a stage returned for every graph, the main one first; the last result of each."""
        found = {r.scope: r.result for r in self.records if r.stage == stage}
        return tuple(found.values())

    def table(self) -> str:
        """Seconds per stage, one line each, and the sum."""
        rows = [(r.title, r.seconds, r.checking, " (unchanged)" if r.unchanged else "") for r in self.records]
        total = sum(r.seconds + r.checking for r in self.records)
        width = max((len(r.title) for r in self.records), default=5)
        lines = [f"{s:<{width}}  {t:8.3f} s  check {c:7.3f} s{u}" for s, t, c, u in rows]
        return "\n".join([*lines, f"{'total':<{width}}  {total:8.3f} s"])

    def _last(self, scope: str) -> Record | None:
        return next((r for r in reversed(self.records) if r.view is not None and r.scope == scope), None)

    def _print(self, record: Record) -> None:
        if record.view is None or not self.print_after & {record.stage, "all"}:
            return
        self.write(f"; after {record.title}" + (" (unchanged)" if record.unchanged else f"\n{show(record.view)}"))

    def _dump(self, record: Record, before: Record | None) -> None:
        if self.dump is None or record.view is None:
            return
        self.dump.mkdir(parents=True, exist_ok=True)
        # A scope's name is the user's text: its number in the file, its name in the first line.
        name = f"{len(self.records):02d}_{record.stage}" + ("_body" if record.scope else "")
        head = f"; {record.scope}\n" if record.scope else ""
        text = head + ("(unchanged)\n" if record.unchanged else show(record.view))
        (self.dump / f"{name}.txt").write_text(text, encoding="utf-8")
        if self.diff and before is not None and before.view is not None and not record.unchanged:
            old, new = show(before.view).splitlines(), text.splitlines()
            delta = difflib.unified_diff(old, new, before.stage, record.stage, lineterm="")
            (self.dump / f"{name}.diff").write_text("\n".join(delta) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Stage:
    name: str
    reproduce: str

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, Stopped):
            add_note(error, self.name, self.reproduce)


def add_note(error: BaseException, stage: str, reproduce: str = "") -> None:
    """Say in which stage an error happened (the innermost one wins) and how to get there again."""
    if any(note.startswith("  stage: ") for note in getattr(error, "__notes__", ())):
        return
    error.add_note(f"  stage: {stage}")
    if reproduce:
        error.add_note(f"  again: {reproduce} --stop-after {stage}")


__all__ = ["Record", "Stopped", "Trace", "add_note"]
