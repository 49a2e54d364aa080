"""Trace: the one hook per stage. Check, remember, print, dump, compare, time, stop.

    graph = trace("read", read(model))

A stage that returns the object it was given prints as "(unchanged)". What is not an IR level (a library, a bundle) is
remembered and timed only.
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

    def __call__(self, stage: str, result: T, view: IR | None = None) -> T:
        """Note that `stage` gave `result` and hand it on. `view` is what to show when `result` is no IR level."""
        seconds = time.perf_counter() - self.mark
        shown = result if view is None and isinstance(result, _LEVELS) else view
        before = self._last()
        unchanged = shown is not None and before is not None and shown is before.view
        start = time.perf_counter()
        if self.checking and shown is not None and not unchanged:
            check(shown)
        self.records.append(Record(stage, result, shown, seconds, time.perf_counter() - start, unchanged))
        if self.progress is not None:
            self.progress(stage, seconds)
        self._print(stage, shown, unchanged)
        self._dump(stage, shown, before, unchanged)
        if stage == self.stop_after:
            raise Stopped(stage, result)
        self.mark = time.perf_counter()
        return result

    def stage(self, name: str) -> _Stage:
        """`with trace.stage(name):` errors that pass through get a note (stage, and the command to get there again)."""
        return _Stage(name, self.reproduce)

    def result(self, stage: str) -> object:
        """What a stage returned (the last one of that name); KeyError if it has not run."""
        for record in reversed(self.records):
            if record.stage == stage:
                return record.result
        raise KeyError(stage)

    def table(self) -> str:
        """Seconds per stage, one line each, and the sum."""
        rows = [(r.stage, r.seconds, r.checking, " (unchanged)" if r.unchanged else "") for r in self.records]
        total = sum(r.seconds + r.checking for r in self.records)
        width = max((len(r.stage) for r in self.records), default=5)
        lines = [f"{s:<{width}}  {t:8.3f} s  check {c:7.3f} s{u}" for s, t, c, u in rows]
        return "\n".join([*lines, f"{'total':<{width}}  {total:8.3f} s"])

    def _last(self) -> Record | None:
        return next((r for r in reversed(self.records) if r.view is not None), None)

    def _print(self, stage: str, shown: IR | None, unchanged: bool) -> None:
        if shown is None or not self.print_after & {stage, "all"}:
            return
        self.write(f"; after {stage}" + (" (unchanged)" if unchanged else f"\n{show(shown)}"))

    def _dump(self, stage: str, shown: IR | None, before: Record | None, unchanged: bool) -> None:
        if self.dump is None or shown is None:
            return
        self.dump.mkdir(parents=True, exist_ok=True)
        name = f"{len(self.records):02d}_{stage}"
        text = "(unchanged)\n" if unchanged else show(shown)
        (self.dump / f"{name}.txt").write_text(text, encoding="utf-8")
        if self.diff and before is not None and before.view is not None and not unchanged:
            old, new = show(before.view).splitlines(), text.splitlines()
            delta = difflib.unified_diff(old, new, before.stage, stage, lineterm="")
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
