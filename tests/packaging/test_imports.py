"""Tests of imports: one direction between packages, and no heavy imports by the core."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

SOURCE = Path(__file__).parents[2] / "src"
ABOVE = {
    "functional_optim": {"sharding", "hooks"},
    "sharding": {"hooks"},
    "hooks": set[str](),
}


def imported(source: str) -> set[str]:
    """Return the top-level packages of all imports of a module, including those in functions."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add((node.module or "").split(".")[0])
    return found


def declared() -> set[str]:
    """Return the dependencies of pyproject.toml, with the extras of the command and the tests."""
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["cli"], *extras["ray"], *extras["test"]]
    return {Requirement(text).name for text in wanted}


def test_what_is_imported_is_declared() -> None:
    """The package must not rely on dependencies of other packages."""
    own = {*ABOVE, *sys.stdlib_module_names}
    found: dict[str, str] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        for name in imported(file.read_text("utf-8")) - own - declared():
            found.setdefault(name, str(file.relative_to(SOURCE)))
    assert found == {}


def test_imports_are_found_wherever_they_stand() -> None:
    source = "import a.b\nfrom c.d import e\ndef f():\n    if g:\n        import h as i, j\n"
    assert imported(source) == {"a", "c", "h", "j"}


def test_no_package_imports_one_above_it() -> None:
    wrong = {
        str(file.relative_to(SOURCE)): sorted(found)
        for package, above in ABOVE.items()
        for file in sorted((SOURCE / package).rglob("*.py"))
        if (found := imported(file.read_text(encoding="utf-8")) & above)
    }
    assert wrong == {}


def modules(package: str) -> dict[str, set[str]]:
    """Return, for each module of a package, the modules of the package that it imports."""
    files = {
        ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): file
        for file in sorted((SOURCE / package).rglob("*.py"))
    }
    return {name: named(file.read_text("utf-8"), {*files}) for name, file in files.items()}


def named(source: str, known: set[str]) -> set[str]:
    """Return the known modules that a module imports, by a statement or by import_module."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(below & known or {str(node.module)})
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            found.update(one.value for one in node.args if isinstance(one, ast.Constant))
    return found & known


def rings(graph: dict[str, set[str]]) -> set[str]:
    """Return the modules that import themselves through other modules."""

    def reached(start: str) -> set[str]:
        found, left = set[str](), [*graph[start]]
        while left:
            one = left.pop()
            if one not in found:
                found.add(one)
                left += graph[one]
        return found

    return {name for name in graph if name in reached(name)}


def test_no_module_is_in_a_ring_of_imports() -> None:
    """This includes imports for types and imports inside functions."""
    assert set().union(*(rings(modules(package)) for package in ABOVE)) == set()


def test_rings_are_found() -> None:
    known = {"a", "a.b", "c", "d"}
    source = "def f():\n    from a import b\nif TYPE_CHECKING:\n    import c\nimport_module('d')"
    assert named(source, known) == {"a.b", "c", "d"}
    assert named("from a import x, b", known) == {"a.b"}
    assert rings({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {"a", "b", "c"}


def test_the_packages_are_these() -> None:
    found = {file.parent.name for file in SOURCE.glob("*/__init__.py")}
    assert found == set(ABOVE)


def test_the_core_and_its_first_step_are_quiet_and_bring_nothing_heavy() -> None:
    """Importing exports brings no compiler, and computing the form of a state brings no sympy.

    Importing sympy takes a third of a second.
    """
    heavy = ("click", "hooks", "matplotlib", "ray", "rich", "sharding", "torch.distributed.rpc")
    compilers = ("torch._inductor", "torch._dynamo", "torch.fx.experimental", "sympy")
    brought = modules_brought_by(
        "import functional_optim as fo, functional_optim.export",
        f"assert not [name for name in {{*sys.modules}} - before if name.startswith({compilers})]",
        f"assert not [name for name in {{*sys.modules}} - before if name.startswith({heavy})]",
        "params, grads = [[torch.ones(9), torch.ones(3, 5)] for _ in range(2)]",
        "fo.adamw(0.1).using(executor='auto').bind(params).step(grads)",
    )
    assert [name for name in brought if name.startswith(("sympy", "torch._dynamo"))] == []


def modules_brought_by(*lines: str) -> list[str]:
    """Return the modules that a new process imports for these lines, beyond torch and optree."""
    program = "\n".join(
        [
            "import json, sys, torch, optree",
            "before = set(sys.modules)",
            *lines,
            "print(json.dumps(sorted(set(sys.modules) - before)))",
        ]
    )
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    found: list[str] = json.loads(finished.stdout)
    return found
