"""The application: what `onnxfuse --help` says, and the options before a command."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

app = typer.Typer(
    name="onnxfuse",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Fuse an ONNX model for the CPU.

`onnxfuse optimize in.onnx out.onnx` writes out.onnx and, beside it, out.so: an onnxruntime custom-op library with a
compiled kernel for every group of operators. Any ONNX runtime loads out.onnx; with out.so registered, onnxruntime runs
the kernels.

Start with:

    onnxfuse optimize model.onnx fused.onnx      # verified against onnxruntime before anything is written
    onnxfuse compare model.onnx fused.onnx       # numbers, both in onnxruntime
    onnxfuse bench model.onnx fused.onnx         # speed, interleaved
    onnxfuse inspect fused.onnx                  # the groups, and why the rest was left
    onnxfuse explain model.onnx                  # every decision, by code; one node; one edge
    onnxfuse trace model.onnx                    # what each phase changed
    onnxfuse doctor                              # whether this machine has what is needed
""",
)


def _print_version(value: bool) -> None:
    if not value:
        return
    packages = ("onnxfuse", "onnx", "onnx-ir", "onnxruntime", "llvmlite", "ziglang", "numpy")
    print("\n".join(f"{name} {_version(name)}" for name in packages))
    raise typer.Exit(0)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print versions and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options before the command."""
