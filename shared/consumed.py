"""A line of the consumed log: what a trainer writes for each micro-batch that went into its weights, and what `verify`
holds against the plan.
"""

import hashlib

import msgspec

from shared.batch import Cursor


class Consumed(msgspec.Struct, frozen=True):
    """One micro-batch of one data-parallel rank. `substituted` samples are spares that stood in for bad ones.

    `skipped_from`: the steps from there to this one were passed over on request.
    """

    epoch: int
    step: int
    micro: int
    data_rank: int
    data_ranks: int
    batch_id: str
    sample_ids: tuple[int, ...]
    substituted: int = 0
    group: int = -1
    checksum: int = 0
    skipped_from: Cursor | None = None

    @property
    def cursor(self) -> Cursor:
        """Its place in the order."""
        return Cursor(self.epoch, self.step, self.micro)

    @property
    def fingerprint(self) -> int:
        """63 bits that two readers of one batch share."""
        told = f"{self.batch_id} {self.cursor} {self.checksum}".encode()
        return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big") >> 1
