"""What ONNX ops mean; the only place with op names. One decorated function per op, one file per family."""
