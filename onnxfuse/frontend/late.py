"""Modules that others import at the top and hardly ever need are run when first used."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Late(MetaPathFinder):
    """Finds what the others find, for some names only, and puts off running it."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.names:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if isinstance(spec.loader, Loader) and hasattr(spec.loader, "exec_module"):
                    spec.loader = importlib.util.LazyLoader(spec.loader)
                return spec
        return None


@contextmanager
def late(*names: str) -> Iterator[None]:
    """Meanwhile these modules, if they are imported, are not run before something of them is used."""
    finder = _Late(frozenset(names))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


# sympy takes a third of a second to load; onnx_ir uses it for arithmetic on symbolic dimensions, which we do in ir.
with late("sympy", "onnx_ir._symbolic_shapes"):
    import onnx_ir  # noqa: F401
