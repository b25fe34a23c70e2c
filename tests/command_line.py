"""Runs `locant` in this process, and keeps what it prints."""

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

from locant.cli import app


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def locant_command(*words: object) -> Done:
    """Runs `locant WORD …` and returns its exit code and its output."""
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            app([str(word) for word in words])
        except SystemExit as exit_:
            code = exit_.code
    return Done(code, stdout.getvalue(), stderr.getvalue())
