"""Ctrl-C at any time of a console script's start: one line, exit code 130, no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemons import ROOT

RUN_S = 120.0

HOOK = """
import importlib.abc, os, signal, sys

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
            os.kill(os.getpid(), signal.SIGINT)

if "INTERRUPT_AT" in os.environ:
    sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize(
    ("program", "at"),
    [
        ("dataloader_svc", "dataloader_svc.cli"),
        ("dataloader_svc", "zmq"),
        ("dataloader_svc", "dataloader_svc.screens"),
        ("trainer", "trainer.cli"),
        ("trainer", "typer"),
    ],
)
def test_an_interrupted_start_is_one_line(tmp_path: Path, program: str, at: str) -> None:
    """The signal comes as the module `at` is imported: by the script, by typer, by a command."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))), "INTERRUPT_AT": at}
    arguments = ["index", "--config", "none.yaml"] if program == "dataloader_svc" else ["plan", "--config", "none.yaml"]
    command = [sys.executable, "-m", program, *arguments]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=RUN_S)
    name = {"dataloader_svc": "millstream-loader", "trainer": "millstream-trainer"}[program]
    assert (ran.returncode, ran.stderr) == (130, f"{name}: interrupted\n")
