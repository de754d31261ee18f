"""Ctrl-C of a console script: one line and exit code 130, from its first import on.

This module imports next to nothing, and a script's entry imports it first.
"""

import importlib
import sys

INTERRUPTED = 130


def told(program: str, module: str) -> None:
    """Import `module`, run its `main`, and tell of an interrupt at either.

    typer turns one inside a command into an exit code, of which it says nothing.
    """
    try:
        importlib.import_module(module).main()
    except KeyboardInterrupt:
        _leave(program)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            _leave(program)
        raise


def _leave(program: str) -> None:
    sys.stderr.write(f"{program}: interrupted\n")
    sys.exit(INTERRUPTED)
