"""Damaged models: does every one give a result or a documented error?

    python tools/fuzz_reader.py [--seed FIRST] [--count N] [--time MINUTES] [--out DIR]

Small valid models (seeded graphs, models/, hand-written ones with functions, bodies, sparse and quantised data) are
damaged: bytes flipped, cut, doubled; protobuf fields cleared, repeated, swapped or set to awkward values (extreme
numbers, empty, huge, quoted, binary names, wrong enums). Each goes through `optimize` up to the plans, some through
everything. Allowed are a result and a UsageError whose code is in the catalogue; a traceback, another error, the end of
the process, more than --seconds or --memory are findings, written to --out as seed.onnx with the reason.

Same seed, same bytes. Exit 2 when there is a finding.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import onnx
import onnx.parser
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]
from modelzoo import SMALL

from onnxfuse import codes
from onnxfuse.config import Config
from onnxfuse.errors import UsageError
from onnxfuse.pipeline import optimize
from onnxfuse.trace import Stopped, Trace

HEAD = '<ir_version: 9, opset_import: ["": 17, "local": 1]>'
TEXTS = (
    "g (float[N,4] x) => (float[N,4] y) <float[4] w = {1,2,3,4}> { a = Mul(x, w)  y = Softmax<axis = -1>(a) }",
    """g (float[2,3,8,8] x) => (float[a,b,c,d] y) {
    v = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w)  y = MaxPool<kernel_shape = [2,2]>(v) }""",
    "g (float[N] x, bool c) => (float[N] y) { y = If(c) <then_branch = t () => (float[N] a) { a = Exp(x) }, "
    "else_branch = e () => (float[N] b) { b = Neg(x) }> }",
    """g (float[A,B] x) => (float[P] y) <int64[1] s = {-1}> {
    h = Shape(x)  r = Reshape(x, s)  z = ConstantOfShape(h)  f = Reshape(z, s)  y = Add(r, f) }""",
    """g (float[N,4] x) => (float[N,4] y) { y = local.twice(x) }
    <domain: "local", opset_import: ["": 17]> twice (a) => (b) { t = Exp(a)  b = Add(t, a) }""",
    """g (float[1,4] x) => (float[a,b] y) <float s = {0.1}, uint8 z = {3}> {
    q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }""",
    "g (string[N] x) => (string[N] y) { y = Identity(x) }",
    """g (float[N,6] x) => (float[a,b] y, float[c,d] z) <int64[2] parts = {2,4}> {
    y, t = Split<axis = 1>(x, parts)  z = Transpose<perm = [1,0]>(t) }""",
)
NUMBERS = (-1, 0, 1, 2, 7, 127, 2**31 - 1, -(2**31), 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
NAMES = (
    "",
    " ",
    "x",
    "y",
    "\0",
    '"',
    "%s%n",
    "'; echo",
    "../../etc/passwd",
    "a\nb",
    "日本語\u202e",
    "n" * 10_000,
    "-",
    "$(id)",
)
FLOATS = (0.0, -0.0, 1e38, -1.0, float("nan"), float("inf"), 1e-45)


def seeds() -> list[bytes]:
    """The valid models that are damaged."""
    made = [onnx.parser.parse_model(f"{HEAD} {text}").SerializeToString() for text in TEXTS]
    conv = onnx.ModelProto.FromString(made[1])
    conv.graph.initializer.add(name="w", dims=[4, 3, 3, 3], data_type=onnx.TensorProto.FLOAT, raw_data=bytes(4 * 108))
    made[1] = conv.SerializeToString()
    made += [p.read_bytes() for p in sorted(SMALL.glob("*.onnx")) if p.stat().st_size < 20_000]
    return made


def damaged(seed: int, valid: list[bytes]) -> bytes:
    """One damaged model."""
    rng = random.Random(seed)
    data = rng.choice(valid)
    if rng.random() < 0.35:
        return _bytes(rng, data)
    model = onnx.ModelProto.FromString(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        _field(rng, model)
    try:
        made: bytes = model.SerializeToString()
    except ValueError:
        return _bytes(rng, data)
    return made


def _bytes(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not out:
            break
        at = rng.randrange(len(out))
        match rng.randrange(6):
            case 0:
                out[at] = rng.randrange(256)
            case 1:
                out[at] ^= 1 << rng.randrange(8)
            case 2:
                del out[at:]
            case 3:
                del out[at : at + rng.randint(1, 8)]
            case 4:
                out[at:at] = out[at : at + rng.randint(1, 32)]
            case _:
                out[at:at] = rng.randbytes(rng.randint(1, 4))
    return bytes(out)


def _field(rng: random.Random, model: onnx.ModelProto) -> None:
    """Change one field somewhere in the message."""
    spots = list(_messages(model))
    message = rng.choice(spots)
    present = message.ListFields()
    if present and rng.random() < 0.8:
        field, _ = rng.choice(present)
    else:
        field = rng.choice(message.DESCRIPTOR.fields)
    if rng.random() < 0.15:
        message.ClearField(field.name)
    elif field.is_repeated:
        _repeated(rng, getattr(message, field.name), field, spots)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        others = [m for m in spots if m.DESCRIPTOR.full_name == field.message_type.full_name]
        if others and message not in others:
            copy = rng.choice(others).SerializeToString()
            getattr(message, field.name).ParseFromString(copy)
        else:
            getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _value(rng, field, getattr(message, field.name)))


def _messages(model: onnx.ModelProto) -> Iterator[Message]:
    pending: list[Message] = [model]
    while pending:
        m = pending.pop()
        yield m
        for field, value in m.ListFields():
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                pending.extend(value if field.is_repeated else [value])


def _repeated(rng: random.Random, items: object, field: FieldDescriptor, spots: list[Message]) -> None:
    assert hasattr(items, "__len__")
    count = len(items)
    at = rng.randrange(count) if count else 0
    if field.type != FieldDescriptor.TYPE_MESSAGE:
        new = list(items)  # type: ignore[call-overload]
        what = rng.randrange(5)
        if what == 0 and count:
            del new[at]
        elif what == 1 and count:
            new[at] = _value(rng, field, new[at])
        elif what == 2 and count > 1:
            rng.shuffle(new)
        else:
            new[at:at] = [_value(rng, field, new[at] if count else None)] * rng.choice((1, 1, 2, 40))
        del items[:]  # type: ignore[attr-defined]
        items.extend(new)  # type: ignore[attr-defined]
        return
    what = rng.randrange(4)
    if what == 0 and count:
        del items[at]  # type: ignore[attr-defined]
    elif what == 1 and count > 1:
        copies = [type(i).FromString(i.SerializeToString()) for i in items]  # type: ignore[attr-defined]
        rng.shuffle(copies)
        del items[:]  # type: ignore[attr-defined]
        items.extend(copies)  # type: ignore[attr-defined]
    else:
        others = [m for m in spots if m.DESCRIPTOR.full_name == field.message_type.full_name]
        data = rng.choice(others).SerializeToString() if others else b""
        if len(data) < 100_000:
            items.add().ParseFromString(data)  # type: ignore[attr-defined]


def _value(rng: random.Random, field: FieldDescriptor, old: object) -> object:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING and field.type == FieldDescriptor.TYPE_BYTES:
        return (
            _bytes(rng, old)
            if isinstance(old, bytes) and old and rng.random() < 0.6
            else rng.randbytes(rng.choice((0, 1, 9)))
        )
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return rng.choice(NAMES)
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice([v.number for v in field.enum_type.values])
    low, high = {
        FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
        FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    }.get(kind, (-(2**63), 2**63 - 1))
    near = [int(old) + d for d in (-1, 1)] if isinstance(old, int) else []
    return rng.choice([n for n in (*NUMBERS, *near, *range(30)) if low <= n <= high])


# --- running ---------------------------------------------------------------------------------------------------------
def outcome(data: bytes, whole: bool) -> str:
    """Say ok, the code of a documented error, or "!..." for a finding."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimize(data, Config(cache=False), Trace(stop_after="" if whole else "plan"))
    except Stopped:
        return "ok"
    except UsageError as error:
        if error.code not in codes.BY_CODE:
            return f"!{error.code} is not in the catalogue"
        return error.code if error.what and "\n" not in error.what else f"!{error.code} says nothing or too much"
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)[-4:]
        at = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))
        return f"!{type(error).__name__}: {' '.join(str(error).split())[:200]} at {at}"
    return "ok"


def _child(first: int, count: int, memory: int, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    valid = seeds()
    for seed in range(first, first + count):
        sender.send((seed, None))
        sender.send((seed, outcome(damaged(seed, valid), seed % 25 == 0)))
    sender.close()


def run(first: int, count: int, minutes: float, seconds: float, memory: int, out: Path) -> tuple[Counter[str], int]:
    """(outcomes, how many ran); a child takes over behind a model that ended one."""
    found: Counter[str] = Counter()
    valid = seeds()
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    seed, stop = first, first + count if count else 1 << 60
    context = multiprocessing.get_context("spawn")
    while seed < stop and time.monotonic() < end:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(seed, min(500, stop - seed), memory, sender), daemon=True)
        child.start()
        sender.close()
        at, result = seed, None
        try:
            while True:
                if not receiver.poll(seconds + 60):
                    result = f"!no answer in {seconds:.0f} s"
                    child.kill()
                    break
                begun = time.monotonic()
                at, result = receiver.recv()
                if result is not None:
                    _note(found, at, result, valid, out)
                    seed, result = at + 1, None
                if begun > end:
                    child.kill()
                    break
        except EOFError:
            child.join()
            if child.exitcode and seed <= at:
                result = f"!the process ended: {child.exitcode}"
        if result is not None:
            _note(found, at, result, valid, out)
            seed = at + 1
        child.kill()
        child.join()
    return found, seed - first


def _note(found: Counter[str], seed: int, result: str, valid: list[bytes], out: Path) -> None:
    found[result] += 1
    if result.startswith("!") and found[result] <= 3:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{seed}.onnx").write_bytes(damaged(seed, valid))
        (out / f"{seed}.txt").write_text(result[1:] + "\n")
        print(f"FINDING seed {seed}: {result[1:]}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    parser.add_argument("--count", type=int, default=0, help="models (0: until --time is over, or 1000)")
    parser.add_argument("--time", type=float, default=0, help="minutes (0: until --count is reached)")
    parser.add_argument("--seconds", type=float, default=60, help="a model may take")
    parser.add_argument("--memory", type=int, default=6 << 30, help="address space of a child, in bytes")
    parser.add_argument("--out", default="fuzz-reader", help="folder for findings")
    args = parser.parse_args(argv)
    count = args.count or (0 if args.time else 1000)
    found, ran = run(args.seed, count, args.time, args.seconds, args.memory, Path(args.out))
    print(f"{ran} models from seed {args.seed}")
    for result, n in found.most_common():
        print(f"{n:7d}  {result}")
    return 2 if any(r.startswith("!") for r in found) else 0


if __name__ == "__main__":
    sys.exit(main())
