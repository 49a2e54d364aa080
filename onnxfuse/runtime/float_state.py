"""What kernels may not do to floating point, as far as a thread of x86-64 can tell (elsewhere: nothing).

Kernels leave its settings as they are. And they calculate with nothing but what was written: lanes nobody wants are
often made along with others, of whatever memory holds, and of denormal numbers that takes a hundred times as long.
`soil` and `fill` put such numbers where nothing is written yet, `denormals` tells whether one was met.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from onnxfuse.codegen.cpu import FLOAT_STATE
from onnxfuse.codegen.object import Loaded, compile_module, load_object
from onnxfuse.target import TARGETS

DENORMAL = 0x00010001  # of every width, from 16 bits to 64

_Functions = tuple[Callable[[], int], Callable[[], int], Callable[[int], None]]


@functools.cache
def _functions() -> tuple[Loaded, _Functions] | None:
    """`float_state`, `denormals` and `soil`, and what keeps their code alive; None on machines of another kind."""
    target = next((t for t in TARGETS if t.triple.startswith("x86_64")), None)
    if target is None or platform.machine() not in ("x86_64", "AMD64"):
        return None
    baseline = replace(target, cpu="x86-64", features=())
    names = ("float_state", "denormals", "soil")
    code = load_object(compile_module(FLOAT_STATE, baseline, exports=names).data, baseline)
    state, met, soil = (code.address(n) for n in names)
    ask, put = ctypes.CFUNCTYPE(ctypes.c_int64), ctypes.CFUNCTYPE(None, ctypes.c_int32)
    return code, (ask(state), ask(met), put(soil))


def float_state() -> int:
    """Rounding, flushing of denormals and masks of this thread as one number."""
    found = _functions()
    return 0 if found is None else found[1][0]()


def denormals() -> bool:
    """Whether an operation has met a denormal number since it was last forgotten."""
    found = _functions()
    return found is not None and found[1][1]() != 0


def soil(number: int) -> None:
    """Fill the stack that the next calls will use with a number of 32 bits; forget which operands were met."""
    found = _functions()
    if found is not None:
        found[1][2](number)


def fill(memory: np.ndarray, number: int) -> None:
    """Fill bytes with a number of 32 bits."""
    memory[: memory.size // 4 * 4].view(np.int32)[...] = number
