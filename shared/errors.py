"""Every error Millstream raises on purpose.

The tree::

    MillstreamError
    ├── ConfigError          an option or layout refused before anything starts
    ├── DataError            something about the training data
    │   ├── ShardError       a whole shard: missing, stale, unreadable
    │   ├── SampleError      one sample; costs only itself (carries a `reason` that metrics count)
    │   └── TooManyBadSamples  the share of bad samples is over its limit
    ├── ProtocolError        the two halves cannot talk: version, digest, junk
    ├── SlotError            shared-memory slots: too large, lost, reused
    ├── DeviceError          a call of CUDA's driver failed; the text names it and the code
    ├── LoaderTimeout        a named wait ran over its named bound
    ├── CheckpointError      a checkpoint that cannot be trusted
    └── NumericsError        training cannot go on: losses or gradients are not finite, or ranks drifted apart
"""

from collections.abc import Iterator
from contextlib import contextmanager


class MillstreamError(Exception):
    """Base of all expected errors; the command line prints its text and no traceback."""


class ConfigError(MillstreamError):
    """A refused setting. The text names it, gives its value, the rule it breaks and a remedy."""

    def __init__(self, name: str, value: object, rule: str, remedy: str) -> None:
        self.name, self.value, self.rule, self.remedy = name, value, rule, remedy
        super().__init__(f"{name} ({value}) {rule}; {remedy}")


class DataError(MillstreamError):
    """Base of errors about training data."""


class ShardError(DataError):
    """A whole shard cannot be used."""


class SampleError(DataError):
    """One sample cannot be used. `reason` is a short word from a fixed list, for counters."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


class TooManyBadSamples(DataError):
    """More samples in a row, or a larger share of them, went bad than the run allows."""


class ProtocolError(MillstreamError):
    """The peer speaks another version, serves other data, or sends what is not a message."""


class SlotError(MillstreamError):
    """Shared-memory slots cannot be made, mapped or trusted."""


class DeviceError(MillstreamError):
    """A call of CUDA's driver failed, or there is no driver."""


class LoaderTimeout(MillstreamError):
    """The loader did not answer within a bound; the text names endpoint, rank, bound and last state."""


class CheckpointError(MillstreamError):
    """A checkpoint is incomplete, damaged or belongs to another run."""


class NumericsError(MillstreamError):
    """Steps in a row whose loss or gradient norm is not finite, or ranks that disagree on having taken a step."""


def require(ok: bool, name: str, value: object, rule: str, remedy: str) -> None:
    """Hold one rule of a run file.

    Raises:
        ConfigError: it is broken.
    """
    if not ok:
        raise ConfigError(name, value, rule, remedy)


@contextmanager
def writing(name: str, path: object) -> Iterator[None]:
    """Around the making of a file or folder: the option `name` asked for it at `path`.

    Raises:
        ConfigError: the system refuses it.
    """
    try:
        yield
    except OSError as error:
        rule = f"cannot be written ({error.strerror or error})"
        raise ConfigError(name, path, rule, "make room and rights for it there, or name another place") from None
