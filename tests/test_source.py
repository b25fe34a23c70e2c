"""Rules for the source as a whole that no linter has."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
LONGEST = 60
LONGER: dict[str, str] = {}
"""Functions with more lines, "file:name", and the reason."""


def test_functions_are_short():
    long = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > LONGEST:
                    long[f"{path.relative_to(SOURCE)}:{node.name}"] = lines
    assert long.keys() == LONGER.keys(), f"functions of more than {LONGEST} lines: {long}; split them"
