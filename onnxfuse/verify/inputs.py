"""Inputs for a model: the user's data, or seeded random arrays in shapes the original model accepts.

In: the reference session and a VerifyConfig. Out: `Sample`s with what the reference computed for them. A dynamic model
gets several shapes: symbols first take plausible sizes (batch 1, 2, 3; image sides; sequence lengths), one size per
symbol; where the ORIGINAL model refuses, other sizes are tried, and later samples vary one symbol of what worked.
"""

from __future__ import annotations

import ast
import difflib
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # protobuf ships no types

from onnxfuse.config import VerifyConfig
from onnxfuse.errors import UsageError
from onnxfuse.verify import ort

Run = Callable[[Mapping[str, object]], dict[str, ort.Result]]
Dims = Mapping[str, int]

_MAX_ELEMENTS = 1 << 24  # of one random input
_MAX_TRIES = 64  # random shapes tried before giving up
_VARY_TRIES = 24  # further shapes tried once one works


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One model input as onnxruntime declares it. A dynamic dim is a symbol; nameless ones are called `?<axis>`."""

    name: str
    type: str
    shape: tuple[int | str, ...]

    @property
    def dtype(self) -> np.dtype | None:
        return ort.numpy_dtype(self.type)

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(d for d in self.shape if isinstance(d, str))

    def __str__(self) -> str:
        return f"{self.name}: {ort.element(self.type) or self.type}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Feeds for one run and how a report calls them."""

    label: str
    feeds: Mapping[str, object]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs that are arrays."""
        return {k: v.shape for k, v in self.feeds.items() if isinstance(v, np.ndarray)}


def specs(sess: onnxruntime.InferenceSession) -> tuple[InputSpec, ...]:
    """Inputs that must be fed (overridable initializers keep their defaults)."""
    return tuple(spec(i.name, i.type, i.shape or ()) for i in sess.get_inputs())


def spec(name: str, type_name: str, dims: Iterable[object]) -> InputSpec:
    """An input as declared; what is no size and no name becomes a symbol."""
    shape: list[int | str] = []
    for axis, dim in enumerate(dims):
        named = isinstance(dim, str) and dim not in ("", "?")
        size = isinstance(dim, int) and dim >= 0
        shape.append(dim if isinstance(dim, int | str) and (named or size) else f"?{axis}")
    return InputSpec(name, type_name, tuple(shape))


# ---- the command line's texts


def parse_shapes(texts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """`name:1,3,320,320` (also `name:` for a scalar) -> shape by input name."""
    out: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, colon, dims = text.rpartition(":")
        if not colon or not name or not re.fullmatch(r"(\d+(,\d+)*)?", dims):
            raise UsageError("E_FLAG", f"cannot read the shape {text!r}", hint="write name:1,3,224,224")
        out[name] = tuple(int(d) for d in dims.split(",")) if dims else ()
    return out


def parse_ranges(texts: Iterable[str]) -> dict[str, tuple[float, float]]:
    """`name:lo,hi`, or `lo,hi` for every input (key "")."""
    out: dict[str, tuple[float, float]] = {}
    for text in texts:
        name, _, pair = text.rpartition(":")
        try:
            lo, hi = (float(p) for p in pair.split(","))
        except ValueError:
            raise UsageError("E_FLAG", f"cannot read the range {text!r}", hint="write name:lo,hi") from None
        if not lo <= hi:
            raise UsageError("E_FLAG", f"the range {text!r} is empty", hint="write name:lo,hi with lo <= hi")
        out[name] = (lo, hi)
    return out


# ---- data given by the user


def load(paths: str | Sequence[str], wanted: Sequence[InputSpec]) -> list[Sample]:
    """Samples from `.npz`, `name:file.npy`, a folder of `.npy`/`.npz`/`input_N.pb`, or a folder of `test_data_set_*`.

    Several `name:file.npy` make one sample together.
    """
    single: dict[str, object] = {}
    samples: list[Sample] = []
    for path in [paths] if isinstance(paths, str) else paths:
        name, file = _named_array(path, wanted)
        if name is not None:
            single[name] = _read_npy(file)
        else:
            samples += _load_path(Path(path), wanted)
    if single:
        samples.append(Sample("input data", single))
    for sample in samples:
        check_feeds(sample.feeds, wanted)
    return samples


def _named_array(path: str, wanted: Sequence[InputSpec]) -> tuple[str | None, Path]:
    """(input name, file) of `name:file.npy`, or of a bare `.npy` for a model with one input."""
    if not path.endswith(".npy"):
        return None, Path(path)
    name, colon, file = path.rpartition(":")
    if colon and name:
        return name, Path(file)
    if len(wanted) != 1:
        names = ", ".join(s.name for s in wanted)
        raise UsageError(
            "E_INPUT_DATA", f"{path!r} does not say which input it is", f"inputs: {names}", "write name:file.npy"
        )
    return wanted[0].name, Path(path)


def _load_path(path: Path, wanted: Sequence[InputSpec]) -> list[Sample]:
    if path.is_file() and path.suffix == ".npz":
        return [Sample(path.name, _read_npz(path))]
    if not path.is_dir():
        problem = "is neither .npz, name:file.npy nor a folder" if path.exists() else "does not exist"
        hint = "accepted: x.npz, name:x.npy, a folder with test_data_set_*, input_0.pb, .npy or .npz files"
        raise UsageError("E_INPUT_DATA", f"input data {str(path)!r} {problem}", hint=hint)
    folders = sorted((p for p in path.glob("test_data_set_*") if p.is_dir()), key=_number)
    protos = sorted(path.glob("input_*.pb"), key=_number)
    archives, arrays = sorted(path.glob("*.npz")), sorted(path.glob("*.npy"))
    if folders:
        return [s for folder in folders for s in _load_path(folder, wanted)]
    if protos:
        return [Sample(path.name, _read_protos(protos, wanted))]
    if archives:
        return [Sample(p.name, _read_npz(p)) for p in archives]
    if arrays:
        return [Sample(path.name, {p.stem: _read_npy(p) for p in arrays})]
    raise UsageError("E_INPUT_DATA", f"no input data in {str(path)!r}", hint="expected input_0.pb, .npz or .npy files")


def _number(path: Path) -> tuple[int, str]:
    digits = re.findall(r"\d+", path.stem)
    return (int(digits[-1]) if digits else 0, path.name)


def _read_npz(path: Path) -> dict[str, object]:
    try:
        with np.load(path, allow_pickle=False) as data:
            return {k: data[k] for k in data.files}
    except (OSError, ValueError, EOFError, KeyError) as exc:
        raise UsageError("E_INPUT_DATA", f"cannot read {str(path)!r}", str(exc)) from exc


def _read_npy(path: Path) -> np.ndarray:
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError) as exc:
        raise UsageError("E_INPUT_DATA", f"cannot read {str(path)!r}", str(exc)) from exc


def _read_protos(paths: Sequence[Path], wanted: Sequence[InputSpec]) -> dict[str, object]:
    """Backend tests of onnx: `input_N.pb` is the N-th input, a tensor, sequence or optional by that input's type."""
    by_name = {s.name: s for s in wanted}
    out: dict[str, object] = {}
    for path in paths:
        position = _number(path)[0]
        if position >= len(wanted):
            raise UsageError(
                "E_INPUT_DATA", f"{str(path)!r} has no input to go to", f"the model has {len(wanted)} inputs"
            )
        spec = wanted[position]
        try:
            name, value = _parse_proto(path.read_bytes(), spec.type)
        except (DecodeError, OSError, ValueError, TypeError, KeyError, RuntimeError) as exc:
            raise UsageError("E_INPUT_DATA", f"cannot read {str(path)!r} as {spec.type}", str(exc)) from exc
        out[name if name in by_name else spec.name] = value
    return out


def _parse_proto(data: bytes, type_name: str) -> tuple[str, object]:
    import onnx  # rarely needed, and most processes that compare have no other use for it

    if type_name.startswith("seq("):
        sequence = onnx.SequenceProto.FromString(data)
        return sequence.name, onnx.numpy_helper.to_list(sequence)
    if type_name.startswith("optional("):
        optional = onnx.OptionalProto.FromString(data)
        return optional.name, onnx.numpy_helper.to_optional(optional)
    tensor = onnx.TensorProto.FromString(data)
    array = onnx.numpy_helper.to_array(tensor)
    if tensor.data_type == onnx.TensorProto.STRING:  # numpy_helper gives bytes objects
        array = np.array([s.decode() for s in tensor.string_data], object).reshape(array.shape)
    return tensor.name, array


def check_feeds(feeds: Mapping[str, object], wanted: Sequence[InputSpec], optional: Iterable[str] = ()) -> None:
    """Raise a UsageError that names the wrong or missing input."""
    by_name = {s.name: s for s in wanted}
    for name, value in feeds.items():
        if name not in by_name:
            if name in set(optional):
                continue
            raise _unknown_input(name, wanted)
        _check_value(by_name[name], value)
    missing = [str(s) for s in wanted if s.name not in feeds and not s.type.startswith("optional(")]
    if missing:
        raise UsageError(
            "E_INPUT_MISSING", f"no data for input {missing[0]}", f"{len(missing)} of {len(wanted)} inputs missing"
        )


def _unknown_input(name: str, wanted: Sequence[InputSpec]) -> UsageError:
    names = [s.name for s in wanted]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else ""
    return UsageError(
        "E_INPUT_NAME", f"the model has no input {name!r}", f"inputs: {', '.join(map(str, wanted))}", hint
    )


def _check_value(spec: InputSpec, value: object) -> None:
    if spec.dtype is None or not isinstance(value, np.ndarray):
        return
    same = value.dtype == spec.dtype or (spec.dtype.kind == "O" and value.dtype.kind in "OUS")
    if not same:
        why = f"the model wants {spec.dtype}, the data is {value.dtype}"
        raise UsageError(
            "E_INPUT_TYPE", f"wrong element type for input {spec.name!r}", why, "convert the data with astype"
        )
    _check_shape(spec, value.shape)


def _check_shape(spec: InputSpec, shape: tuple[int, ...]) -> None:
    fits = len(shape) == len(spec.shape) and all(
        isinstance(d, str) or d == n for d, n in zip(spec.shape, shape, strict=True)
    )
    if not fits:
        why = f"the model wants {spec}, given [{','.join(map(str, shape))}]"
        raise UsageError("E_INPUT_SHAPE", f"wrong shape for input {spec.name!r}", why)


# ---- random data


def draw(
    wanted: Sequence[InputSpec],
    shapes: Mapping[str, tuple[int, ...]],
    rng: np.random.Generator,
    ranges: Mapping[str, tuple[float, float]],
    profile: str = "named",
) -> dict[str, object]:
    """Random feeds. `profile` says how integers are drawn: by their names, in [0, 2), all ones or all zeros."""
    return {s.name: _draw_one(s, shapes[s.name], rng, ranges.get(s.name, ranges.get("")), profile) for s in wanted}


PROFILES = ("named", "small", "ones", "zeros")


def _draw_one(
    spec: InputSpec, shape: tuple[int, ...], rng: np.random.Generator, span: tuple[float, float] | None, profile: str
) -> object:
    if spec.type.startswith("optional("):
        return None
    if spec.type.startswith("seq("):
        inner = InputSpec(spec.name, spec.type[4:-1], ("a", "b"))
        return [_draw_one(inner, (2, 3), rng, span, profile) for _ in range(2)]
    dtype = spec.dtype
    if dtype is None:
        raise UsageError("E_INPUT_TYPE", f"cannot make random data for {spec}", hint="give it with --input-data")
    if dtype.kind == "O":
        return np.full(shape, "onnxfuse", object)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if dtype.kind in "iu":
        return _draw_ints(spec.name, dtype, shape, rng, span, profile)
    values = rng.standard_normal(shape) if span is None else rng.uniform(*span, shape)
    return np.asarray(values).astype(dtype)


def _draw_ints(
    name: str,
    dtype: np.dtype,
    shape: tuple[int, ...],
    rng: np.random.Generator,
    span: tuple[float, float] | None,
    profile: str,
) -> np.ndarray:
    if span is not None:
        return np.asarray(rng.integers(math.ceil(span[0]), math.floor(span[1]), shape, dtype=dtype, endpoint=True))
    if profile in ("ones", "zeros"):
        return np.full(shape, int(profile == "ones"), dtype)
    low, high = _int_range(name, dtype) if profile == "named" else (0, 2)
    return rng.integers(low, high, shape).astype(dtype)


def _int_range(name: str, dtype: np.dtype) -> tuple[int, int]:
    """[low, high) of an integer input, by what its name says it is."""
    words = set(re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()))
    if words & {"sr", "rate"}:  # audio models accept a few rates only
        return (16000, 16001)
    if dtype.itemsize == 1 and not words & {"mask"}:  # image or quantised data
        return (0, 128)
    if words & {"id", "ids", "token", "tokens", "index", "indices"} and not words & {"type", "position", "segment"}:
        return (0, 100)
    if words & {"byte", "bytes", "pixel", "pixels", "image", "images"}:
        return (0, 256)
    if words & {"len", "length", "lengths"}:
        return (1, 3)
    return (0, 2)


# ---- shapes


_PALETTE = (32, 64, 224, 1, 2, 3, 4, 7, 8, 16, 48, 80, 96, 128, 160, 192, 256, 299, 320, 384, 512, 576, 640, 1024)
# What a symbol's name says -> sizes to try, preferred first.
_NAMED_SIZES: tuple[tuple[frozenset[str], tuple[int, ...]], ...] = (
    (frozenset({"n", "b", "bs", "batch", "batchsize"}), (1, 2, 3)),
    (frozenset({"h", "w", "height", "width", "rows", "cols", "side"}), (64, 96, 32)),
    (frozenset({"seq", "sequence", "len", "length", "time", "t", "s", "token", "tokens", "frames"}), (16, 7, 33)),
    (frozenset({"c", "channel", "channels"}), (3, 4, 1)),
)


def _sizes(symbol: str, axis: int, rank: int) -> tuple[int, ...]:
    words = set(re.split(r"[^a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", symbol).lower()))
    for names, sizes in _NAMED_SIZES:
        if words & names:
            return sizes
    if axis == 0 and rank > 1:
        return (1, 2, 3)
    if rank >= 4:
        return (3, 4, 1) if axis == 1 else (64, 96, 32)
    return (16, 7, 33)


def _symbols(wanted: Sequence[InputSpec], fixed: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Free symbols in order of appearance with the sizes to try; those fixed by a given shape have one size."""
    out: dict[str, tuple[int, ...]] = {}
    known: dict[str, tuple[int, ...]] = {}
    for spec in wanted:
        for axis, dim in enumerate(spec.shape):
            if not isinstance(dim, str):
                continue
            if spec.name in fixed:
                known[dim] = (fixed[spec.name][axis],)
            for symbol in _names_in(dim):
                out.setdefault(symbol, _sizes(symbol, axis, len(spec.shape)))
    return out | {k: v for k, v in known.items() if k in out}


def _names_in(dim: str) -> list[str]:
    """Symbols of a dimension: itself, or the parts of a formula such as `past_len + 1`."""
    tree = _formula(dim)
    return [dim] if tree is None else [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]


def _formula(dim: str) -> ast.expr | None:
    """The parsed formula, or None for a plain symbol (whatever characters it has)."""
    try:
        tree = ast.parse(dim, mode="eval").body
    except SyntaxError:
        return None
    return tree if isinstance(tree, ast.BinOp) and _size(tree, {}, default=1) is not None else None


def _size(tree: ast.expr, dims: Dims, default: int | None = None) -> int | None:
    """Value of a formula of + - * // over symbols and integers; None for anything else."""
    match tree:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return dims.get(name, default)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _size(left, dims, default), _size(right, dims, default)
            if a is None or b is None:
                return None
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.FloorDiv():
                    return a // b if b else None
    return None


def _concrete(spec: InputSpec, dims: Dims) -> tuple[int, ...]:
    out = []
    for dim in spec.shape:
        tree = _formula(dim) if isinstance(dim, str) else None
        size = dim if isinstance(dim, int) else _size(tree, dims) if tree is not None else dims[dim]
        out.append(max(0, size or 0))
    return tuple(out)


def _untied(wanted: Sequence[InputSpec]) -> list[InputSpec]:
    """The same inputs with nameless dims independent of each other: `?1` of state becomes `?state.1`."""
    return [
        replace(s, shape=tuple(f"?{s.name}.{d[1:]}" if isinstance(d, str) and d[0] == "?" else d for d in s.shape))
        for s in wanted
    ]


def _plausible_shapes(options: Mapping[str, tuple[int, ...]], rng: np.random.Generator) -> Iterator[dict[str, int]]:
    """Assignments of sizes to symbols, plausible ones first; only one where nothing is free."""
    if all(len(sizes) == 1 for sizes in options.values()):
        yield {s: sizes[0] for s, sizes in options.items()}
        return
    for k in range(3):
        yield {s: sizes[min(k, len(sizes) - 1)] for s, sizes in options.items()}
    for size in _PALETTE:  # every free dim but the batch alike: square images, chunks of audio
        yield {s: sizes[0] if sizes[0] == 1 or len(sizes) == 1 else size for s, sizes in options.items()}
    for symbol, sizes in options.items() if len(options) > 1 else ():  # one long dim, the others 1
        for size in _PALETTE if len(sizes) > 1 else ():
            yield {s: size if s == symbol else min(1, *o) if len(o) > 1 else o[0] for s, o in options.items()}


def _random_shapes(options: Mapping[str, tuple[int, ...]], rng: np.random.Generator) -> Iterator[dict[str, int]]:
    """Any sizes at all."""
    for _ in range(_MAX_TRIES if any(len(sizes) > 1 for sizes in options.values()) else 0):
        yield {s: sizes[0] if len(sizes) == 1 else int(rng.choice(_PALETTE)) for s, sizes in options.items()}


def _variations(
    works: Dims, options: Mapping[str, tuple[int, ...]], rng: np.random.Generator
) -> Iterator[dict[str, int]]:
    """Assignments near one that works: the other plausible sizes together, equal sizes together, one at a time."""
    for k in range(3):
        yield {s: sizes[min(k, len(sizes) - 1)] for s, sizes in options.items()}
    free = [s for s, sizes in options.items() if len(sizes) > 1]
    for value in dict.fromkeys(works[s] for s in free):
        alike = [s for s in free if works[s] == value]
        for size in (2, 3) if value == 1 else options[alike[0]]:
            yield {**works, **dict.fromkeys(alike, size)}
    for symbol in free:
        for size in options[symbol]:
            yield {**works, symbol: size}
    for _ in range(_VARY_TRIES if free else 0):
        symbol = str(rng.choice(free))
        yield {**works, symbol: int(rng.choice(_PALETTE))}


def samples(
    sess: onnxruntime.InferenceSession, config: VerifyConfig, wanted: Sequence[InputSpec] | None = None
) -> Iterator[tuple[Sample, dict[str, ort.Result]]]:
    """(feeds, what the reference computes for them): the user's data, or `config.runs` random sets per shape.

    `wanted` narrows the shapes to those of another model with the same inputs.
    Raises UsageError when the user's data does not fit, or when no random input is accepted by the reference.
    """
    overridable = [i.name for i in sess.get_overridable_initializers()]
    return samples_of(partial(ort.run, sess), config, wanted or specs(sess), overridable)


def samples_of(
    run: Run, config: VerifyConfig, wanted: Sequence[InputSpec], overridable: Sequence[str] = ()
) -> Iterator[tuple[Sample, dict[str, ort.Result]]]:
    """The same for anything that can be run: `run` takes feeds, and refuses them as onnxruntime does."""
    if config.input_data:
        for sample in load(config.input_data, wanted):
            check_feeds(sample.feeds, wanted, overridable)
            try:
                yield sample, run(sample.feeds)
            except ort.ORT_ERRORS as exc:
                raise UsageError(
                    "E_INPUT_REFUSED",
                    f"the original model refuses {sample.label}",
                    _first_line(exc),
                    "not a matter of the optimization: give data the model is made for",
                ) from exc
        return
    for name, shape in config.test_shapes.items():
        spec = next((s for s in wanted if s.name == name), None)
        if spec is None:
            raise _unknown_input(name, wanted)
        _check_shape(spec, shape)
    for name in config.val_ranges:
        if name and name not in {s.name for s in wanted}:
            raise _unknown_input(name, wanted)
    yield from _random_samples(wanted, config, run)


@dataclass(slots=True)
class _Attempts:
    """Draws random feeds and asks the original model; keeps its first refusal for the error message."""

    wanted: Sequence[InputSpec]
    config: VerifyConfig
    run: Run
    rng: np.random.Generator
    refusal: str = ""

    def any(self, dims: Dims) -> tuple[Sample, dict[str, ort.Result]] | None:
        """The first way of drawing integers that the model accepts in these shapes."""
        has_ints = any(s.dtype is not None and s.dtype.kind in "iu" for s in self.wanted)
        tries = (self.one(dims, profile) for profile in (PROFILES if has_ints else PROFILES[:1]))
        return next((found for found in tries if found is not None), None)

    def one(self, dims: Dims, profile: str) -> tuple[Sample, dict[str, ort.Result]] | None:
        shapes = {s.name: self.config.test_shapes.get(s.name) or _concrete(s, dims) for s in self.wanted}
        if max((math.prod(shape) for shape in shapes.values()), default=0) > _MAX_ELEMENTS:
            return None
        feeds = draw(self.wanted, shapes, self.rng, self.config.val_ranges, profile)
        try:
            return Sample(_label(dims, self.config.seed), feeds), self.run(feeds)
        except ort.ORT_ERRORS as exc:
            self.refusal = self.refusal or _first_line(exc)
            return None


def _random_samples(
    wanted: Sequence[InputSpec], config: VerifyConfig, run: Run
) -> Iterator[tuple[Sample, dict[str, ort.Result]]]:
    rng = np.random.default_rng(config.seed)
    attempt = _Attempts(wanted, config, run, rng)
    works = None
    # Nameless dims of one axis are usually the same thing (a batch); where that does not work they are all free.
    readings = dict.fromkeys((tuple(wanted), tuple(_untied(wanted))))
    for propose, tied in [(p, r) for p in (_plausible_shapes, _random_shapes) for r in readings]:
        attempt.wanted = tied
        options = _symbols(tied, config.test_shapes)
        works = next(((dims, f) for dims in propose(options, rng) if (f := attempt.any(dims)) is not None), None)
        if works is not None:
            break
    if works is None:
        raise _no_input(wanted, attempt.refusal)
    first_dims, found = works
    yield found
    yield from _more(attempt, first_dims, config.runs - 1)
    seen, done = {tuple(first_dims.values())}, 1
    for dims in _variations(first_dims, options, rng):
        if done >= config.shapes or tuple(dims.values()) in seen:
            continue
        seen.add(tuple(dims.values()))
        varied = attempt.any(dims)
        if varied is None:
            continue
        done += 1
        yield varied
        yield from _more(attempt, dims, config.runs - 1)


def _more(attempt: _Attempts, dims: Dims, count: int) -> Iterator[tuple[Sample, dict[str, ort.Result]]]:
    """Further random values in shapes that are known to work."""
    for _ in range(count):
        found = attempt.any(dims)
        if found is not None:
            yield found


def _label(dims: Dims, seed: int) -> str:
    sizes = " ".join(f"{k}={v}" for k, v in dims.items())
    return f"random seed {seed}" + (f", {sizes}" if sizes else "")


def _first_line(exc: Exception) -> str:
    return str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__


def _no_input(wanted: Sequence[InputSpec], refusal: str) -> UsageError:
    dynamic = next((s for s in wanted if s.symbols), None)
    what = "found no input that the original model accepts"
    if dynamic is not None:
        sizes = ",".join(str(d) if isinstance(d, int) else "?" for d in dynamic.shape)
        hint = f"{dynamic} has free dimensions: give them with --test-input-shape {dynamic.name}:{sizes}"
    else:
        hint = "give data with --input-data, or value ranges with --val-range name:lo,hi"
    return UsageError("E_NO_INPUT", what, refusal, hint)


def save_npz(path: str | os.PathLike[str], arrays: Mapping[str, object]) -> None:
    """Write named arrays; values numpy cannot hold without pickling are refused."""
    plain: dict[str, np.ndarray] = {}
    for name, value in arrays.items():
        array = np.asarray(value)
        if array.dtype.kind == "O":
            if not all(isinstance(x, str) for x in array.ravel()):
                raise UsageError("E_OUTPUT_DATA", f"{name!r} is not an array: .npz cannot hold it")
            array = array.astype(np.str_)
        plain[name] = array
    try:
        _write_npz(path, plain)
    except OSError as error:
        raise UsageError("E_OUTPUT_DATA", f"{os.fspath(path)!r} cannot be written", str(error)) from error


def _write_npz(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    with zipfile.ZipFile(path, "w") as archive:  # np.savez cannot hold an output that is called "file"
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
