"""Tables for people. The only place that imports rich; every function takes plain facts and returns something to print.

The data behind each table is printed by `--json` instead; nothing is computed here but sums and words.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from onnxfuse.codes import advice, meaning, sentence
from onnxfuse.explain import Crossing, Explanation, Summary, blocking_line

if TYPE_CHECKING:  # onnxruntime is not needed to print a table
    from onnxfuse.doctor import Finding
    from onnxfuse.inspection import Inspection, LeftNode
    from onnxfuse.ir.partition import Decision
    from onnxfuse.tuning import Tuning
    from onnxfuse.verify.bench import BenchReport, Timing
    from onnxfuse.verify.compare import Report
    from onnxfuse.verify.values import OutputReport

_WIDTH = 120  # columns when the output is not a terminal
_SHOWN_REASONS = 3  # rows of one code before "n more reasons"
_SHOWN_NAMES = 4  # of a list of names before "and n more"


def show(*parts: RenderableType, stderr: bool = False) -> None:
    """Print to standard output (or error): in colour on a terminal, plain and wide elsewhere."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else _WIDTH
    Console(file=stream, width=width, highlight=False, markup=False, emoji=False).print(*parts, sep="\n")


# ---- optimize


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of files; None where there is no file."""

    before: int | None = None
    after: int | None = None
    library: int | None = None


def summary(before: Mapping[str, int], after: Mapping[str, int], facts: Inspection, sizes: Sizes) -> RenderableType:
    """Op counts of both models side by side, then what the groups did."""
    table = Table(title="", header_style="bold")
    table.add_column("")
    table.add_column("Original Model", justify="right")
    table.add_column("Optimized Model", justify="right")
    fused = sum(n for op, n in after.items() if op.startswith("onnxfuse::"))
    for op in sorted(set(before) | {op for op in after if not op.startswith("onnxfuse::")}):
        table.add_row(op, *_better(before.get(op, 0), after.get(op, 0)))
    table.add_section()
    table.add_row("Nodes", *_better(sum(before.values()), sum(after.values())))
    table.add_row("Groups", "", str(fused))
    table.add_row("Fused nodes", "", f"{facts.fused_nodes} of {facts.fused_nodes + len(facts.left)}")
    table.add_row("Largest group", "", str(max((len(g.members) for g in facts.groups), default=0)))
    table.add_row("Left nodes", "", str(len(facts.left)))
    table.add_row("Bytes between kernels", *_better(facts.bytes_before, facts.bytes_after, nbytes))
    if sizes.before is not None or sizes.after is not None:
        table.add_row("Model size", *(nbytes(n) if n is not None else "" for n in (sizes.before, sizes.after)))
    if sizes.library is not None:
        table.add_row("Library size", "", nbytes(sizes.library))
    return Group(table, *([left_nodes(facts.left)] if facts.left else []))


def _better(before: int, after: int, text: object = str) -> tuple[str, Text]:
    """Both numbers, the second in green where it is smaller."""
    write = text if callable(text) else str
    return write(before), Text(write(after), style="bold green" if after < before else "")


def left_nodes(left: Sequence[LeftNode]) -> RenderableType:
    """What stayed with onnxruntime: one row per code and reason, nodes counted by op."""
    table = Table(title="Left with onnxruntime", title_justify="left", header_style="bold")
    for name in ("code", "nodes", "ops", "why"):
        table.add_column(name, justify="right" if name == "nodes" else "left", overflow="fold")
    groups: dict[tuple[str, str], list[LeftNode]] = {}
    for node in left:
        groups.setdefault((node.code, node.why), []).append(node)
    shown: Counter[str] = Counter()
    others: dict[str, list[LeftNode]] = {}
    for (code, why), nodes in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        shown[code] += 1
        if shown[code] > _SHOWN_REASONS:
            others.setdefault(code, []).extend(nodes)
            continue
        table.add_row(code, str(len(nodes)), _names(dict.fromkeys(n.op for n in nodes)), why)
    for code, nodes in others.items():
        why = f"{shown[code] - _SHOWN_REASONS} more reasons (`onnxfuse inspect` --json)"
        table.add_row(code, str(len(nodes)), _names(dict.fromkeys(n.op for n in nodes)), why)
    return table


def tuning(found: Tuning) -> RenderableType:
    """Every kernel against onnxruntime on the same nodes, slowest ratio first; then the model as a whole."""
    table = Table(title="Measured against onnxruntime", title_justify="left", header_style="bold")
    table.add_column("kernel", overflow="fold")
    for name in ("calls", "ms", "ratio", "quartiles"):
        table.add_column(name, justify="right")
    table.add_column("")
    for k in sorted(found.kernels, key=lambda k: k.ratio):
        kept = "" if not k.loses else "slower"
        spread = f"{k.ratio_low:.2f}-{k.ratio_high:.2f}"
        table.add_row(k.op_type, str(k.calls), f"{k.ms:.3f}", f"{k.ratio:.2f}", spread, kept)
    whole = f"the model: {found.ratio:.2f} times as fast as the original; {found.rolled_back} group(s) given back"
    return Group(table, whole)


def speed(found: Timing) -> str:
    """One line: how the result compares with what onnxruntime makes of the original."""
    spread = f"{found.ratio_low:.2f}-{found.ratio_high:.2f}"
    if not found.clear:
        return f"speed not measured: this machine is too busy to tell (quartiles of the ratio {spread})"
    line = f"runs at {found.ratio:.2f} times the speed of the original in onnxruntime here (quartiles {spread})"
    return f"{line}; --tune gives back what onnxruntime runs faster" if found.ratio_high < 1.0 else line


def _names(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _SHOWN_NAMES} more" if len(found) > _SHOWN_NAMES else ""
    return ", ".join(found[:_SHOWN_NAMES]) + more


def nbytes(count: int) -> str:
    """A number of bytes in the largest unit that keeps it at least 1."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


# ---- inspect


def groups(facts: Inspection) -> RenderableType:
    """One row per group."""
    table = Table(title=f"{len(facts.groups)} groups", title_justify="left", header_style="bold")
    for name in ("group", "kind", "template", "ops", "reads", "writes", "bytes"):
        table.add_column(name, justify="right" if name in ("reads", "writes", "bytes") else "left", overflow="fold")
    for g in facts.groups:
        ops = " ".join(m.op for m in g.members[:8]) + (f" and {len(g.members) - 8} more" if len(g.members) > 8 else "")
        row = (g.name, g.kind, g.template or "", ops, str(len(g.reads)), str(len(g.writes)), nbytes(g.bytes))
        table.add_row(*(Text(cell) for cell in row))
    return Group(table, *([left_nodes(facts.left)] if facts.left else []))


# ---- explain

SHOWN = 3  # examples of a code
NO_KERNEL = "nothing, no kernel runs the two together"


def explanation(said: Explanation | Summary) -> RenderableType:
    """One node or edge: the verdict, the rule that decided it, then every record. All of them: one row per code."""
    if isinstance(said, Summary):
        return reasons(said)
    lines: list[RenderableType] = [Text(said.verdict, style="bold")]
    if said.blocking is not None:
        lines.append(Text(f"first blocking rule: {blocking_line(said.blocking)}", style="bold red"))
        lines.append(Text(f"what to do: {advice(said.blocking.code) or NO_KERNEL}", style="bold"))
    if said.subjects:
        rows = [(s.name, s.node, s.op, s.fate) for s in said.subjects]
        lines.append(listing(("value", "node", "op", "where"), rows))
    if said.decisions:
        columns = ("stage", "producer -> consumer", "code", "numbers", "meaning", "in the end")
        records = [_decision(d, one) for d, one in zip(said.decisions, said.together, strict=True)]
        lines.append(listing(columns, records, ("stage", "code", "in the end")))
    lines += [Text(f"simplification not done: {n} - {meaning(n.code)}") for n in said.notes]
    return Group(*lines)


def _decision(d: Decision, together: bool) -> tuple[str, ...]:
    sign = "->" if d.relation == "vertical" else "+"
    end = "one kernel" if together else "apart"
    return (d.stage, f"{d.a} {sign} {d.b}", d.code, sentence(d.code, d.numbers), meaning(d.code), end)


def reasons(found: Summary) -> RenderableType:
    """What keeps the kernels apart, then every decision on the way: one row per code."""
    lines: list[RenderableType] = []
    if found.crossings:
        lines += [Text("Values that go from one kernel to another, by what keeps the two apart", style="bold")]
        lines += [_crossings(found.crossings), Text("Every decision on the way (--edge, --node: one of them)", "bold")]
    return Group(*lines, _codes(found))


def _crossings(crossings: Sequence[Crossing]) -> RenderableType:
    """Per code: how many values and bytes, why, what to do, and a few of them; most bytes first."""
    by: dict[str, list[Crossing]] = {}
    for c in crossings:
        by.setdefault(c.decision.code, []).append(c)
    lines = []
    for code, found in sorted(by.items(), key=lambda kv: -sum(c.nbytes for c in kv[1])):
        size = sum(c.nbytes for c in found) / 2**20
        numbers = Counter(sentence(code, c.decision.numbers) for c in found)
        lines.append(Text(f"{len(found):4} values {size:9.2f} MiB  {code}: {meaning(code)}", style="bold"))
        lines += [Text(f"       {n} x {text}") for text, n in numbers.most_common(SHOWN) if text]
        if len(numbers) > SHOWN:
            lines.append(Text(f"       and {len(numbers) - SHOWN} more (--json)"))
        if advice(code):
            lines.append(Text(f"       what to do: {advice(code)}"))
        lines += [Text(f"       {c.value}: {c.before} -> {c.after}", style="dim") for c in found[:SHOWN]]
    return Group(*lines)


def _codes(found: Summary) -> RenderableType:
    """One row per code: how often, and a few of the pairs (producer->consumer) or nodes."""
    table = Table(header_style="bold")
    for name in ("stage", "verdict", "code", "count", "meaning", "for example"):
        right, firm = name == "count", name in ("stage", "verdict", "code")
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=firm)
    for r in found.rows:
        row = (r.stage, r.verdict, r.code, str(r.count), meaning(r.code), "\n".join(r.examples))
        table.add_row(*(Text(cell) for cell in row))
    return table if found.rows else Text("no decision was taken, and every node is compiled")


# ---- compare


def comparison(report: Report, *, every_run: bool = False) -> RenderableType:
    """Per output the worst run (or every run), and the verdict."""
    title = f"{report.candidate} " + (f"with {report.libraries[0]}" if report.libraries else "without a library")
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("output", "shape", "mismatches", "max abs", "max rel", "max ulp", "tolerance", ""):
        table.add_column(name, justify="right" if name in ("mismatches", "max abs", "max rel", "max ulp") else "left")
    rows = [o for r in report.runs for o in r.outputs] if every_run else report.worst()
    for out in rows:
        table.add_row(*_output_row(out))
    lines: list[RenderableType] = [table] if rows else []
    lines += [Text(line) for line in _complaints(report, rows)]
    verdict = Text(report.summary(), style="bold green" if report.ok else "bold red")
    return Group(*lines, verdict)


def _output_row(out: OutputReport) -> Sequence[RenderableType]:
    shape = f"{out.dtype}[{','.join(map(str, out.shape))}]"
    word = Text("ok", style="green") if out.ok else Text("DIFFERS", style="bold red")
    if out.problem:
        return (Text(out.name), Text(shape), "", "", "", "", out.tolerance, word)
    numbers = (f"{out.max_abs:.3g}", f"{out.max_rel:.3g}", str(out.max_ulp))
    return (Text(out.name), Text(shape), f"{out.mismatches}/{out.total}", *numbers, out.tolerance, word)


def _complaints(report: Report, rows: Iterable[OutputReport]) -> list[str]:
    """What the table has no room for: shape differences, first bad elements, refusals, notes."""
    lines: list[str] = []
    for out in rows:
        if out.problem:
            lines.append(f"{out.name}: {out.problem}")
        elif out.first is not None:
            where = ",".join(map(str, out.first.index))
            lines.append(f"{out.name}[{where}]: reference {out.first.reference}, candidate {out.first.candidate}")
        if out.signed_zeros:
            lines.append(f"{out.name}: {out.signed_zeros} zeros differ in sign (allowed)")
    lines += [
        f"{run.label}: the candidate refuses what the reference accepts: {run.error}"
        for run in report.runs
        if run.error
    ]
    lines += [f"fixed dimensions: {text}" for text in report.narrowed]
    return lines


# ---- bench


def timings(report: BenchReport) -> RenderableType:
    """Milliseconds and ratios; the ratio is that of the first row."""
    shapes = ", ".join(f"{k}[{','.join(map(str, v))}]" for k, v in report.inputs.items())
    title = f"{shapes}; {report.threads or 'all'} thread(s), {report.rounds} interleaved rounds"
    table = Table(title=Text(title), title_justify="left", header_style="bold")
    for name in ("model", "median ms", "best ms", "speed-up", "quartiles", "load ms"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for t in report.timings:
        ratio = Text(f"{t.ratio:.2f}x", style="bold green" if t.ratio_low > 1 else "red" if t.ratio_high < 1 else "")
        quartiles = f"{t.ratio_low:.2f} - {t.ratio_high:.2f}"
        table.add_row(t.name, f"{t.median_ms:.3f}", f"{t.best_ms:.3f}", ratio, quartiles, f"{t.load_ms:.0f}")
    return table


# ---- lists


def listing(columns: Sequence[str], rows: Iterable[Sequence[str]], firm: Sequence[str] = ()) -> RenderableType:
    """A plain table of strings; the columns in `firm` are never broken into lines."""
    table = Table(header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name in firm)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


# ---- doctor


def doctor(findings: Sequence[Finding]) -> RenderableType:
    """One line per check; a hint below the one it belongs to."""
    table = Table(box=None, pad_edge=False, show_header=False)
    colours = {"ok": "green", "failed": "red", "skipped": "yellow"}
    for f in findings:
        table.add_row(Text(str(f.status), style=colours[f.status]), f.check, f.found)
        if f.hint:
            table.add_row("", "", Text(f"hint: {f.hint}", style="bold"))
    return table
