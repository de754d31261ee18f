"""What every section of a run file is."""

import msgspec


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the run file; unknown keys are refused."""
