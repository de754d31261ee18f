"""What native libraries print: libjpeg, libpng and their like write on file descriptor 2 and tell nobody else.

A worker's descriptor 2 is a memory file that the pool made. The worker takes what its decoders said after each call,
so that a picture which libjpeg "repairs" can be judged; the pool reads the last words of a worker that died. Python's
own standard error in a worker is the daemon's.
"""

import fcntl
import os
import re
import sys
from collections.abc import Callable

from shared.logs import RateLimited, logger

STDERR_FD = 2
MAX_BYTES = 1 << 16
LAST_WORDS = 300
EVERY_S = 300.0
KIND_CHARACTERS = 24
NUMBERS = re.compile(r"[\d.@]+")

Said = Callable[[], str]


def memory_file() -> int:
    """A descriptor for a child's standard error: every write goes to the end, wherever a reader stands."""
    fd = os.memfd_create("millstream-stderr")
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def take(fd: int = STDERR_FD) -> str:
    """What was written since the last time, up to MAX_BYTES; the file is empty afterwards."""
    size = os.fstat(fd).st_size
    if not size:
        return ""
    text = os.pread(fd, min(size, MAX_BYTES), 0).decode(errors="replace")
    os.ftruncate(fd, 0)
    return text


def last_words(fd: int) -> str:
    """The end of what a dead process wrote, on one line."""
    return " ".join(take(fd).split())[-LAST_WORDS:]


def silence(log_fd: int) -> Said:
    """Make `log_fd` this process's standard error for Python; returns what reports descriptor 2, the memory file's.

    What it reports is logged too, once for each kind of message and then every EVERY_S seconds.
    """
    sys.stderr = os.fdopen(log_fd, "w", buffering=1)
    tell = RateLimited(logger("native").warning, burst=1, every_s=EVERY_S)

    def said() -> str:
        text = take()
        for line in filter(None, map(str.strip, text.splitlines())):
            tell(NUMBERS.sub("", line)[:KIND_CHARACTERS], f"a decoder says: {line[:200]}")
        return text

    return said


def nothing() -> str:
    """Of a process whose descriptor 2 is its own."""
    return ""


def last_line(error: Exception) -> str:
    """The line of a decoder's many that tells what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "rror" in line or "ailure" in line] or lines or [type(error).__name__]
    return told[0][:200]
