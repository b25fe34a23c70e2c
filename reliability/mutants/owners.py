"""The function around a line of a Python or C file."""

from __future__ import annotations

import ast
import re

from reliability.mutants.mutant import MODULE_LEVEL


def owner_of_line(source: str, line: int, path: str) -> tuple[str, str]:
    """The qualified name and the text of the outermost function around a line; of the whole file if there is none."""
    if path.endswith(".c"):
        return _c_function(source, line)
    node: ast.AST = ast.parse(source)
    names: list[str] = []
    while True:
        inside = [x for x in ast.iter_child_nodes(node) if _covers(x, line)]
        node = next((x for x in inside if isinstance(x, ast.ClassDef | ast.FunctionDef)), ast.Pass())
        if isinstance(node, ast.Pass):
            return MODULE_LEVEL, source
        assert isinstance(node, ast.ClassDef | ast.FunctionDef)
        names.append(node.name)
        if isinstance(node, ast.FunctionDef):
            return ".".join(names), ast.get_source_segment(source, node) or source


def _covers(node: ast.AST, line: int) -> bool:
    return isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)


def _c_function(source: str, line: int) -> tuple[str, str]:
    """Functions begin at the left margin, and their closing brace is there too."""
    lines = source.splitlines()
    first = line - 1
    while first >= 0 and not re.match(r"[A-Za-z].*\w\(", lines[first]):
        first -= 1
    last = first
    while last < len(lines) and not (lines[last] == "}" or (last == first and lines[last].endswith("}"))):
        last += 1
    if first < 0 or not first <= line - 1 <= last:
        return MODULE_LEVEL, source
    name = re.findall(r"(\w+)\(", lines[first])[0]
    return name, "\n".join(lines[first : last + 1])
