"""Bodies of control flow: where their inputs come from, and the files the writer hands to the comparison."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from onnxfuse.ir.graph import Value


class Role(StrEnum):
    """Where a formal input comes from."""

    COUNTER = "counter"  # the number of the iteration
    GOES_ON = "goes on"  # the condition: True whenever the body runs
    STATE = "state"  # `source` in the first iteration, then the body's own output number `after`
    SLICE = "slice"  # `source` without the axis that is iterated over


@dataclass(frozen=True, slots=True)
class Formal:
    """One formal input of a body."""

    role: Role
    source: Value | None = None
    axis: int = 0
    backwards: bool = False
    after: int = -1


@dataclass(frozen=True, slots=True)
class FormalInput:
    """A formal input and where it comes from: `role` is a Role."""

    name: str
    role: str
    source: str = ""
    axis: int = 0
    backwards: bool = False


@dataclass(frozen=True, slots=True)
class BodyFiles:
    """A body before and after, in files. `parent` 0 is the main graph; `free`: random inputs make sense."""

    name: str
    number: int
    parent: int
    formals: tuple[FormalInput, ...]
    free: bool
    before: Path
    after: Path
