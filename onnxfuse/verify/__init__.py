"""Numbers against onnxruntime; the judge."""
