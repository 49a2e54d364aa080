"""`onnxfuse rules`, `ops`, `targets` and `doctor`: what there is to know without a model."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated

import typer

from onnxfuse.cli.app import app
from onnxfuse.cli.options import Json
from onnxfuse.cli.terminal import print_json
from onnxfuse.errors import UsageError


@app.command(
    epilog="""Examples:

    onnxfuse rules
    onnxfuse rules NF_A_
    onnxfuse rules NF_NODE_CAP --json
""",
)
def rules(
    code: Annotated[
        str | None, typer.Argument(metavar="[CODE]", help="Only this code, or codes that begin so.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """List every code: who gives it, what it means, the threshold behind it, where the rule comes from."""
    from onnxfuse.codes import CODES, default

    found = [c for c in CODES if code is None or c.code == code] or [c for c in CODES if c.code.startswith(str(code))]
    if not found:
        near = get_close_matches(str(code), [c.code for c in CODES])
        hint = f"did you mean: {', '.join(near)}" if near else "onnxfuse rules lists all"
        raise UsageError("E_NO_CODE", f"there is no code {code!r}", hint=hint)
    if json:
        print_json(
            [
                {
                    "code": c.code,
                    "stage": c.stage,
                    "meaning": c.meaning,
                    "threshold": c.threshold or None,
                    "default": default(c),
                    "origin": c.origin,
                    "optional": c.optional,
                }
                for c in found
            ]
        )
        return
    from onnxfuse import report

    rows = [(c.code + "*" * c.optional, c.stage, c.meaning, c.threshold, _text(default(c)), c.origin) for c in found]
    report.show(report.listing(("code", "stage", "meaning", "threshold", "default", "origin"), rows, ("code", "stage")))
    print("* can be left out with --skip-fusion-patterns")


@app.command()
def ops(
    name: Annotated[str | None, typer.Argument(metavar="[OP]", help="Only this operator.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """List the operators the op table knows, since which opset, and what becomes of them."""
    from onnxfuse.ops import entries

    found = [op for op in entries() if name is None or op.name == name]
    if not found:
        why = "operators that are not in the table stay with onnxruntime, unchanged"
        raise UsageError("E_NO_OP", f"the op table has no {name!r}", why)
    rows = [(str(op), str(op.since), str(op.family), op.reason or op.doc.partition("\n")[0]) for op in found]
    columns = ("op", "since", "family", "meaning")
    if json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    from onnxfuse import report

    report.show(report.listing(columns, rows))


def _text(number: object) -> str:
    return "" if number is None else str(number)


@app.command()
def targets(json: Json = False) -> None:
    """List the CPUs code can be generated for; `native` is the widest this machine has."""
    from onnxfuse.codegen.object import host_features
    from onnxfuse.target import TARGETS, by_name

    native = by_name("native", host_features()).name
    rows = [
        (t.name, t.triple, str(t.vector_bits), " ".join(t.features), "native" if t.name == native else "")
        for t in TARGETS
    ]
    columns = ("name", "triple", "vector bits", "features", "")
    if json:
        print_json(
            [dict(zip(("name", "triple", "vector_bits", "features", "native"), row, strict=True)) for row in rows]
        )
        return
    from onnxfuse import report

    report.show(report.listing(columns, rows))


@app.command(
    epilog="""Examples:

    onnxfuse doctor
    onnxfuse doctor --json > report.json
""",
)
def doctor(json: Json = False) -> int:
    """Check that this machine has what onnxfuse needs, up to a kernel that is built, loaded and run.

    Exit code 2 when something is missing, with a hint for each.
    """
    from onnxfuse.doctor import Status, examine

    findings = examine()
    if json:
        print_json([f.json() for f in findings])
    else:
        from onnxfuse import report

        report.show(report.doctor(findings))
    return 0 if all(f.status is Status.OK for f in findings) else 2
