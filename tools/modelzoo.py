"""The manifest of real models: what there is, where the files lie, and what to feed them."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = ROOT / "models" / "manifest.toml"
SMALL = ROOT / "models"

Shapes = Mapping[str, tuple[int, ...]]
Feeds = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Model:
    """One entry of the manifest."""

    name: str
    family: str
    source: Mapping[str, Any]
    cases: tuple[Shapes, ...]
    bench: Shapes
    inputs: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)


def models_dir(flag: str | None = None) -> Path:
    """Where fetched models lie: the flag, $MODELS_DIR, or models/cache."""
    return Path(flag or os.environ.get("MODELS_DIR") or ROOT / "models" / "cache")


def load_manifest(path: Path = MANIFEST) -> dict[str, Model]:
    """The manifest by model name, in file order."""
    entries = tomllib.loads(path.read_text())["model"]
    models = [_entry(e) for e in entries]
    names = [m.name for m in models]
    if len(set(names)) != len(names):
        raise ValueError(f"{path}: a model name occurs twice")
    return {m.name: m for m in models}


def _entry(entry: dict[str, object]) -> Model:
    unknown = set(entry) - {"name", "family", "source", "inputs", "cases", "bench", "limits"}
    if unknown:
        raise ValueError(f"model {entry.get('name')}: unknown fields {sorted(unknown)}")
    cases = tuple(_shapes(c) for c in entry["cases"])  # type: ignore[attr-defined]
    return Model(
        name=str(entry["name"]),
        family=str(entry["family"]),
        source=dict(entry["source"]),  # type: ignore[call-overload]
        cases=cases,
        bench=_shapes(entry["bench"]) if "bench" in entry else cases[-1],  # type: ignore[arg-type]
        inputs=dict(entry.get("inputs", {})),  # type: ignore[call-overload]
        limits=dict(entry.get("limits", {})),  # type: ignore[call-overload]
    )


def _shapes(case: Mapping[str, Sequence[int]]) -> Shapes:
    return {name: tuple(shape) for name, shape in case.items()}


def select(names: Sequence[str], models: Mapping[str, Model]) -> list[Model]:
    """The named models (a name may be a prefix), or all."""
    if not names:
        return list(models.values())
    chosen = [m for m in models.values() if any(m.name == n or m.name.startswith(n) for n in names)]
    unmatched = [n for n in names if not any(m.name.startswith(n) for m in chosen)]
    if unmatched:
        raise SystemExit(f"no such model: {', '.join(unmatched)} (there are {', '.join(models)})")
    return chosen


def small_models() -> Iterator[Path]:
    """The committed small models."""
    yield from sorted(SMALL.glob("*.onnx"))


def graph_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Graph inputs that must be fed: those without an initializer."""
    given = {t.name for t in model.graph.initializer}
    return [i for i in model.graph.input if i.name not in given]


def feeds(model: Model, case: Shapes, dtypes: Mapping[str, np.dtype], seed: int = 0) -> Feeds:
    """Seeded input values of one case; the seed also depends on the shapes, so cases differ."""
    rng = np.random.default_rng([seed, *(d for shape in case.values() for d in shape)])
    return {name: sample(rng, shape, dtypes[name], model.inputs.get(name, {})) for name, shape in case.items()}


def sample(rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype, rule: Mapping[str, Any]) -> np.ndarray:
    """Random values of one input: by the rule, else standard normal (floats), 0..9 (integers), coin flips (bool)."""
    shape = tuple(shape)
    if "value" in rule:
        return np.full(shape, rule["value"], dtype)
    if "uniform" in rule:
        return np.asarray(rng.uniform(rule["uniform"][0], rule["uniform"][1], shape)).astype(dtype)
    if "low" in rule:
        return np.asarray(rng.integers(rule["low"], rule["high"], shape)).astype(dtype)
    if dtype == np.bool_:
        return np.asarray(rng.integers(0, 2, shape)).astype(dtype)
    if np.issubdtype(dtype, np.integer):
        return np.asarray(rng.integers(0, 10, shape)).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def input_dtypes(path: Path) -> dict[str, np.dtype]:
    """Numpy dtypes of a model file's inputs, without reading external data."""
    model = onnx.load(path, load_external_data=False)
    return {
        i.name: np.dtype(onnx.helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type))
        for i in graph_inputs(model)
    }
