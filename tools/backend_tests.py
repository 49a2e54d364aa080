"""Run onnx's own backend tests (onnx.backend.test.BackendTest) against onnxfuse.backend, and against onnxruntime alone.

    python tools/backend_tests.py [--filter TEXT] [--jobs 2] [--mode full] [--verbose]

A test that fails with onnxfuse and not with onnxruntime is a failure: exit 2. The tests run in child processes, in
portions; one that kills its process counts as failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import unittest
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep
from onnx.backend.test.runner import BackendIsNotSupposedToImplementIt, Runner

PORTION = 200  # tests per child
TIMEOUT = 3600.0  # seconds for one portion


class PlainRep(BackendRep):
    """A model in onnxruntime as it is."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """See BackendRep."""
        from onnxfuse.verify import ort

        names = [i.name for i in self.session.get_inputs()]
        if len(inputs) > len(names):
            names += [i.name for i in self.session.get_overridable_initializers()]
        feeds = {n: v for n, v in zip(names, inputs, strict=False) if v is not None}
        return tuple(ort.run(self.session, feeds).values())


class Plain(Backend):
    """onnxruntime alone, to compare with."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> PlainRep:
        """See Backend."""
        from onnxfuse.errors import UsageError
        from onnxfuse.verify import ort

        try:
            return PlainRep(ort.session(model))
        except UsageError as error:
            raise BackendIsNotSupposedToImplementIt(error.why) from error

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Only the CPU."""
        return device == "CPU"


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.child:
        return _child(args.child, args.mode)
    names = [name for name, _ in _tests(Plain) if args.filter in name]
    portions = [names[i : i + PORTION] for i in range(0, len(names), PORTION)]
    with ThreadPoolExecutor(args.jobs) as pool:
        made = [r for part in pool.map(lambda p: _portion(p, args.mode), portions) for r in part]
    print(report(made, args.verbose))
    return 2 if any(_ours(r) for r in made) else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", default="", help="only tests whose name contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="child processes at a time")
    parser.add_argument("--mode", default="full", help="fusion mode")
    parser.add_argument("--verbose", action="store_true", help="name the tests that onnxruntime fails too")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


Verdict = tuple[str, str, str]  # name; what onnxruntime alone says, and onnxfuse: ok, skipped, or what is wrong


def _ours(verdict: Verdict) -> bool:
    _, plain, fused = verdict
    return plain == "ok" and fused != "ok"


def report(made: list[Verdict], verbose: bool = False) -> str:
    """Totals and failures."""
    lines = [f"tests                        {len(made):5d}"]
    for title, column in (("onnxruntime", 1), ("onnxfuse", 2)):
        found = [r[column] for r in made]
        lines.append(f"{title:11s} passes           {found.count('ok'):5d}")
        lines.append(f"{title:11s} does not have it {found.count('skipped'):5d}")
    failed = [r for r in made if _ours(r)]
    lines.append(f"onnxfuse fails what onnxruntime passes {len(failed):5d}")
    lines += [f"  {name}: {fused}" for name, _, fused in failed]
    if verbose:
        lines += [f"  both: {name}: {plain}" for name, plain, _ in made if plain not in ("ok", "skipped")]
    return "\n".join(lines)


# ---- children


def _portion(names: list[str], mode: str) -> list[Verdict]:
    """The verdicts of a portion; behind a test that kills the child another one goes on."""
    made: list[Verdict] = []
    while len(made) < len(names):
        rest = names[len(made) :]
        command = [sys.executable, __file__, "--mode", mode, "--child", ",".join(rest)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=TIMEOUT, check=False
        )
        made += [tuple(json.loads(line[1:])) for line in done.stdout.splitlines() if line.startswith("@")]
        if len(made) < len(names):
            made.append((names[len(made)], "ok", f"process died: exit {done.returncode}"))
    return made


def _child(names: str, mode: str) -> int:
    from onnxfuse.backend import OnnxfuseBackend

    class Fused(OnnxfuseBackend):
        @classmethod
        def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> Any:
            return super().prepare(model, device, fusion_mode=mode)

    plain, fused = dict(_tests(Plain)), dict(_tests(Fused))
    for name in names.split(","):
        print("@" + json.dumps([name, _run(plain[name]), _run(fused[name])]), flush=True)
    return 0


def _tests(backend: type[Backend]) -> Iterable[tuple[str, unittest.TestCase]]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # the cases overflow on purpose
        suite = Runner(backend, __name__).test_suite
    tests = [t for t in suite if isinstance(t, unittest.TestCase)]
    return [(t.id().rpartition(".")[2], t) for t in tests if t.id().endswith("_cpu")]


def _run(test: unittest.TestCase) -> str:
    result = unittest.TestResult()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        test.run(result)
    if result.skipped:
        return "skipped"
    wrong = [text for _, text in (*result.failures, *result.errors)]
    return " ".join(wrong[0].strip().splitlines()[-1].split())[:300] if wrong else "ok"


if __name__ == "__main__":
    sys.exit(main())
