"""`onnxfuse compare`, `bench` and `run`: models in onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from onnxfuse.cli.app import app
from onnxfuse.cli.options import (
    CustomOps,
    Json,
    Judging,
    Library,
    ModelArg,
    Sampling,
    Threads,
    Verbose,
    expanded,
    our_library,
)
from onnxfuse.cli.terminal import print_json, require_file


@app.command(
    epilog="""Examples:

    onnxfuse compare model.onnx fused.onnx
    onnxfuse compare model.onnx fused.onnx --library none --input-data test_data_set_0
    onnxfuse compare model.onnx fused.onnx --rtol 1e-3 --rtol logits:1e-5 --check 10
""",
)
@expanded
def compare(
    reference: Annotated[Path, typer.Argument(metavar="REFERENCE", help="The original model.", show_default=False)],
    candidate: Annotated[Path, typer.Argument(metavar="CANDIDATE", help="The model to judge.", show_default=False)],
    library: Library = "auto",
    *,
    sampling: Sampling,
    judging: Judging,
    custom_op_library: CustomOps = None,
    threads: Threads = 0,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run both models in onnxruntime on the same inputs and compare every output.

    The reference runs at ORT_DISABLE_ALL. A candidate with our library beside it is compared without and with it.
    """
    require_file(reference)
    require_file(candidate)
    config = judging.config(sampling)
    ours = our_library(candidate, library)
    libraries = [ours] if ours is None or library != "auto" else [None, ours]
    from onnxfuse.verify.compare import compare_many

    reports = compare_many(
        reference, candidate, libraries, config=config, custom_op_libraries=custom_op_library or (), threads=threads
    )
    if json:
        print_json({"ok": all(r.ok for r in reports), "reports": [r.json() for r in reports]})
    else:
        from onnxfuse import report

        report.show(*(report.comparison(r, every_run=verbose) for r in reports))
    if not all(r.loaded for r in reports):
        raise typer.Exit(1)
    if not all(r.ok for r in reports):
        raise typer.Exit(2)


@app.command(
    epilog="""Examples:

    onnxfuse bench model.onnx fused.onnx
    onnxfuse bench model.onnx fused.onnx --threads 4 --test-input-shape x:1,3,640,640
    onnxfuse bench fused.onnx
""",
)
@expanded
def bench(
    model: ModelArg,
    candidate: Annotated[
        Path | None, typer.Argument(metavar="[CANDIDATE]", help="The optimized model.", show_default=False)
    ] = None,
    library: Library = "auto",
    threads: Annotated[int, typer.Option("--threads", min=0, help="Intra-op threads; 0 = onnxruntime's choice.")] = 1,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="How long, for all contestants together.")] = 5.0,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Exactly this many rounds instead.")] = None,
    fallback: Annotated[bool, typer.Option("--fallback", help="Also the candidate without its library.")] = False,
    *,
    sampling: Sampling,
    custom_op_library: CustomOps = None,
    json: Json = False,
) -> None:
    """Time MODEL against CANDIDATE in onnxruntime at ORT_ENABLE_ALL, interleaved in one process."""
    require_file(model)
    if candidate is not None:
        require_file(candidate)
    config = sampling.config()
    from onnxfuse.verify import ort
    from onnxfuse.verify.bench import Contestant
    from onnxfuse.verify.bench import bench as run_bench
    from onnxfuse.verify.inputs import samples, specs

    theirs = tuple(custom_op_library or ())
    contestants = []
    for path in dict.fromkeys((model, candidate or model)):
        ours = our_library(path, library) if path != model or candidate is None else our_library(path, "auto")
        if ours is not None and fallback:
            contestants.append(Contestant(f"{path} without library", path, theirs))
        contestants.append(Contestant(f"{path}", path, (*theirs, *([ours] if ours is not None else []))))
    narrow = specs(ort.session(candidate, libraries=contestants[-1].libraries)) if candidate is not None else None
    sample, _ = next(iter(samples(ort.session(model, libraries=contestants[0].libraries), config, narrow)))
    result = run_bench(contestants, sample.feeds, sample.shapes, threads=threads, seconds=seconds, rounds=rounds)
    if json:
        print_json(result.json())
        return
    from onnxfuse import report

    report.show(report.timings(result))


@app.command(
    epilog="""Examples:

    onnxfuse run fused.onnx --input-data x.npz --save-outputs y.npz
    onnxfuse run fused.onnx --library none --seed 3
""",
)
@expanded
def run(
    model: ModelArg,
    library: Library = "auto",
    save_outputs: Annotated[
        Path | None, typer.Option("--save-outputs", "-o", metavar="NPZ", help="Write the outputs here.")
    ] = None,
    save_inputs: Annotated[
        Path | None, typer.Option("--save-inputs", metavar="NPZ", help="Write the inputs that were used.")
    ] = None,
    *,
    sampling: Sampling,
    custom_op_library: CustomOps = None,
    threads: Threads = 0,
    json: Json = False,
) -> None:
    """Run a model once in onnxruntime on given or random inputs; print what comes out, or save it."""
    require_file(model)
    config = sampling.config()
    from onnxfuse.verify import ort
    from onnxfuse.verify.inputs import samples, save_npz

    ours = our_library(model, library)
    libraries = [*(custom_op_library or ()), *([ours] if ours is not None else [])]
    sess = ort.session(model, level=ort.Level.ALL, threads=threads, libraries=libraries)
    sample, results = next(iter(samples(sess, config)))
    if save_inputs is not None:
        save_npz(save_inputs, sample.feeds)
    if save_outputs is not None:
        save_npz(save_outputs, results)
    rows = _result_rows(results)
    if json:
        print_json(
            {name: {"type": kind, "min": low, "max": high, "mean": mean} for name, kind, low, high, mean in rows}
        )
        return
    from onnxfuse import report

    report.show(report.listing(("output", "type", "min", "max", "mean"), rows))


def _result_rows(results: Mapping[str, object]) -> list[tuple[str, str, str, str, str]]:
    import numpy as np

    rows = []
    for name, value in results.items():
        array = np.asarray(value)
        kind = f"{array.dtype.name}[{','.join(map(str, array.shape))}]"
        stats = ["", "", ""]
        if array.size and (array.dtype.kind in "fiub" or "float" in array.dtype.name):
            numbers = array.astype(np.float64)
            stats = [f"{x:.6g}" for x in (numbers.min(), numbers.max(), numbers.mean())]
        rows.append((name, kind, stats[0], stats[1], stats[2]))
    return rows
