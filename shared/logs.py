"""Logging to standard error. Needs the standard library alone: decode workers and plain readers use it too."""

import logging
import sys
import time
from collections.abc import Callable


def setup_logging(name: str, level: str = "INFO") -> None:
    """Log lines to standard error: time, program, level, message."""
    form = logging.Formatter(f"%(asctime)s {name} %(levelname)s %(message)s", "%H:%M:%S")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(form)
    root = logging.getLogger("millstream")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


def logger(part: str) -> logging.Logger:
    """The logger of one part of the program."""
    return logging.getLogger(f"millstream.{part}")


class RateLimited:
    """Passes the first `burst` different messages of each kind, then one every `every_s`, which says how many were held
    back. What was said in these very words is held back at once."""

    def __init__(self, log: Callable[[str], None], burst: int = 5, every_s: float = 30.0) -> None:
        self._log, self._burst, self._every_s = log, burst, every_s
        self._seen: dict[str, tuple[frozenset[str], float, int]] = {}

    def __call__(self, kind: str, text: str) -> None:
        said, last, held = self._seen.get(kind, (frozenset(), 0.0, 0))
        now, new = time.monotonic(), text not in said and len(said) < self._burst
        if new or now - last >= self._every_s:
            self._log(text + (f" ({held} more of kind {kind} since the last line)" if held else ""))
            self._seen[kind] = (said | {text} if new else said, now, 0)
        else:
            self._seen[kind] = (said, last, held + 1)
