"""Partition -> Kernels -> Plans: memory layout, row programs, choice of template."""
