"""Errors of the command line: one line on stderr, and an exit code."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def plain_errors() -> Iterator[None]:
    """Prints an error of the user in one line, without a traceback, and exits with code 2; after Ctrl-C with 130."""
    try:
        yield
    except (ValueError, TypeError, OSError, NotImplementedError, RuntimeError, ImportError) as problem:
        print_error(str(problem))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


IMPORTS = re.compile(r"\bimports='([^']*)'")
"""How the library asks for code; a command asks for the option."""


def print_error(message: str) -> None:
    """Prints `error:` and the message to stderr, with `--import FILE` for the `imports='FILE'` of the library.

    It does without rich, whose import takes longer than all the rest.
    """
    message = IMPORTS.sub(lambda found: f"--import {shlex.quote(found[1])}", message)
    if sys.stderr is None:  # closed by the caller
        return
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    print("\033[31merror:\033[0m" if coloured else "error:", message, file=sys.stderr)
