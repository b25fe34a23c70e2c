"""argparse with defaults in its help, and errors in one line."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from locant import notation
from locant.cli.errors import print_error

IMPORT = "--import"


def imports_first(words: Sequence[str]) -> list[str]:
    """Returns the words of a command line with every `--import CODE` in front: other words may name what it defines."""
    first: list[str] = []
    rest: list[str] = []
    left = iter(words)
    for word in left:
        if word == "--":
            rest += [word, *left]
        elif word == IMPORT:
            first += [word, *(value for value in [next(left, None)] if value is not None)]
        else:
            (first if word.startswith(f"{IMPORT}=") else rest).append(word)
    return first + rest


class Parser(argparse.ArgumentParser):
    """The parser of `locant` or of one of its commands. Names of options cannot be shortened."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=False)
        self.known = ["-h", "--help"]
        self.checks: list[Callable[[Mapping[str, Any]], None]] = []
        """Conditions on several values; each raises a ValueError."""
        self.add_argument(*self.known, action="help", help="Print this text and exit.")

    def argument(self, name: str, help: str, *, metavar: str | None = None, **rest: Any) -> None:
        """Declares an argument that is given by its place."""
        self.add_argument(name, metavar=metavar or name.upper(), help=help, **rest)

    def option(self, *names: str, help: str, default: Any = None, required: bool = False, **rest: Any) -> None:
        """Declares an option. Its help ends with its default, or with `Required`."""
        without_default = default is None or default is False
        ending = " Required." if required else "" if without_default else " Default: %(default)s."
        self.add_argument(*names, help=help + ending, default=default, required=required, **rest)
        self.known += names

    def end_with(self, title: str, entries: Mapping[str, str]) -> None:
        """Adds a list of names and their meanings to the end of the help."""
        indent = 4 + max(map(len, entries))
        width = max(40, shutil.get_terminal_size().columns - 2)
        lines = [f"  {name:{indent - 2}}{meaning}" for name, meaning in entries.items()]
        wrapped = [textwrap.fill(line, width, subsequent_indent=" " * indent) for line in lines]
        self.epilog = "\n".join([f"{title}:", *wrapped])
        self.formatter_class = argparse.RawDescriptionHelpFormatter

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """Returns the values by name. Prints an error in one line and exits with code 2 if a word is wrong."""
        self._reject_unknown_options(words)
        found, rest = self.parse_known_intermixed_args(words)  # options may stand between arguments
        for word in rest:
            if not word.startswith("-"):
                self.error(f"unexpected argument {word!r}")
            self._unknown_option(word)
        values = vars(found)
        try:
            for check in self.checks:
                check(values)
        except ValueError as problem:
            self.error(str(problem))
        return values

    def _reject_unknown_options(self, words: Sequence[str]) -> None:
        """Names a mistyped option before argparse complains of what is then missing or left over."""
        for word in words:
            if word == "--":
                return
            if word.startswith("--") and word.partition("=")[0] not in self.known:
                self._unknown_option(word)

    def _unknown_option(self, word: str) -> NoReturn:
        name = word.partition("=")[0]
        self.error(f"unknown option {name}{notation.did_you_mean(name, self.known)}")

    def error(self, message: str) -> NoReturn:
        """Prints what is wrong and how to see the options, and exits with code 2."""
        print_error(f"{message.removeprefix('argument ')}; see {self.prog} --help")
        raise SystemExit(2)
