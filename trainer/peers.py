"""The daemons that a reader may read from, and the lane to each: one at a time, and the next one when it is lost."""

from collections.abc import Callable

from shared import wire
from shared.errors import ConfigError, SlotError
from trainer.batches import Register
from trainer.lanes import Lane, SlotsLane, TcpLane

LANES = ("auto", "slots", "tcp", "cuda")
MAX_ATTACH_FAILURES = 3


class Peer:
    """One daemon that may be read from, and the lane to it. In `auto` that is tcp once its slots cannot be mapped."""

    def __init__(self, endpoint: str, lane: Lane, fallback: Lane | None) -> None:
        self.endpoint, self.lane, self._fallback = endpoint, lane, fallback
        self._failures = 0

    def attach(self, welcome: wire.Welcome) -> bool:
        """Make ready for the session; False when it must be opened anew.

        Raises:
            SlotError: the batches cannot be reached, again and again.
        """
        try:
            self.lane.attach(welcome)
        except SlotError:
            self._failures += 1
            if self._failures < MAX_ATTACH_FAILURES:
                return False
            if self._fallback is None:
                raise
            self.lane, self._fallback, self._failures = self._fallback, None, 0
            return False
        self._failures = 0
        return True


class Peers:
    """The daemons in turn. Losing one leads to the next; after the last comes the first."""

    def __init__(self, peers: list[Peer], first: int) -> None:
        self._peers, self._at = peers, first % len(peers)

    @classmethod
    def build(
        cls, endpoints: tuple[str, ...], first: int, lane: str, register: Register, cuda: Callable[[], Lane]
    ) -> "Peers":
        """Each endpoint with lanes of its own; `lane` is one of LANES, and `cuda` makes that one.

        Raises:
            ConfigError: no endpoint, or no such lane.
        """
        if not endpoints:
            raise ConfigError("loader.endpoints", "()", "must name at least one daemon", "add one")
        if lane not in LANES:
            raise ConfigError("loader.lane", lane, f"must be one of {', '.join(LANES)}", "use auto")
        made: dict[str, Callable[[], Lane]] = {
            "auto": lambda: SlotsLane(register),
            "slots": lambda: SlotsLane(register),
            "tcp": lambda: TcpLane(register),
            "cuda": cuda,
        }
        spare = TcpLane if lane == "auto" else None
        return cls([Peer(each, made[lane](), spare(register) if spare else None) for each in endpoints], first)

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def current(self) -> Peer:
        """The one to read from."""
        return self._peers[self._at]

    def go_on(self) -> None:
        """To the next one; what lay ready for this one is given back."""
        left = self.current
        self._at = (self._at + 1) % len(self._peers)
        if self.current is not left:
            left.lane.close()

    def close(self) -> None:
        """Close every lane for good."""
        for peer in self._peers:
            peer.lane.end()
