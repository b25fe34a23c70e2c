"""No package outside `schemes` tests the class of a scheme: it uses the scheme's methods, as for a user's scheme."""

import ast
from pathlib import Path

import pytest

from locant.schemes import SCHEMES, Sum

SOURCE = Path(__file__).parents[2] / "src" / "locant"
CLASSES = {cls.__name__ for cls in (*SCHEMES.values(), Sum)}


def names_in(node: ast.AST) -> set[str]:
    """Last parts of all names: Tisa in `Tisa`, `schemes.Tisa`, `(Tisa, Sum)` and `Tisa | Sum`."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def takes_type(node: ast.AST) -> bool:
    """Whether an expression has `type(x)` or `x.__class__` in it."""
    calls = (each for each in ast.walk(node) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name))
    return any(each.func.id == "type" for each in calls) or "__class__" in names_in(node)


def switches(source: str) -> list[str]:
    """Code that behaves differently for one class of schemes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        wrong = False
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2:
            wrong = node.func.id in ("isinstance", "issubclass") and bool(names_in(node.args[1]) & CLASSES)
        elif isinstance(node, ast.Compare) and any(map(takes_type, (node.left, *node.comparators))):
            compared = set().union(*map(names_in, (node.left, *node.comparators)))
            wrong = bool(compared & {*CLASSES, "Scheme", "SCHEMES"})
        elif isinstance(node, ast.MatchClass):
            wrong = bool(names_in(node.cls) & CLASSES)
        if wrong:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(SOURCE.rglob("*.py")) if "schemes" not in path.relative_to(SOURCE).parts[:1]],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_no_module_switches_on_the_class_of_a_scheme(path):
    assert switches(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(part, Tisa)",
        "isinstance(part, Tisa | Tisa2)",
        "isinstance(part, (locant.schemes.Toeplitz, int))",
        "issubclass(type(part), Sum)",
        "type(scheme) is not Nope",
        "type(scheme).rotate is Scheme.rotate",
        "type(scheme) in {*SCHEMES.values()}",
        "scheme.__class__ == Rope",
        "match scheme:\n    case Tisa():\n        pass",
    ],
)
def test_the_test_finds_switches(code):
    assert len(switches(code)) == 1
    assert switches("isinstance(x, Scheme)\ntype(x) is Tensor\nTisa(kernels=3, n_heads=2)") == []
