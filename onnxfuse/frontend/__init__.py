"""ONNX in, the only place that reads models: read, prepare (Graph -> Graph), atomize, lower (Graph -> LoopGraph)."""
