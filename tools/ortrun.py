"""Run a model in whatever onnxruntime this interpreter has (oldest supported: 1.17.3). Needs numpy besides.

    python tools/ortrun.py MODEL LIBRARY|- FEEDS.npz RESULTS.npz

FEEDS holds `names` and `0`, `1`, ... in that order; RESULTS is written in the same form. Runs at ORT_ENABLE_ALL.
"""

import sys

import numpy as np
import onnxruntime


def main(model: str, library: str, feeds_path: str, results_path: str) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if library != "-":
        options.register_custom_ops_library(library)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    with np.load(feeds_path) as data:
        feeds = {str(name): data[str(i)] for i, name in enumerate(data["names"])}
    names = [o.name for o in session.get_outputs()]
    results = session.run(names, feeds)
    np.savez(results_path, names=np.array(names), **{str(i): r for i, r in enumerate(results)})


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:  # the caller wants one line and an exit code from any onnxruntime
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=sys.stderr)
        sys.exit(1)
