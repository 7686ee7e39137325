"""Public names, and the page of the reference that documents each of them.

Both are read from text, so that the documentation is built without an import of torch.
"""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"

PACKAGES = (
    "functional_optim",
    "functional_optim.export",
    "functional_optim.remote",
    "functional_optim.storage",
    "functional_optim.testing",
    "sharding",
    "sharding.storage",
    "sharding.testing",
    "hooks",
    "hooks.averaging",
    "hooks.averaging.compression",
    "hooks.averaging.contrib",
    "hooks.in_backward",
    "hooks.testing",
)
"""Packages whose ``__all__`` is public."""

MODULES = ("functional_optim.numeric",)
"""Modules without ``__all__`` whose functions are public."""

DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)


def public_names() -> list[str]:
    """Return the full name of everything public, such as ``functional_optim.adam``."""
    found = [f"{package}.{name}" for package in PACKAGES for name in _exported(package)]
    return found + [f"{module}.{name}" for module in MODULES for name in _functions(module)]


def documented_names() -> Counter[str]:
    """Return how often the reference documents each name."""
    pages = sorted(REFERENCE.glob("*.md"))
    return Counter(name for page in pages for name in DIRECTIVE.findall(page.read_text("utf-8")))


def definition(name: str) -> str:
    """Return the full name of what a name is imported from, where it is defined.

    A thing may have two public names: an averager is in ``hooks`` and in ``hooks.averaging``.
    """
    module, _, short = name.rpartition(".")
    source = _source(module)
    if source is None:
        return name
    for node in source.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for one in node.names:
                if one.name == "*" and short in _exported(node.module):
                    return definition(f"{node.module}.{short}")
                if (one.asname or one.name) == short:
                    return definition(f"{node.module}.{one.name}")
    return name


def names_by_definition() -> dict[str, str]:
    """Return the documented name of everything public, by the name of its definition."""
    return {definition(name): name for name in documented_names()}


def faults() -> list[str]:
    """Return one sentence for every public thing that the reference omits, repeats or invents."""
    public = {definition(name): name for name in reversed(public_names())}
    documented = Counter[str]()
    for name, count in documented_names().items():
        documented[definition(name)] += count
    return [
        *(
            f"{name} is public and not in docs/reference; add a line '::: {name}' to a page there"
            for thing, name in public.items()
            if thing not in documented
        ),
        *(
            f"docs/reference documents {thing} {count} times; keep one of them"
            for thing, count in documented.items()
            if count > 1
        ),
        *(
            f"docs/reference documents {name}, which is not public; remove the line '::: {name}'"
            for name in documented_names()
            if definition(name) not in public
        ),
    ]


@functools.cache
def _source(module: str) -> ast.Module | None:
    path = ROOT.joinpath("src", *module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text("utf-8")) if file.exists() else None


def _body(module: str) -> list[ast.stmt]:
    source = _source(module)
    if source is None:
        raise ValueError(f"{module} is named here as public, and src has no such module")
    return source.body


def _exported(package: str) -> list[str]:
    names: list[str] = []
    for node in _body(package):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names += ast.literal_eval(node.value)
        if isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "__all__":
            folder = ast.unparse(node.value).removesuffix(".__all__")  # __all__ += folder.__all__
            names += _exported(f"{package}.{folder}")
    if not names:
        raise ValueError(f"{package} has no list __all__, from which the reference is checked")
    return [name for name in names if not name.startswith("__")]


def _functions(module: str) -> list[str]:
    return [
        node.name
        for node in _body(module)
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
