"""Run models in whatever onnxruntime this interpreter has (oldest supported: 1.17.3). Needs numpy besides.

    python tools/ortrun.py MODEL LIBRARY|- FEEDS.npz RESULTS.npz
    python tools/ortrun.py --serve

FEEDS holds `names` and `0`, `1`, ... in that order; RESULTS is written in the same form. Runs at ORT_ENABLE_ALL.

With `--serve` requests come on stdin and answers go to stdout, each a length (8 bytes) and a pickle: the request is
(`run` or `profile`, model, library or None, feeds, optimized), the answer (`done`, results by name of each feed, or the
names of the nodes that ran), or (`load` or `run`, what went wrong there).
"""

import json
import os
import pickle
import sys
import tempfile

import numpy as np
import onnxruntime


def main(model: str, library: str, feeds_path: str, results_path: str) -> None:
    session = onnxruntime.InferenceSession(
        model, options(None if library == "-" else library), providers=["CPUExecutionProvider"]
    )
    with np.load(feeds_path) as data:
        feeds = {str(name): data[str(i)] for i, name in enumerate(data["names"])}
    names = [o.name for o in session.get_outputs()]
    results = session.run(names, feeds)
    np.savez(results_path, names=np.array(names), **{str(i): r for i, r in enumerate(results)})


def options(library: "str | None", optimized: bool = True) -> onnxruntime.SessionOptions:
    made = onnxruntime.SessionOptions()
    made.log_severity_level = 4
    if library is not None:
        made.register_custom_ops_library(library)
    if not optimized:
        made.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        made.intra_op_num_threads = 1
    return made


def serve() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed does not belong to the answers
    while True:
        head = requests.read(8)
        if len(head) < 8:
            return
        data = requests.read(int.from_bytes(head, "little"))
        reply = pickle.dumps(_answer(data), protocol=4)
        answers.write(len(reply).to_bytes(8, "little") + reply)
        answers.flush()


def _answer(data: bytes) -> "tuple[str, object]":
    stage = "load"
    try:
        kind, model, library, feeds, optimized = pickle.loads(data)
        made = options(library, optimized)
        with tempfile.TemporaryDirectory() as folder:
            if kind == "profile":
                made.enable_profiling = True
                made.profile_file_prefix = os.path.join(folder, "profile")
            session = onnxruntime.InferenceSession(model, made, providers=["CPUExecutionProvider"])
            stage = "run"
            names = [o.name for o in session.get_outputs()]
            results = [dict(zip(names, session.run(names, feed), strict=True)) for feed in feeds]
            return "done", _nodes(session.end_profiling()) if kind == "profile" else results
    except Exception as error:  # any onnxruntime, any failure: the caller wants the text
        return stage, f"{type(error).__name__}: {error}"


def _nodes(path: str) -> "set[str]":
    with open(path, encoding="utf-8") as file:
        events = json.load(file)
    end = "_kernel_time"
    return {e["name"][: -len(end)] for e in events if e.get("cat") == "Node" and e["name"].endswith(end)}


if __name__ == "__main__":
    try:
        serve() if sys.argv[1:] == ["--serve"] else main(*sys.argv[1:])
    except Exception as error:  # the caller wants one line and an exit code from any onnxruntime
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=sys.stderr)
        sys.exit(1)
