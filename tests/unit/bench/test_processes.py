"""What a process tree uses, told from real processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.bench import processes

WAIT_S = 120.0
SPIN = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint('spun', flush=True); sys.stdin.read()"
HOLD = "import sys\nheld = b'x' * 64_000_000\nprint('held', flush=True); sys.stdin.read()"
PARENT = "import subprocess, sys\nwith subprocess.Popen([sys.executable, '-c', sys.argv[1]]) as child: pass"


@pytest.fixture
def start() -> Iterator[object]:
    """Start a Python program that prints a word and then waits for its input's end; ended with the test."""
    children = []

    def begin(*arguments: str) -> "subprocess.Popen[bytes]":
        child = subprocess.Popen([sys.executable, "-c", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        children.append(child)
        assert child.stdout and child.stdout.readline()
        return child

    yield begin
    for child in children:
        child.communicate(timeout=WAIT_S)


def test_a_tree_holds_grandchildren(start) -> None:  # type: ignore[no-untyped-def]
    parent = start(PARENT, HOLD)
    found = processes.tree(os.getpid())
    assert found[0] == os.getpid() and parent.pid in found
    assert len(processes.tree(parent.pid)) == 2


def test_cpu_is_what_the_processes_burnt(start) -> None:  # type: ignore[no-untyped-def]
    busy = start(SPIN)
    assert 0.25 <= processes.cpu_s([busy.pid]) < 5.0
    idle = processes.cpu_s([busy.pid])
    time.sleep(0.1)
    assert processes.cpu_s([busy.pid]) - idle <= 2 * processes.TICK_S


def test_memory_that_a_process_holds_is_counted(start) -> None:  # type: ignore[no-untyped-def]
    assert 64e6 < processes.pss_bytes([start(HOLD).pid]) < 256e6


def test_a_process_that_is_gone_counts_nothing(start) -> None:  # type: ignore[no-untyped-def]
    gone = start(SPIN)
    gone.communicate(timeout=WAIT_S)
    assert processes.cpu_s([gone.pid]) == 0 and processes.pss_bytes([gone.pid]) == 0
    assert processes.tree(gone.pid) == [gone.pid]
