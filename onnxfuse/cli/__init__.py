"""The command line: thin adapters from flags to the functions that do the work. The only place that imports typer.

Exit codes: 0 done; 1 the input, a flag or the machine is at fault (one `error[CODE]` on standard error); 2 the
optimized model does not agree with the original (nothing is written), or `doctor` found something missing. Heavy
modules are imported inside the commands, so that `onnxfuse --help` answers at once.
"""

from __future__ import annotations

from onnxfuse.cli.entry import main, run_arguments

__all__ = ["main", "run_arguments"]
