"""The library around the kernels: what onnxruntime calls, in LLVM IR (start at `module.py`)."""
