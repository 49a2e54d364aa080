"""How much faster a result is: measured when its library is new, remembered in the cache for the next time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnxfuse.config import Config

if TYPE_CHECKING:
    from onnxfuse.codegen.cache import Cache
    from onnxfuse.pipeline import Bundle
    from onnxfuse.verify.bench import Timing
    from onnxfuse.verify.compare import Report

LIMIT = 256 << 20  # bytes of a model that is timed without being asked to: both sessions live at a time
SECONDS = 0.3  # of timing: enough to tell a loss from noise, little beside a compilation


@dataclass(frozen=True, slots=True)
class Remembered:
    """The place of one result's speed in the cache, and what was there. A file that has changed is another model."""

    cache: Cache | None
    key: str
    known: Timing | None

    @classmethod
    def of(cls, model: Path, bundle: Bundle, config: Config, measure: bool | None) -> Remembered | None:
        """None when the speed is not wanted (measure=None: of a small model it is), or when nothing was compiled."""
        from onnxfuse.codegen.cache import default_cache, hash_of
        from onnxfuse.verify.running import large

        wanted = not large(model, LIMIT) if measure is None else measure
        if bundle.library is None or not wanted or not config.verify.enabled or config.tune:
            return None
        cache = default_cache() if config.cache else None
        stat = model.stat()
        key = hash_of("speed", bundle.library.digest, str(model.resolve()), f"{stat.st_size} {stat.st_mtime_ns}")
        return cls(cache, key, _known(cache, key))

    def asked(self, config: Config) -> Config:
        """With the comparison told to measure, unless the speed is known."""
        return config if self.known is not None else replace(config, verify=replace(config.verify, speed=SECONDS))

    def told(self, reports: Iterable[Report]) -> tuple[Report, ...]:
        """The reports with the speed that is known, or with what was measured, now remembered."""
        from onnxfuse.codegen.cache import Entry

        reports = tuple(reports)
        measured = next((r.speed for r in reports if r.speed is not None), None)
        if measured is not None and measured.clear and self.cache is not None:
            self.cache.put(self.key, Entry(asdict(measured), b""))
        whole = next((r for r in reports if r.libraries), None)
        if self.known is None or whole is None:
            return reports
        return tuple(replace(r, speed=self.known) if r is whole else r for r in reports)


def _known(cache: Cache | None, key: str) -> Timing | None:
    from onnxfuse.verify.bench import Timing

    entry = cache.get(key) if cache is not None else None
    if entry is None:
        return None
    try:
        return Timing(**entry.head)  # type: ignore[arg-type]
    except TypeError:  # written by another version
        return None
