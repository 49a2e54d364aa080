"""`python -m onnxfuse` is the command `onnxfuse`."""

from onnxfuse.cli import main

if __name__ == "__main__":
    main()
