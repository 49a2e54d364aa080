"""ONNX out: custom nodes, FunctionProto bodies, the bundle of two files."""
