"""The command `locant`. Commands read their options, print and draw; the library does the work.

    commands.py    every command and its options: what --help prints
    parser.py      argparse with errors in one line
    values.py      from the words of the command line to values
    errors.py      errors in one line
    extras.py      packages that only some commands need
    terminal.py    the terminal that the commands print to
    schemes.py, models.py, machine.py, training.py, adapting.py, papers.py    the commands, one file per group

Help, a wrong option and an unknown scheme need the standard library alone. The module of a command, which may import
rich, torch and transformers, is imported after its options have been read.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from locant import notation
from locant.cli.commands import COMMANDS
from locant.cli.errors import plain_errors
from locant.cli.parser import Parser, imports_first
from locant.version import __version__


def app(words: Sequence[str] | None = None) -> None:
    """Runs a command line, by default that of this process. Raises SystemExit if the exit code is not 0."""
    if words is None:
        words = sys.argv[1:]
        # The default of 700 objects takes a seventh of the time of importing torch and transformers, and finds no
        # garbage there.
        gc.set_threshold(10_000, 20, 50)
    if words and words[0] in COMMANDS:
        _run(words[0], words[1:])
    else:
        _without_command(words)


def _run(name: str, words: Sequence[str]) -> None:
    command = COMMANDS[name]
    parser = Parser(f"locant {name}", command.summary)
    command.declare(parser)
    options = parser.parse(imports_first(words))
    options.pop("imports", None)  # what they define is known by now
    with plain_errors():
        if command.extra is not None:
            command.extra.check(f"locant {name}")
        if command.forks and options.get("ray") is None and int(os.environ.get("WORLD_SIZE", 1)) == 1:
            from locant.experiments import fork_server

            fork_server.start()  # it imports torch and transformers while this process imports the command
        module, _, function = command.function.partition(".")
        getattr(import_module(f"locant.cli.{module}"), function)(**options)


def _without_command(words: Sequence[str]) -> None:
    """Prints the help or the version, or what is wrong."""
    parser = Parser("locant", "How does a transformer know where its tokens are?")
    parser.usage = "locant [-h] [--version] COMMAND …"
    parser.option("--version", action="store_true", help="Print the versions of locant and torch, and exit.")
    parser.end_with("commands", {name: command.summary for name, command in COMMANDS.items()})
    if not words:
        parser.print_help()
        raise SystemExit(2)
    if not words[0].startswith("-"):
        hint = notation.did_you_mean(words[0], COMMANDS)
        parser.error(f"unknown command {words[0]!r}{hint}; the commands are: {', '.join(COMMANDS)}")
    if parser.parse(words)["version"]:
        from importlib.metadata import version  # from torch itself it would take seconds

        print(f"locant {__version__}, torch {version('torch')}")
