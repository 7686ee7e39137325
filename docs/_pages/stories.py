"""Parts of docstrings: summary, formula, reference, example."""

import inspect
import re
from typing import Any

_EQUATION = re.compile(r"(with )?[\w{}\-|.]+ = |\d: |after each .+:  |\w+:  +\w+ = ")


def summary(thing: Any) -> str:
    """Return the first line of a docstring, with Markdown's marks."""
    return marked((inspect.getdoc(thing) or "").splitlines()[0])


def formula(thing: Any) -> str:
    """Return the equations at the head of the file that defines a function."""
    module = inspect.getmodule(thing)
    paragraphs = re.split(r"\n\s*\n", inspect.getdoc(module) or "")
    found = [one for one in paragraphs[1:] if one[0] == " " or _EQUATION.match(one)]
    assert found, f"no formula in {module}"
    return "\n\n".join(inspect.cleandoc("\n" + one) for one in found)


def reference(thing: Any) -> str:
    """Return the section Reference of a docstring as one line; empty if there is none."""
    return marked(" ".join(section(thing, "Reference:").split()))


def example(thing: Any) -> str:
    """Return the section Example of a docstring."""
    return section(thing, "Example::")


def body(thing: Any) -> str:
    """Return the paragraphs of a docstring between its first line and its first section."""
    paragraphs = re.split(r"\n\s*\n", inspect.getdoc(thing) or "")[1:]
    found = []
    for one in paragraphs:
        if re.match(r"(Args|Returns|Raises|Reference|Example):", one):
            break
        found.append(marked(one))
    return "\n\n".join(found)


def call(name: str, thing: Any) -> str:
    """Return a call with all arguments and their defaults, without types."""
    made = inspect.signature(thing)
    plain = [one.replace(annotation=one.empty) for one in made.parameters.values()]
    return f"{name}{inspect.Signature(plain)}"


def section(thing: Any, title: str) -> str:
    """Return the text of a section of a docstring, such as ``Args:``; empty if there is none."""
    text = inspect.getdoc(thing) or ""
    _, found, rest = text.partition(f"\n{title}\n")
    lines = []
    for line in rest.splitlines() if found else []:
        if line and not line.startswith(" "):
            break
        lines.append(line)
    return inspect.cleandoc("\n" + "\n".join(lines)).strip()


def marked(text: str) -> str:
    """Write code and names as Markdown does."""
    text = re.sub(r":\w+:`~?([\w.]+)`", lambda found: f"`{found[1].split('.')[-1]}`", text)
    return text.replace("``", "`")
