"""The vocabulary: types, expressions, the three levels (Graph, LoopGraph, Kernel), partitions and plans.

Imports nothing of ours but `errors`, `config` and `target`. Immutable values; printing and parsing in `text.py`,
well-formedness in `check.py`, meaning (numpy) in `interp.py`. Do not put decisions or op names here.
"""
