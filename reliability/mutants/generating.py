"""Generates the mutants of a Python file with the operators of mutmut.

mutmut's own runner is not used. It mutates no decorated function (properties, class methods, operators) and no
module-level code, because it keeps all mutants in one file, each next to its original. We run one mutant per process
instead, so every part of a file can be mutated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper
from mutmut.mutation.mutators import mutation_operators

from reliability.mutants.exclusions import excluded_mutation, excluded_node
from reliability.mutants.mutant import MODULE_LEVEL, Mutant, changed_lines, digest


def mutants_of_file(root: Path, path: str, lines: set[int] | None = None) -> Iterator[Mutant]:
    """The mutants of a Python file, in the order of the file; only those on `lines`, if given.

    Mutants with the same text appear once. Texts that are not valid Python are left out.
    """
    source = (root / path).read_text()
    module = MetadataWrapper(cst.parse_module(source)).module
    pieces = [module.code_for_node(statement) for statement in module.body]
    before, after = source.split("".join(pieces))
    seen, repeated = {source}, Counter[tuple[str, str, str]]()
    for index, statement in enumerate(module.body):
        head, tail = before + "".join(pieces[:index]), "".join(pieces[index + 1 :]) + after
        visitor = _Visitor()
        statement.visit(visitor)
        for node, mutated, function in visitor.found:
            text = head + module.code_for_node(statement.deep_replace(node, mutated)) + tail
            if text in seen or not _valid(text):
                continue
            seen.add(text)
            line, old, new = changed_lines(source, text)
            owner, name = function
            version = digest(module.code_for_node(owner or statement))
            if repeated[name, old, new]:  # the same line again in the same function
                version += f"-{repeated[name, old, new]}"
            repeated[name, old, new] += 1
            if lines is not None and not lines & set(range(line, line + old.count("\n") + 1)):
                continue
            yield Mutant(path, name, line, old, new, text, version)


def _valid(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class _Visitor(cst.CSTVisitor):
    """Collects (node, mutated node, (function, qualified name)) of one top-level statement."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[cst.CSTNode, cst.CSTNode, tuple[cst.CSTNode | None, str]]] = []
        self.ancestors: list[cst.CSTNode] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if excluded_node(node, self.ancestors):
            return False
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                for mutated in operator(node):
                    if not excluded_mutation(node, mutated):
                        self.found.append((node, mutated, self._function()))
        self.ancestors.append(node)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if self.ancestors and self.ancestors[-1] is original_node:
            self.ancestors.pop()

    def _function(self) -> tuple[cst.CSTNode | None, str]:
        """The outermost function around the present node. Its decorators and defaults run at import."""
        names: list[str] = []
        for position, node in enumerate(self.ancestors):
            if isinstance(node, cst.ClassDef):
                names.append(node.name.value)
            if isinstance(node, cst.FunctionDef):
                inside = self.ancestors[position + 1 :]
                if inside and inside[0] is not node.body:
                    return None, MODULE_LEVEL
                return node, ".".join([*names, node.name.value])
        return None, MODULE_LEVEL
