"""ONNX in: the only place that reads models. Model -> Graph (read), Graph -> Graph (prepare, atomize), Graph -> LoopGraph (lower)."""
