"""LoopGraph -> Partition: stage A (post-dominator), B (CanFuse), C (horizontal), D (cost); every decision recorded."""
