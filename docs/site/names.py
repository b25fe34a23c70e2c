"""Names that are a module and a function at once (an extension of griffe, which reads the sources for the reference).

`locant.attention.attend` is a file and, after `from locant.attention.attend import attend`, a function. Python takes
the function; griffe takes the file.
"""

from typing import Any

import griffe


class Names(griffe.Extension):
    """Points such names at the function."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called when a package has been read."""
        for name, member in pkg.members.items():
            if member.is_alias and (function := _function(pkg, name, member)) is not None:
                member.target = function


def _function(pkg: griffe.Module, name: str, alias: griffe.Alias) -> griffe.Object | None:
    try:
        found = pkg[alias.target_path.removeprefix(f"{pkg.path}.")]
    except KeyError:  # of another package
        return None
    return found.members.get(name) if found.is_module else None
