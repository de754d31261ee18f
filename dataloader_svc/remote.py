"""Bytes of one object behind a URL, through fsspec: the one door to remote storage.

A read is tried until it gives exactly the bytes asked for, with growing pauses, for at most `read_s` seconds
a piece; a source never gives other bytes than those of the object that was opened (If-Match, where there is an ETag).
What cannot change by waiting (not there, not allowed, changed meanwhile, no byte ranges) fails at once. `store.py`
loads this at the first URL: local shards need none of it.
"""

import errno
import functools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import fsspec
import fsspec.asyn

from dataloader_svc.sources import PIECE_BYTES, Fingerprint, Tally, Waiting, edges, nothing
from shared.errors import ShardError

T = TypeVar("T")

ATTEMPTS_AT_LEAST = 3
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
SLOW_S = 1.0
RETRY_4XX = (408, 425, 429)
FINAL = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, ShardError),
    *(ValueError, TypeError, AttributeError, NotImplementedError),
)

# The libraries' own retries are off: there is one bound, ours.
OPTIONS: dict[str, dict[str, Any]] = {"s3": {"config_kwargs": {"retries": {"total_max_attempts": 1}}}}


class Remote:
    """An object behind a URL, read in ranges. Open one with `Remote.open`."""

    def __init__(self, url: str, size: int, tag: str, etag: str, read_s: float, tally: Tally) -> None:
        self.size, self._url, self._tag, self._etag = size, url, tag, etag
        self._read_s, self._tally = read_s, tally
        self._edges = "" if tag else edges(self)

    @classmethod
    def open(cls, url: str, read_s: float, tally: Tally) -> "Remote":
        """Ask for size and tag.

        Raises:
            ShardError: it is not there, tells no size, or did not answer within `read_s` seconds.
        """
        info = persist(f"shard {url} cannot be opened", read_s, functools.partial(_info, url), tally)
        etag = str(info.get("ETag") or "")
        changed = info.get("LastModified") or info.get("Last-Modified") or ""
        tag = etag or str(changed)
        return cls(url, int(info["size"]), tag, "" if etag.startswith("W/") else etag, read_s, tally)

    def read(self, offset: int, size: int, waiting: Waiting = nothing) -> bytes:
        return b"".join(self._pieces(offset, min(self.size, offset + size), waiting))

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self.size, 0, self._edges, self._tag)

    def close(self) -> None:
        """Nothing is held open."""

    def _pieces(self, offset: int, end: int, waiting: Waiting) -> Iterator[bytes]:
        for start in range(offset, end, PIECE_BYTES):
            stop = min(end, start + PIECE_BYTES)
            attempt = functools.partial(_whole_range, self._url, start, stop, self._etag)
            what = f"shard {self._url} cannot be read at {start}"
            data = persist(what, self._read_s, attempt, self._tally, waiting)
            self._tally.add(fetched_bytes=len(data))
            yield data


def persist(what: str, read_s: float, attempt: Callable[[float], T], tally: Tally, waiting: Waiting = nothing) -> T:
    """The result of `attempt(bound_s)`, tried again with growing pauses for up to `read_s` seconds.

    Raises:
        ShardError: it failed for good, or the time is over; the text begins with `what` and ends with the last error.
    """
    deadline, tries = time.monotonic() + read_s, 0
    while True:
        started, tries = time.monotonic(), tries + 1
        try:
            return attempt(min(read_s / ATTEMPTS_AT_LEAST, deadline - started))
        except Exception as error:  # libraries behind fsspec share no base class
            if _final(error):
                raise ShardError(f"{what} ({_said(error)}); restore it or take it out of data.datasets") from None
            last = _said(error)
        finally:
            if time.monotonic() - started > SLOW_S:
                waiting()
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (tries - 1)) * random.uniform(0.5, 1.0)
        if time.monotonic() + pause_s >= deadline:
            bound = f"within loader.read_s, {read_s:g} s ({tries} attempts, the last: {last})"
            raise ShardError(f"{what} {bound}; check its storage and the network")
        tally.add(retries=1)
        time.sleep(pause_s)
        waiting()


def listing(pattern: str, read_s: float) -> list[str]:
    """URLs that a pattern with `*` names, on storage that can list.

    Raises:
        ShardError: the storage cannot list, or not within `read_s` seconds.
    """

    def attempt(bound_s: float) -> list[str]:
        found: list[str] = _call(pattern, "glob", bound_s)
        return [_filesystem(_protocol(pattern)).unstrip_protocol(path) for path in found]

    return persist(f"shards {pattern} cannot be listed", read_s, attempt, Tally())


def _info(url: str, bound_s: float) -> dict[str, Any]:
    info: dict[str, Any] = _call(url, "info", bound_s)
    if info.get("type") != "file":
        raise IsADirectoryError("a folder; name the tars in it")
    if info.get("size") is None:
        raise ValueError("its server tells no size")
    return info


def _whole_range(url: str, start: int, stop: int, etag: str, bound_s: float) -> bytes:
    options = {"headers": {"If-Match": etag}} if etag and _protocol(url) in ("http", "https") else {}
    data: bytes
    if etag and _protocol(url) == "s3":
        data = _s3_range(url, start, stop, etag, bound_s)
    else:
        data = _call(url, "cat_file", bound_s, start=start, end=stop, **options)
    if len(data) > stop - start:
        raise NotImplementedError("its server does not answer byte ranges")
    if len(data) < stop - start:
        raise OSError(f"{len(data)} bytes came where {stop - start} were asked for")
    return data


def _s3_range(url: str, start: int, stop: int, etag: str, bound_s: float) -> bytes:
    """s3fs's `cat_file` takes no condition, so this asks for the object itself."""
    filesystem = _filesystem("s3")
    bucket, key, _ = filesystem.split_path(url)

    async def get() -> bytes:
        wanted = f"bytes={start}-{stop - 1}"
        answer = await filesystem._call_s3("get_object", Bucket=bucket, Key=key, Range=wanted, IfMatch=etag)
        async with answer["Body"] as body:
            data: bytes = await body.read()
        return data

    return bytes(fsspec.asyn.sync(filesystem.loop, get, timeout=bound_s))


def _call(url: str, method: str, bound_s: float, **options: Any) -> Any:
    """A method of the URL's file system, ended after `bound_s` seconds where it is asynchronous (http, s3 are)."""
    filesystem = _filesystem(_protocol(url))
    path = filesystem._strip_protocol(url)
    if not filesystem.async_impl:
        return getattr(filesystem, method)(path, **options)
    return fsspec.asyn.sync(filesystem.loop, getattr(filesystem, f"_{method}"), path, timeout=bound_s, **options)


def _protocol(url: str) -> str:
    return url.partition("://")[0].lower()


@functools.lru_cache
def _filesystem(protocol: str) -> Any:
    try:
        options = {"skip_instance_cache": True, "use_listings_cache": False, **OPTIONS.get(protocol, {})}
        filesystem = fsspec.filesystem(protocol, **options)
    except ImportError as error:
        raise ImportError(f"{error}; pip install 'millstream[remote]'") from None
    if protocol == "s3":
        filesystem.retries = 1
    return filesystem


def _final(error: Exception) -> bool:
    """Whether trying again cannot help. fsspec says "not found" of any failed question over http: its cause decides."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    if not isinstance(cause, Exception) or hasattr(cause, "response"):
        cause = error
    status = getattr(cause, "status", None)
    if isinstance(status, int):
        return 400 <= status < 500 and status not in RETRY_4XX
    return isinstance(cause, FINAL) or getattr(cause, "errno", None) == errno.EINVAL


def _said(error: Exception) -> str:
    """One line about an error; a failed condition is said in our words."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
    if getattr(cause, "status", None) == 412 or getattr(cause, "errno", None) == errno.EINVAL:
        return "it changed since it was opened: index it again"
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    return " ".join(f"{cause}".split()) or type(cause).__name__
