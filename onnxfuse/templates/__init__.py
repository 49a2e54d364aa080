"""One file per way to run a kernel: propose schedules, emit code."""
