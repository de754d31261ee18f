"""Ctrl-C of a console script: one line and exit code 130, from its first import on.

This module imports next to nothing, and a script's entry imports it first.
"""

import sys
from collections.abc import Callable

INTERRUPTED = 130


def told(program: str, main: Callable[[], None]) -> None:
    """Run `main`, which imports what it needs, and tell of an interrupt.

    typer turns one inside a command into an exit code, of which it says nothing.
    """
    try:
        main()
    except KeyboardInterrupt:
        _leave(program)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            _leave(program)
        raise


def _leave(program: str) -> None:
    sys.stderr.write(f"{program}: interrupted\n")
    sys.exit(INTERRUPTED)
