"""Tests of the op table. Importing the samples here puts all their rows together."""

from tests.ops import samples, samples_places, samples_recurrent

__all__ = ["samples", "samples_places", "samples_recurrent"]
