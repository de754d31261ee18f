"""`.venv-peers`: the peers beside the product's own environment, so that all share one torch, numpy, Pillow and Python.

The new environment sees the packages of the one that runs this program (a path file), and holds only what `peers.txt`
pins, installed without dependencies: the peers' own pins contradict each other and this repository's. A line that
cannot be installed is told, and its peer is then reported as not installed.
"""

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

PINNED = Path(__file__).with_name("peers.txt")
INSTALL_S = 600.0


def ensure(folder: Path, say: Callable[[str], None]) -> Path:
    """Make or complete the environment in `folder`; its Python."""
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    pinned = PINNED.read_text()
    if stamp.exists() and stamp.read_text() == pinned:
        return python
    say(f"installing the peers into {folder}")
    venv.create(folder, with_pip=True, symlinks=True)
    ours = sysconfig.get_paths()["purelib"]
    site = Path(sysconfig.get_paths("posix_prefix", {"base": str(folder), "platbase": str(folder)})["purelib"])
    (site / "millstream.pth").write_text(ours + "\n")
    lines = [line for line in pinned.splitlines() if line and not line.startswith("#")]
    if install(python, lines):
        refused = [line for line in lines if install(python, [line])]
        say(f"could not be installed: {', '.join(refused)}")
    stamp.write_text(pinned)
    return python


def install(python: Path, lines: list[str]) -> int:
    """Install these pins into the environment of `python`; pip's exit code."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *lines]
    try:
        return subprocess.run(command, timeout=INSTALL_S, check=False, stdout=sys.stderr).returncode
    except subprocess.TimeoutExpired:
        return 1
