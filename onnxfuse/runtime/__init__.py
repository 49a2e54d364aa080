"""Running the result: onnxruntime sessions with the library, and single kernels for tests."""
