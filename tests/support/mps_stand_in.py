"""A `nvidia-cuda-mps-control` for machines without a GPU: a real program on PATH that speaks the control protocol.

`-d` leaves a process behind that bears the real one's name; commands come on standard input. Files in the pipe
directory steer it: `clients` is what get_client_list prints, `mute` keeps every answer back, `stubborn` makes it stay.
"""

import os
import signal
import time
from pathlib import Path

from tests.support.daemons import alive

SCRIPT = """#!/bin/bash
dir="$CUDA_MPS_PIPE_DIRECTORY"
running() { [ -e "$dir/pid" ] && grep -q . "/proc/$(cat "$dir/pid")/cmdline" 2>/dev/null; }
if [ "$1" = "-d" ]; then
  [ -z "$CUDA_VISIBLE_DEVICES" ] || { echo "a GPU is hidden"; exit 1; }
  [ -d "$CUDA_MPS_LOG_DIRECTORY" ] || { echo "no log directory"; exit 1; }
  running && { echo "An instance of this daemon is already running"; exit 1; }
  (exec -a nvidia-cuda-mps-control sleep 300) &
  echo $! > "$dir/pid"
  touch "$dir/control"
  exit 0
fi
running || { echo "Cannot find MPS control daemon process"; exit 1; }
[ -e "$dir/mute" ] && exec sleep 300
read -r command
case "$command" in
  get_server_list) echo 4242 ;;
  "get_client_list 4242") cat "$dir/clients" 2>/dev/null ;;
  "quit -t "*) [ -e "$dir/stubborn" ] || kill "$(cat "$dir/pid")"; rm -f "$dir/control" "$dir/pid" ;;
  *) echo "unknown command: $command"; exit 1 ;;
esac
exit 0
"""


def install(folder: Path) -> str:
    """Put the program into `folder`; the PATH that finds it first."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(SCRIPT)
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def pid(pipe_dir: Path) -> int:
    """The process that `-d` left behind."""
    return int((pipe_dir / "pid").read_text())


def end(number: int) -> None:
    """SIGKILL it and wait until it is gone."""
    os.kill(number, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while alive(number):
        assert time.monotonic() < deadline
        time.sleep(0.01)
