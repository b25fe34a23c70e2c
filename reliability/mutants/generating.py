"""Generates the mutants of a Python file with the operators of mutmut.

mutmut's own runner is not used. It mutates no decorated function (properties, class methods, operators) and no
module-level code, because it keeps all mutants in one file, each next to its original. We run one mutant per process
instead, so every part of a file can be mutated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, WhitespaceInclusivePositionProvider
from mutmut.mutation.mutators import mutation_operators

from reliability.mutants.exclusions import excluded_mutation, excluded_node
from reliability.mutants.mutant import MODULE_LEVEL, Mutant, changed_lines, digest


def mutants_of_file(root: Path, path: str, lines: set[int] | None = None) -> Iterator[Mutant]:
    """The mutants of a Python file, in the order of the file; only those on `lines`, if given.

    Mutants with the same text appear once. Texts that are not valid Python are left out.
    """
    source = (root / path).read_text()
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = _Visitor(wrapper.resolve(WhitespaceInclusivePositionProvider), source)
    wrapper.module.visit(visitor)
    seen, repeated = {source}, Counter[tuple[str, str, str]]()
    for first, end, mutated, owner in visitor.found:
        text = source[:first] + wrapper.module.code_for_node(mutated) + source[end:]
        line, old, new = changed_lines(source, text)
        if lines is not None and not lines & set(range(line, line + old.count("\n") + 1)):
            continue
        if text in seen or not _valid(text):
            continue
        seen.add(text)
        version = owner.version
        if repeated[owner.name, old, new]:  # the same line again in the same function
            version += f"-{repeated[owner.name, old, new]}"
        repeated[owner.name, old, new] += 1
        yield Mutant(path, owner.name, line, old, new, text, version)


def _valid(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


@dataclass(frozen=True)
class _Owner:
    """The outermost function around a node, or the top-level statement if it is in none."""

    name: str
    version: str


class _Visitor(cst.CSTVisitor):
    """Collects (first character, last, mutated node, owner) of a module."""

    def __init__(self, positions: Mapping[cst.CSTNode, CodeRange], source: str) -> None:
        super().__init__()
        self.found: list[tuple[int, int, cst.CSTNode, _Owner]] = []
        self.ancestors: list[cst.CSTNode] = []
        self.positions, self.source = positions, source
        self.starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]
        self.owners: dict[tuple[cst.CSTNode, str], _Owner] = {}

    def on_visit(self, node: cst.CSTNode) -> bool:
        if excluded_node(node, self.ancestors):
            return False
        # The text of a match statement depends on its indentation, which a node does not know.
        for kind, operator in () if isinstance(node, cst.Match) else mutation_operators:
            if isinstance(node, kind):
                for mutated in operator(node):
                    if not excluded_mutation(node, mutated):
                        self.found.append((*self._span(node), mutated, self._owner()))
        self.ancestors.append(node)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if self.ancestors and self.ancestors[-1] is original_node:
            self.ancestors.pop()

    def _span(self, node: cst.CSTNode) -> tuple[int, int]:
        place = self.positions[node]
        first, end = (self.starts[at.line - 1] + at.column for at in (place.start, place.end))
        return first, end

    def _owner(self) -> _Owner:
        """Decorators and defaults of a function are not in it: they run at import."""
        names: list[str] = []
        for position, node in enumerate(self.ancestors):
            if isinstance(node, cst.ClassDef):
                names.append(node.name.value)
            if isinstance(node, cst.FunctionDef):
                inside = self.ancestors[position + 1 :]
                if inside and inside[0] is not node.body:
                    break
                return self._owner_of(node, ".".join([*names, node.name.value]))
        return self._owner_of(self.ancestors[1], MODULE_LEVEL)

    def _owner_of(self, node: cst.CSTNode, name: str) -> _Owner:
        if (node, name) not in self.owners:
            first, end = self._span(node)
            self.owners[node, name] = _Owner(name, digest(self.source[first:end].strip()))
        return self.owners[node, name]
