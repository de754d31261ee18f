"""What every section of a run file is, and the ranges its numbers have: whoever converts a section holds them.

A float's range leaves NaN to `run_file`, which takes finite numbers only.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Degree = Annotated[int, Meta(ge=1, le=2**16)]
"""A number of processes, threads, layers, slots: what loops go over."""
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""Any number that a generator takes."""
Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Port = Annotated[int, Meta(ge=0, le=65535)]

Seconds = Annotated[float, Meta(gt=0, le=1e9)]
"""A bound or an interval, at most some thirty years: none of them is for ever."""
Amount = Annotated[float, Meta(ge=0)]
Above = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the run file; unknown keys are refused."""
