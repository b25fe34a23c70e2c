"""Which mutations are not made, by rule: those that cannot change what the library computes.

1. Annotations, type variables, `TYPE_CHECKING` blocks, type aliases, `cast` and `# type:` constructs.
2. Docstrings, imports and `__all__`.
3. The wording of errors and warnings: everything inside the arguments of `raise X(…)` and `warnings.warn(…)`.
   That an error is raised is tested; its sentences are not compared. Strings with a blank in them are sentences, or
   stand between words of one.
4. Assertions: they inform the type checker.
5. A string in capitals or in small letters: the operator that adds XX to the string is the same fault.
6. An argument removed from the middle of a call: the others move, and the call raises. Removing the last positional
   argument or a keyword is kept.
7. The strict argument of `zip`: it only matters for lists of unequal length, which callers cannot produce.
8. The first two arguments of `check_int`, `check_bool` and the like (the scheme and the name of the option): only the
   error contains them.
9. `device=…` arguments: the tests run on a CPU, where None is the same device.
10. None in place of False, and the options of `@dataclass`: both are false; a frozen object protects against changes
    that no code makes.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

_TYPING_CALL = m.Call(func=m.Name("TypeVar") | m.Name("cast") | m.Name("NewType") | m.Attribute(attr=m.Name("cast")))
_WARNING = m.Call(func=m.Attribute(value=m.Name("warnings"), attr=m.Name("warn")))
_ALL = m.Assign(targets=[m.AssignTarget(m.Name("__all__"))])
_TYPE_CHECKING = m.If(test=m.Name("TYPE_CHECKING"))
_STRICT = m.Arg(keyword=m.Name("strict"))
_DEVICE = m.Arg(keyword=m.Name("device"))
_DATACLASS = m.Decorator(decorator=m.Call(func=m.Name("dataclass")))
_CHECK = m.Call(func=m.Name(m.MatchIfTrue(lambda name: name.startswith("check_"))))
_FALSE = m.Name("False")
_DOCSTRING = m.Expr(value=m.SimpleString() | m.ConcatenatedString())
_OVERLOAD = m.FunctionDef(decorators=[m.AtLeastN(m.Decorator(decorator=m.Name("overload")), n=1)])
_EXCLUDED = (
    m.Annotation()
    | m.Import()
    | m.ImportFrom()
    | m.Assert()
    | _DOCSTRING
    | _TYPING_CALL
    | _WARNING
    | _ALL
    | _TYPE_CHECKING
    | _STRICT
    | _DEVICE
    | _DATACLASS
    | _OVERLOAD
)


def excluded_node(node: cst.CSTNode, ancestors: list[cst.CSTNode]) -> bool:
    """Whether nothing is mutated in this node and below it."""
    if m.matches(node, _EXCLUDED):
        return True
    if not ancestors:
        return False
    parent = ancestors[-1]
    if isinstance(parent, cst.Call) and m.matches(parent, _CHECK):
        return any(node is arg for arg in parent.args[:2])
    return isinstance(node, cst.Call) and isinstance(parent, cst.Raise)  # the message of an error


def excluded_mutation(node: cst.CSTNode, mutated: cst.CSTNode) -> bool:
    """Whether one mutation of a node is left out."""
    if isinstance(node, cst.SimpleString) and isinstance(mutated, cst.SimpleString):
        return "XX" not in mutated.value or " " in node.value
    if isinstance(node, cst.Call) and isinstance(mutated, cst.Call):
        return _changes_an_excluded_argument(node, mutated) or _removes_from_the_middle(node, mutated)
    if isinstance(node, cst.Assign | cst.AnnAssign) and m.matches(node, m.TypeOf(m.Assign, m.AnnAssign)(value=_FALSE)):
        return m.matches(mutated, m.TypeOf(m.Assign, m.AnnAssign)(value=m.Name("None")))
    return False


def _changes_an_excluded_argument(call: cst.Call, mutated: cst.Call) -> bool:
    """The operators that drop an argument, or make it None, are operators on the call around it."""
    kept = {id(arg) for arg in mutated.args}
    changed = [(position, arg) for position, arg in enumerate(call.args) if id(arg) not in kept]
    wording = 2 if m.matches(call, _CHECK) else 0
    return any(
        position < wording or m.matches(arg, _STRICT | _DEVICE) or _false_for_none(arg, mutated, position)
        for position, arg in changed
    )


def _false_for_none(arg: cst.Arg, mutated: cst.Call, position: int) -> bool:
    if not m.matches(arg.value, _FALSE) or position >= len(mutated.args):
        return False
    return m.matches(mutated.args[position].value, m.Name("None"))


def _removes_from_the_middle(call: cst.Call, mutated: cst.Call) -> bool:
    if len(mutated.args) == len(call.args):
        return False
    kept = {id(arg) for arg in mutated.args}
    removed = next(index for index, arg in enumerate(call.args) if id(arg) not in kept)
    after = call.args[removed + 1 :]
    return call.args[removed].keyword is None and any(arg.keyword is None for arg in after)
