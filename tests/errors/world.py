"""What the scenarios of error messages share: where they happen, and how they are registered."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxfuse import cli
from onnxfuse.errors import OnnxfuseError

HERE = "<here>"  # stands for the directory of a scenario


@dataclass(frozen=True)
class World:
    """An empty current directory, the command line, and a way to make the machine difficult."""

    here: Path
    patch: pytest.MonkeyPatch
    captured: Callable[[], Any]

    def model(
        self,
        body: str = "y = Exp(x)",
        signature: str = "(float[4] x) => (float[4] y)",
        *,
        name: str = "in.onnx",
        opset: int = 17,
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> onnx.ModelProto:
        """Write a small model."""
        proto = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {signature} {{ {body} }}')
        proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in (weights or {}).items())
        self.save(proto, name)
        return proto

    def save(self, proto: onnx.ModelProto, name: str = "in.onnx") -> None:
        """Write a model that onnx itself might refuse."""
        (self.here / name).write_bytes(proto.SerializeToString())

    def cli(self, *arguments: str) -> str:
        """What the command says on standard error, when it fails as it should."""
        code = cli.run_arguments(arguments)
        said = str(self.captured().err)
        assert code in (1, 2), said
        return said

    def optimize(self, *flags: str) -> str:
        """`onnxfuse optimize in.onnx out.onnx ...`."""
        said = self.cli("optimize", "in.onnx", "out.onnx", *flags)
        assert not (self.here / "out.onnx").exists()
        return said

    def error(self, action: Callable[[], object]) -> str:
        """The error a call raises."""
        with pytest.raises(OnnxfuseError) as caught:
            action()
        return str(caught.value)


@dataclass(frozen=True)
class Scenario:
    """A way to make an error appear, and the message: what, why and hint, as they are printed."""

    code: str
    run: Callable[[World], str]
    text: str


SCENARIOS: list[Scenario] = []


def shows(code: str, what: str, why: str = "", hint: str = "") -> Callable[[Callable[[World], str]], None]:
    """The decorated function makes this message appear; `...` stands for what the system or a version says."""
    text = f"error[{code}] {what}"
    text += f"\n  why:  {why}" if why else ""
    text += f"\n  hint: {hint}" if hint else ""

    def register(run: Callable[[World], str]) -> None:
        SCENARIOS.append(Scenario(code, run, text))

    return register


@functools.cache
def pattern(text: str) -> re.Pattern[str]:
    """The text, with anything in the place of its dots."""
    return re.compile(r"(?s:.*)".join(map(re.escape, text.split("..."))))
