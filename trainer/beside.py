"""Which readers of a stream read from the same daemons: those are what a daemon is told to wait for.

A pipeline whose first and last stage lie on two nodes has its readers at two daemons, each of which sees its own only.
Readers belong together when they have a daemon's address in common, directly or through others: where one may follow
another to a daemon, their numbers there must differ. An ipc or loopback address means another daemon on every host.
"""

import hashlib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from shared.addresses import is_local
from shared.config import endpoints
from shared.sections import RunConfig
from shared.wire import this_process
from trainer.launch import Ranks


def beside(mine: int, addresses: Sequence[AbstractSet[int]]) -> list[int]:
    """Places in `addresses`, one set for each reader, of those that belong with the one at `mine`, ascending."""
    found, reach = {mine}, set(addresses[mine])
    while more := {place for place, theirs in enumerate(addresses) if theirs & reach} - found:
        found |= more
        reach.update(*(addresses[place] for place in more))
    return sorted(found)


def readers_beside(config: RunConfig, ranks: Ranks) -> list[int]:
    """Ranks of this stream's readers that belong with this one. A collective of the stream's readers."""
    mine = [_digest(address) for address in endpoints(config)]
    longest = max(count for (count,) in ranks.among_readers([len(mine)]))
    told = ranks.among_readers(mine + mine[-1:] * (longest - len(mine)))
    return [ranks.readers[place] for place in beside(ranks.reader, [set(theirs) for theirs in told])]


def _digest(address: str) -> int:
    """63 bits that differ where daemons do."""
    host = this_process().namespace.partition("/")[0] if is_local(address) else ""
    return int.from_bytes(hashlib.blake2b(f"{host} {address}".encode(), digest_size=8).digest(), "big") >> 1
