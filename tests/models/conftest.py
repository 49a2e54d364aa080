import sys
from pathlib import Path

# The tools are scripts beside each other, not a package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
