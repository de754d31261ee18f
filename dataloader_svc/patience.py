"""How long something has been so."""

from collections.abc import Hashable


class Patience:
    """Says of each key when a condition has held for longer than `bound_s`, and then begins anew."""

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._since: dict[Hashable, float] = {}

    def ends(self, key: Hashable, holds: bool, now: float) -> bool:
        """Whether the condition, which `holds` now or not, has held too long."""
        if not holds:
            self._since.pop(key, None)
            return False
        if now - self._since.setdefault(key, now) <= self._bound_s:
            return False
        del self._since[key]
        return True

    def forget(self, key: Hashable) -> None:
        """The key is gone."""
        self._since.pop(key, None)
