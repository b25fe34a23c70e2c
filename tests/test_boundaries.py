"""What may import what. The tables are the design; the tests read the import graph of src with ast.

terms ← schemes ← notation ← { imports, spec } ← attention ← testing
                                        ↑
                            runs       hf ← analysis ← { adaptation, experiments } ← papers ← report ← verbs ← cli
                                                                 ↑
                                                             exporting ← cli

A ← B means: B may import A.
"""

import ast
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"

FOUNDATION = {"version", "runs", "terms", "schemes", "notation", "imports", "spec", "attention", "transformers_config"}
MODELS = FOUNDATION | {"hf", "analysis"}
MAY_IMPORT = {
    "version": set(),
    "runs": set(),
    "terms": set(),
    "transformers_config": set(),
    "registering": {"transformers_config"},
    "schemes": {"terms"},
    "notation": {"schemes"},
    "imports": {"schemes", "notation"},
    "spec": {"terms", "schemes", "notation"},
    "attention": {"runs", "terms", "schemes", "notation", "spec"},
    "testing": FOUNDATION,
    "hf": FOUNDATION,
    "analysis": FOUNDATION | {"hf"},
    "adaptation": MODELS,
    "exporting": MODELS | {"adaptation"},
    "experiments": MODELS,
    "papers": MODELS | {"adaptation", "experiments"},
    "report": MODELS | {"adaptation", "experiments", "papers"},
    "verbs": MODELS | {"adaptation", "experiments", "papers", "report"},
    "cli": MODELS | {"adaptation", "experiments", "papers", "report", "testing", "verbs", "exporting"},
}
"""Each package or module of locant, and the others it may import. The root `__init__` may import all."""

OPTIONAL = {
    "accelerate": "extra",
    "datasets": "extra",
    "grp": "not on Windows",
    "pwd": "not on Windows",
    "filelock": "extra",
    "flash_attn": "optional: the self-test compares with it",
    "matplotlib": "extra",
    "pandas": "optional: only a DataFrame needs it",
    "plotext": "extra",
    "ray": "extra",
    "safetensors": "extra",
    "sentence_transformers": "extra",
    "scipy": "extra",
    "sklearn": "extra",
    "tokenizers": "extra",
    "torchmetrics": "extra",
    "torch.fx.experimental.symbolic_shapes": "imports sympy, half a second; loaded whenever something traces",
    "transformers": "extra",
    "torch.nn.attention.flex_attention": "start-up time: it imports torch's compiler",
}
"""Third-party modules that a function may import, and why: an extra is an optional dependency."""

LAZY = {
    ("cli", "*"): "start-up time: `locant COMMAND --help` must not import torch",
    ("experiments", "experiments"): "start-up time: `locant compare` reads its options before transformers is imported",
    ("experiments", "hf"): "start-up time: the same",
    ("papers", "adaptation"): "start-up time: `locant reproduce` reads its options before transformers is imported",
    ("papers", "analysis"): "start-up time: the same",
    ("papers", "hf"): "start-up time: the same",
    ("exporting", "exporting"): "optional dependency: only fitting a table trains anything",
    ("registering", "transformers_config"): "optional dependency: `import locant` works without transformers",
    ("verbs", "experiments"): "optional dependency: Ray",
    ("verbs", "report"): "optional dependency: matplotlib",
    ("attention", "attention"): "optional dependency: triton",
    ("analysis", "analysis"): "optional dependency: schemes, tables and theory are analysed without transformers",
}
"""Imports of our own modules inside functions, (importer, imported), and why they are there."""


@dataclass(frozen=True)
class Import:
    """An import of a module of locant or of a third party."""

    importer: str  # locant.hf.plan
    imported: str  # locant.hf.interface, or torch.nn
    line: int
    in_function: bool
    for_types: bool  # under `if TYPE_CHECKING`


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imports_of(name: str) -> list[Import]:
    found = []

    def visit(node: ast.AST, in_function: bool, for_types: bool) -> None:
        in_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for_types = True
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} has a relative import; write the whole name"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [each if each in MODULES else node.module for each in inner]
        found.extend(Import(name, each, node.lineno, in_function, for_types) for each in dict.fromkeys(modules))
        for child in ast.iter_child_nodes(node):
            visit(child, in_function, for_types)

    visit(ast.parse(MODULES[name].read_text(encoding="utf-8")), False, False)
    return found


IMPORTS = [each for name in MODULES for each in imports_of(name)]


def unit(module: str) -> str:
    """locant.hf.plan -> hf; the root package is `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def ours(module: str) -> bool:
    return module.split(".")[0] == "locant"


@pytest.mark.parametrize("importer", sorted({unit(name) for name in MODULES} - {"__init__", "__main__"}))
def test_a_package_imports_only_what_lies_below_it(importer):
    allowed = MAY_IMPORT[importer] | {importer}
    wrong = [
        f"{each.importer}:{each.line} imports {each.imported}"
        for each in IMPORTS
        if unit(each.importer) == importer and ours(each.imported) and unit(each.imported) not in allowed
    ]
    assert wrong == [], f"{importer} may import {sorted(allowed)}"


def test_there_is_no_cycle_not_even_a_lazy_one():
    graph = {name: set() for name in MODULES}
    for each in IMPORTS:
        if ours(each.imported) and not each.for_types and each.importer != each.imported:
            graph[each.importer].add(each.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as problem:
        pytest.fail(f"modules import each other: {' ← '.join(problem.args[1])}")


def test_imports_inside_functions_have_a_stated_reason():
    wrong = []
    for each in IMPORTS:
        if not each.in_function or each.for_types:
            continue
        importer = unit(each.importer)
        if ours(each.imported):
            fine = (importer, "*") in LAZY or (importer, unit(each.imported)) in LAZY
        else:
            fine = each.imported.split(".")[0] in OPTIONAL or each.imported in OPTIONAL or importer == "cli"
        if not fine:
            wrong.append(f"{each.importer}:{each.line} imports {each.imported} inside a function")
    assert wrong == []


def test_nothing_listed_here_is_out_of_date():
    """A table that names what is gone would allow what nobody decided."""
    units = {unit(name) for name in MODULES}
    assert set(MAY_IMPORT) <= units
    lazy = [each for each in IMPORTS if each.in_function and not each.for_types]
    for importer, imported in LAZY:
        assert any(unit(x.importer) == importer and imported in ("*", unit(x.imported)) for x in lazy), importer
    used = {each.imported.split(".")[0] for each in lazy} | {each.imported for each in lazy}
    assert used >= set(OPTIONAL), f"no function imports {sorted(set(OPTIONAL) - used)}"


def test_the_reader_of_imports_sees_all_kinds(tmp_path, monkeypatch):
    """The graph must not lose imports: each of these is found, with where it stands."""
    (tmp_path / "it.py").write_text(
        "from typing import TYPE_CHECKING\nimport torch.nn\nif TYPE_CHECKING:\n    from locant.hf import plan\n"
        "class A:\n    def f(self):\n        if True:\n            from locant.hf.plan import Plan\n"
    )
    monkeypatch.setitem(MODULES, "it", tmp_path / "it.py")
    found = {(each.imported, each.in_function, each.for_types) for each in imports_of("it")}
    assert ("torch.nn", False, False) in found
    assert ("locant.hf.plan", False, True) in found
    assert ("locant.hf.plan", True, False) in found
