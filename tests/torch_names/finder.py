"""Finder of private names of torch in source code."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

PLAIN = frozenset({"_asdict", "_field_defaults", "_fields", "_make", "_replace"})
"""Names of a NamedTuple that are public despite their underscore."""

OF_TENSORS = frozenset(
    {
        *("_backward_hooks", "_base", "_cdata", "_coalesced_", "_grad", "_grad_fn", "_indices"),
        *("_is_view", "_make_subclass", "_nnz", "_typed_storage", "_values", "_version"),
    }
)
"""Private names of torch's tensors, which our own classes may define, too."""

_SPELLED = re.compile(r"(?<![\w.])torch(?:\.\w+)*\._[a-zA-Z]\w*")


@lru_cache(maxsize=None)
def nodes(source: str) -> list[ast.AST]:
    """Return all nodes of a module, the module first."""
    return list(ast.walk(ast.parse(source)))


class Found(NamedTuple):
    """A private name and its line."""

    line: int
    name: str


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.startswith("__")


def own_names(sources: Iterable[str]) -> set[str]:
    """Return the private names that modules define as functions, attributes or fields."""
    found = set[str]()
    for node in chain.from_iterable(map(nodes, sources)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
                found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__":
            found.update(ast.literal_eval(one) for one in node.args[1:2])
    return set(filter(is_private, found))


def known_names(sources: Iterable[str]) -> set[str]:
    """Return the private names that modules use, as attributes, imports, or in strings."""
    found = set[str]()
    for source in sources:
        every = nodes(source)
        for node in every:
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.ImportFrom):
                found.update((node.module or "").split("."), (one.name for one in node.names))
        for _, text in _strings(every):
            found.update(re.findall(r"\b_[a-zA-Z]\w*", text))
    return set(filter(is_private, found)) - {"_torch"}


def private_names(source: str, own: set[str], known: set[str]) -> list[Found]:
    """Return the private names of torch in a module, in the order of lines.

    A private attribute of something imported from torch belongs to torch. Any other private
    attribute belongs to torch if no module of ours defines it, or if it is a known name of torch.

    Args:
        source: the source code of the module.
        own: the private names that our modules define.
        known: the known private names of torch.
    """
    every = nodes(source)
    found = [*_in_imports(every), *_Attributes(every, own, known | OF_TENSORS).found]
    for line, text in _strings(every):
        found += [Found(line, name) for name in _SPELLED.findall(text)]
        if text in known:
            found.append(Found(line, text))
    return sorted(found)


def _in_imports(every: list[ast.AST]) -> Iterator[Found]:
    for node in every:
        if isinstance(node, ast.Import):
            paths = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{one.name}" for one in node.names]
        else:
            continue
        for path in paths:
            first, *rest = path.split(".")
            if first == "torch" and any(map(is_private, rest)):
                yield Found(node.lineno, path)


def _strings(every: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module with their lines, without docstrings."""
    told = {id(node.value) for node in every if isinstance(node, ast.Expr)}
    for node in every:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.lineno, node.value


class _Attributes(ast.NodeVisitor):
    """Collector of private attributes of torch, each with its longest path."""

    def __init__(self, every: list[ast.AST], own: set[str], known: Iterable[str]) -> None:
        self.found: list[Found] = []
        self._own, self._known = own, set(known)
        self._roots = dict(_bound(every))
        self.visit(every[0])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if is_private(node.attr) and self._is_torchs(node):
            self.found.append(Found(node.lineno, ast.unparse(node)))
        else:
            self.generic_visit(node)

    def _is_torchs(self, node: ast.Attribute) -> bool:
        root: ast.AST = node
        while isinstance(root, (ast.Attribute, ast.Call, ast.Subscript)):
            root = root.func if isinstance(root, ast.Call) else root.value
        name = root.id if isinstance(root, ast.Name) else ""
        package = self._roots.get(name, "")
        if package == "torch":
            return True
        if package in sys.stdlib_module_names:
            return False
        if name in {"self", "cls"} and root is node.value:
            return node.attr not in self._own | PLAIN
        return node.attr not in self._own | PLAIN or node.attr in self._known


def _bound(every: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield each name that an import binds, anywhere in the module, with its package."""
    for node in every:
        if isinstance(node, ast.Import):
            for one in node.names:
                package = one.name.split(".")[0]
                yield one.asname or package, package
        elif isinstance(node, ast.ImportFrom):
            for one in node.names:
                yield one.asname or one.name, (node.module or "").split(".")[0]
