from tests.guarded import guarded

__all__ = ["guarded"]
