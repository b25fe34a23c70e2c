"""Arguments in docstrings as lists (an extension of griffe, which reads the docstrings for the reference).

Our docstrings align arguments in two columns, for a terminal:

    text      prose: a string or a list of strings,
              or a pathlib.Path
    length    tokens of the longest sequences

Markdown would join these lines to one paragraph.
"""

import re
from typing import Any

import griffe

NAMED = re.compile(r"(?P<name>\S+(?: \S+)*?) {2,}(?P<text>\S.*)|(?P<alone>\w+)")
"""A line with a name and, after at least two spaces, its description; or a name that is too long for its column."""


class Arguments(griffe.Extension):
    """Rewrites every docstring before it is rendered."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each object that griffe has read."""
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = as_lists(obj.docstring.value)


def as_lists(docstring: str) -> str:
    """Returns a docstring in which every paragraph of two columns is a Markdown list."""
    return "\n\n".join(_as_list(paragraph) or paragraph for paragraph in docstring.split("\n\n"))


def _as_list(paragraph: str) -> str | None:
    found: list[str] = []
    column = 0  # where descriptions begin
    for line in paragraph.split("\n"):
        if line.startswith(" "):  # goes on with the description; a paragraph that begins so is code
            if not found:
                return None
            found[-1] += f" {line.strip()}"
            continue
        named = NAMED.fullmatch(line)
        if named is None and re.fullmatch(r"\w+ ", line[:column]):  # a name that fills its column
            found.append(f"- `{line[:column].strip()}` {line[column:]}")
        elif named is None:
            return None
        else:
            column = column or named.start("text")
            found.append(f"- `{named['name']}` {named['text']}" if named["name"] else f"- `{named['alone']}`")
    return "\n".join(found) if all("` " in item for item in found) else None
