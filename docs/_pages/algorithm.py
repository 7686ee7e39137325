"""The page of one algorithm."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import functional_optim
from docs._pages import convergence, differences
from docs._pages.advice import ADVICE, DEFAULTS
from docs._pages.markdown import table
from docs._pages.stories import body, example, formula, marked, reference, section, summary
from functional_optim import Optimizer, algorithms, describe
from functional_optim.core.leaf import is_measured
from tests.cases import CASES, INPUT_CASES

SIZE = 1024
"""Rows and columns of the matrix whose state is counted."""


class Field(NamedTuple):
    """A field of a state, as its file describes it."""

    name: str
    words: str


def pages() -> dict[str, Callable[[], str]]:
    """Return the pages of all algorithms by their files."""
    return {f"algorithms/{name}.md": _page_of(name) for name in algorithms.__all__}


def _page_of(name: str) -> Callable[[], str]:
    return lambda: page(name)


def page(name: str) -> str:
    """Return the page of an algorithm."""
    made = getattr(functional_optim, name)
    parts = [f"# {name}\n", f"{summary(made)}\n"]
    if text := body(made):
        parts.append(f"{text}\n")
    parts += [f"## Formula\n\n```text\n{formula(made)}\n```\n", _advice(name)]
    parts += ["## Hyper-parameters\n", _hyper(made), _defaults(name, made)]
    parts += [
        f"## Example\n\n```pycon\n>>> from functional_optim import {name}\n{example(made)}\n```\n"
    ]
    parts += [_state(name), _scope(name), _agreement(name), _convergence(name)]
    parts.append(
        f"## Reference\n\n{reference(made)}\n\n"
        f"[`{name}` in the reference](../reference/algorithms.md#functional_optim.{name}) has the "
        "signature with types, what it returns and what it raises.\n"
    )
    return "\n".join(one for one in parts if one)


def _advice(name: str) -> str:
    if name not in ADVICE:
        return ""
    found = ADVICE[name]
    return f"## When to use it\n\n{found.use}\n\n## When not to\n\nNot {found.avoid}\n"


def _hyper(made: Any) -> str:
    """Return the table of arguments: default, and meaning."""
    words = dict(_arguments(made))
    rows = []
    for name, one in inspect.signature(made).parameters.items():
        default = "required" if one.default is one.empty else f"`{one.default!r}`"
        rows.append([f"`{name}`", default, words.get(name, "")])
    return table(["argument", "default", "meaning"], rows)


def _arguments(made: Any) -> Iterator[tuple[str, str]]:
    """Yield each argument of a docstring with its description as one line."""
    text = section(made, "Args:")
    for found in re.finditer(r"^(\w+(?:, \w+)*): (.*(?:\n +.*)*)", text, flags=re.MULTILINE):
        for name in found[1].split(", "):
            yield name, marked(" ".join(found[2].split()))


def _defaults(name: str, made: Any) -> str:
    """Return where the defaults are from: a sentence of the file, the torch class, or the paper."""
    head = inspect.getdoc(inspect.getmodule(made)) or ""
    for text, pattern in ((head, r"\bdefaults?\b"), (inspect.getdoc(made) or "", r"\bdefaults\b")):
        for sentence in re.split(r"(?<=[.;]) ", " ".join(text.split())):
            if re.search(pattern, sentence, flags=re.IGNORECASE):
                found = marked(sentence).removesuffix(";")
                return f"{found[0].upper()}{found[1:]}\n"
    case = _case(name)
    if case is not None and case.oracle is not None:
        return f"The defaults are those of `torch.optim.{case.oracle.__name__}`.\n"
    return DEFAULTS.get(name, "")


def _case(name: str) -> Any:
    return CASES.get(name) or INPUT_CASES.get(name)


def _optimizer(name: str) -> Optimizer | None:
    """Return the optimizer with its defaults, or None if it is no chain of stages."""
    made = getattr(functional_optim, name)()
    return made if isinstance(made, Optimizer) else None


def _fields(optimizer: Optimizer) -> list[Field]:
    """Return the fields of state of all stages, with the comments behind them."""
    found = []
    for link in optimizer.links:
        for field in getattr(link.stage.state, "_fields", ()):
            source = inspect.getsource(link.stage.state)
            comment = re.search(rf"^    {field}: [^#\n]*#\s*(.*)$", source, flags=re.MULTILINE)
            found.append(Field(field, "" if comment is None else comment[1]))
    return found


def _state(name: str) -> str:
    optimizer = _optimizer(name)
    if optimizer is None:
        return "## State\n\nThe state is one tuple over the flat vector of all parameters.\n"
    sizes = _sizes(optimizer)
    rows = []
    for field in _fields(optimizer):
        size = f"{round(sizes[field.name], 3):g}" if field.name in sizes else "0"
        rows.append([f"`{field.name}`", size, field.words])
    if not rows:
        return "## State\n\nThere is no state beside the count of steps.\n"
    total = f"{round(sum(sizes.values()), 3):g}"
    head = ["field", "bytes per parameter", "shape and meaning"]
    return (
        f"## State\n\nFor a float32 matrix of {SIZE} rows and {SIZE} columns, with the defaults: "
        f"{total} bytes per parameter.\n\n{table(head, rows)}"
    )


def _sizes(optimizer: Optimizer) -> dict[str, float]:
    """Return the bytes per parameter of each field of state."""
    rows = describe(optimizer, torch.empty(SIZE, SIZE, device="meta")).rows
    given = ("parameter", "gradient", "step")
    return {row.name: row.bytes_per_parameter for row in rows if row.name not in given}


def _scope(name: str) -> str:
    optimizer = _optimizer(name)
    if optimizer is None:
        return (
            "## Scope and cost\n\nGlobal: a step needs all parameters at once, and evaluates the "
            "loss several times.\n"
        )
    stages = [link.stage for link in optimizer.links]
    if any(is_measured(one) or one.sharing for one in stages):
        scope = "Global: a step needs sums over all tensors, or scalars that belong to no tensor."
    elif any(one.kind == "per_matrix" for one in stages):
        scope = "Per matrix: a step needs a whole tensor, and no other one."
    else:
        scope = "Pointwise: each element is stepped alone, so that a tensor may be cut anywhere."
    moved = 4 * 3 + 2 * sum(_sizes(optimizer).values())
    cost = (
        f"A step reads and writes at least {round(moved, 1):g} bytes per float32 parameter: the "
        "parameter and the state in and out, and the gradient in."
    )
    return f"## Scope and cost\n\n{scope} {cost}\n"


def _agreement(name: str) -> str:
    results = differences.stored()
    rows = [one for one in results["rows"].values() if one["algorithm"] == name]
    head = "## Agreement\n\n"
    case = _case(name)
    if case is not None and case.oracle is not None:
        head += f"The steps equal those of `torch.optim.{case.oracle.__name__}` bit for bit. "
    else:
        head += "The steps are compared with the formula in float64. "
    head += "[Agreement](../agreement.md) has the whole table.\n"
    if not rows:
        return head
    text = "The largest difference from other implementations, relative to the distance moved:\n"
    return f"{head}\n{text}\n{differences.table(results, name)}"


def _convergence(name: str) -> str:
    rows = convergence.rows_of(name)
    if not rows:
        return ""
    head = ["problem", "passes", "scores of three seeds", "threshold", "learning rate"]
    picture = (
        f"![Scores of {name} on each problem, three seeds](../pictures/convergence/of_{name}.svg)"
    )
    return (
        "## Convergence\n\nScores after the last step; [convergence](../convergence.md) describes "
        f"the problems.\n\n{table(head, rows)}\n{picture}\n"
    )
