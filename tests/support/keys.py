"""Key folders, made by the command that users have."""

import subprocess
import sys
from pathlib import Path

from tests.support.daemons import ROOT


def make_keys(folder: Path) -> Path:
    """Keys of a daemon and of a reader in `folder`."""
    command = [sys.executable, "-m", "dataloader_svc", "keys", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    return folder
