"""Every way onnxfuse can say no: exceptions with a stable code, and `Refusal`, the same as a value.

`UsageError`   the caller can fix it (bad path, bad flag, invalid model): exit code 1.
`Unsupported`  we decline; the driver leaves the nodes as they are and records why.
`IRError`      a check of our own data failed: our bug.
`CompileError` LLVM or the linker failed.
`VerifyError`  the result does not agree with onnxruntime: exit code 2.

Fields: `code` (stable API), `what` (names node and op), `why` (numbers), `hint` (what to do).
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST = 4000  # characters of one part of a message: names in models can be of any length


def printable(text: str) -> str:
    """Text from a model, safe to print: control characters and marks of writing direction as escapes, not too long."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 4 :]}"
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


class OnnxfuseError(Exception):
    """Base of all errors raised on purpose; prints as `error[CODE] what`, then why and hint."""

    def __init__(self, code: str, what: str, why: str = "", hint: str = "") -> None:
        what, why, hint = (printable(t) for t in (what, why, hint))
        super().__init__(code, what, why, hint)
        self.code = code
        self.what = " ".join(what.splitlines())
        self.why = why
        self.hint = hint

    def __str__(self) -> str:
        lines = [f"error[{self.code}] {self.what}"]
        if self.why:
            lines.append(f"  why:  {self.why}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


class UsageError(OnnxfuseError):
    """The caller can fix it: bad input, bad flag, invalid model."""


class Unsupported(OnnxfuseError):  # noqa: N818 - a refusal, not a failure
    """We decline to compile something; the nodes stay as they are."""

    def refusal(self) -> Refusal:
        """The same refusal as a value, for the decision record."""
        return Refusal(self.code, f"{self.what}: {self.why}" if self.why else self.what)


class IRError(OnnxfuseError):
    """A well-formedness check of our own data failed: a bug in onnxfuse."""


class CompileError(OnnxfuseError):
    """LLVM or the linker failed on code we generated."""


class VerifyError(OnnxfuseError):
    """The optimized model does not agree with onnxruntime on the original."""


# What a slip of ours raises. Caught where one kernel is made, so that it costs a kernel and not the model.
SLIPS = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def slip(error: Exception) -> Unsupported:
    """A bug met while one kernel was made, as a refusal of that kernel."""
    return Unsupported("UN_INTERNAL", "a bug in onnxfuse", f"{type(error).__name__}: {error}"[:300])


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason for not doing something: a stable code and the numbers as text."""

    code: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.code} ({self.why})" if self.why else self.code
