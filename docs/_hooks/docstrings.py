"""Griffe extension: docstrings as they stand in ``src``, in the Markdown that mkdocstrings reads.

- ``Example::`` becomes a section of examples, and another paragraph that ends in ``::`` ends in a
  colon: the block behind it is indented, which Markdown shows as code.
- :class:`Link` and the other roles become links to the reference, or code where the reference has
  no such name.
- An algorithm's docstring also has the mathematics, which stands at the head of its file.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))  # griffe loads this file alone, not its folder

from public_names import PACKAGES, names_by_definition

from functional_optim.core.constructor import RAISES

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([\w.]+)`")
EXAMPLE = re.compile(r"^( *)Example::?\n(?: *\n)*", re.MULTILINE)
RETURNS = re.compile(r"^( *Returns:\n +)", re.MULTILINE)
LITERAL = re.compile(r"^( *)(\S.*)::$", re.MULTILINE)
LONELY = re.compile(r"^ *::\n", re.MULTILINE)
SECTION = re.compile(r"^(Args|Returns|Raises|Example|Examples|Reference):", re.MULTILINE)
FORMULA = re.compile(r"\w+ += ")
"""The beginning of a formula that is not indented, such as ``p_t = ``."""

WITH_MATHEMATICS = tuple(
    f"functional_optim.{folder}." for folder in ("algorithms", "transforms", "wrappers")
)
"""Packages whose modules have a formula in their docstring."""


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of a package once all of its modules are read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite every docstring of a package, and let its public names mean what they import."""
        names = names_by_definition()
        for thing in _objects(pkg):
            if thing.docstring is not None:
                text = thing.docstring.value
                if thing.is_function and thing.path in names:
                    text = with_mathematics(with_errors(text, thing), thing)
                if isinstance(thing, griffe.Class):
                    text = with_inherited_arguments(text, thing)
                text = ROLE.sub(lambda found, at=thing: _link(found, at, names), text)
                thing.docstring.value = as_markdown(text)
        _prefer_imports(pkg)


def as_markdown(text: str) -> str:
    """Return a docstring without the colons of reStructuredText.

    A colon before what is returned keeps griffe from reading its first words as a type.
    """
    text = RETURNS.sub(r"\1: ", EXAMPLE.sub(r"\1Examples:\n", LONELY.sub("", text)))
    return LITERAL.sub(r"\1\2:", text)


def with_errors(text: str, function: griffe.Object) -> str:
    """Return a docstring with the section that the decorator of constructors adds to ``help``."""
    is_constructor = any(str(one.value) == "constructor" for one in function.decorators)
    if not is_constructor or "Raises:" in text:
        return text
    return text.replace("Example::", f"{RAISES}Example::", 1)


def with_mathematics(text: str, function: griffe.Object) -> str:
    """Return a docstring with the docstring of its module before the arguments, if it has one."""
    head = function.module.docstring
    if head is None or not function.module.path.startswith(WITH_MATHEMATICS):
        return text
    lines = ["Mathematics:", *(f"    {line}" for line in _paragraphs(head.value))]
    first = SECTION.search(text)
    place = len(text) if first is None else first.start()
    return "\n".join([text[:place].rstrip(), "", *lines, "", text[place:]])


def with_inherited_arguments(text: str, kind: griffe.Class) -> str:
    """Return a docstring with the arguments of the base, if a decorator adds them to ``help``."""
    if all(str(one.value) != "_with_arguments_of_stage" for one in kind.decorators):
        return text
    (base,) = kind.resolved_bases
    assert base.docstring is not None
    inherited = base.docstring.value.partition("Args:\n")[2]
    own, example, rest = text.partition("\n\nExample::")
    return f"{own}\n{inherited}{example}{rest}"


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the lines of the docstring of a module, with its formulas as blocks of code."""
    for paragraph in text.split("\n\n"):
        if paragraph.startswith(" ") or FORMULA.match(paragraph):
            yield from ("```text", *textwrap.dedent(paragraph).splitlines(), "```", "")
        else:
            yield from (*paragraph.splitlines(), "")


def _prefer_imports(package: griffe.Module) -> None:
    """Let ``hooks.step_hook`` be the function, where griffe takes the module of that name."""
    collection = package.modules_collection
    meant = {
        name: collection[thing]
        for thing, name in names_by_definition().items()
        if thing != name and name.startswith(f"{package.path}.")
    }
    for name, thing in meant.items():
        owner, _, short = name.rpartition(".")
        collection[owner].set_member(short, griffe.Alias(short, thing, parent=collection[owner]))


def _link(found: re.Match[str], thing: griffe.Object, names: dict[str, str]) -> str:
    """Return the Markdown of one role: a link if the reference has its target, code otherwise."""
    short, target = found.groups()
    shown = target.rpartition(".")[2] if short else target
    public = _public(target, thing, names)
    return f"`{shown}`" if public is None else f"[`{shown}`][{public}]"


def _public(target: str, thing: griffe.Object, names: dict[str, str]) -> str | None:
    """Return the name under which the reference documents the target of a role, or None."""
    if target in names.values():
        return target
    for path in _candidates(target, thing):
        owner, _, member = path.rpartition(".")
        if path in names:
            return names[path]
        if owner in names and not member.startswith("_"):
            kind = _get(thing.modules_collection, owner)
            if kind is not None and member in kind.all_members:
                has_text = kind.all_members[member].has_docstring
                return f"{names[owner]}.{member}" if has_text else names[owner]
    return None


def _candidates(target: str, thing: griffe.Object) -> Iterator[str]:
    """Yield the paths that a target may mean, as seen from the docstring that names it."""
    first, _, rest = target.partition(".")
    scope: griffe.Object | None = thing
    while scope is not None:
        if first in scope.all_members:
            path = _definition(scope.modules_collection, f"{scope.path}.{first}")
            yield f"{path}.{rest}" if rest else path
        if scope.is_module and "__init__" not in str(scope.filepath):
            break
        scope = scope.parent
    for package in ("", *(f"{one}." for one in PACKAGES)):
        owner, _, member = f"{package}{target}".rpartition(".")
        collection = thing.modules_collection
        if _get(collection, f"{package}{target}") is not None:
            yield _definition(collection, f"{package}{target}")
        if _get(collection, owner) is not None:
            yield f"{_definition(collection, owner)}.{member}"


def _get(collection: griffe.ModulesCollection, path: str) -> griffe.Object | griffe.Alias | None:
    try:
        found: griffe.Object | griffe.Alias = collection[path]
    except (KeyError, ValueError, griffe.GriffeError):
        return None
    return found


def _definition(collection: griffe.ModulesCollection, path: str) -> str:
    """Return the path where something is defined; the path itself, if it is not loaded yet."""
    found = _get(collection, path)
    try:
        return path if found is None else found.canonical_path
    except griffe.GriffeError:
        return path


def _objects(thing: griffe.Object) -> Iterator[griffe.Object]:
    yield thing
    for member in thing.members.values():
        if isinstance(member, griffe.Object):
            yield from _objects(member)
