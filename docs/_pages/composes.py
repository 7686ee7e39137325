"""The page of what composes with what: every kind of optimizer is tried in every way to run it."""

import contextlib
import re
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist

import functional_optim as fo
from docs._pages.doors import ALONE, DOORS, ON_RANKS, Door, Kind, Values, update
from docs._pages.markdown import table

SPLIT = fo.labels({"matrices": fo.with_shape(ndim=2)}, default="rest")

KINDS = (
    Kind("one algorithm: `adamw(lr)`", lambda: fo.adamw(lr=0.1)),
    Kind("a schedule: `adamw(cosine(...))`", lambda: fo.adamw(lr=fo.cosine(0.1, steps=9))),
    Kind("a tensor: `adamw(torch.tensor(0.1))`", lambda: fo.adamw(lr=torch.tensor(0.1))),
    Kind(
        "`override(...)`",
        lambda: fo.adamw(lr=0.1).override(fo.matching("*bias"), weight_decay=0.0),
    ),
    Kind("`clip_by_global_norm`", lambda: fo.chain(fo.clip_by_global_norm(0.1), fo.adamw(0.1))),
    Kind("one norm per tensor: `lamb`", lambda: fo.lamb(lr=0.1)),
    Kind(
        "`partition`: `adamw` and `sgd`",
        lambda: fo.partition({"matrices": fo.sgd(0.1), "rest": fo.adamw(0.1)}, SPLIT),
    ),
    Kind(
        "whole matrices: `muon` and `adamw`",
        lambda: fo.partition({"matrices": fo.muon(0.1), "rest": fo.adamw(0.1)}, SPLIT),
        tolerance=1e-2,  # in bfloat16
    ),
    Kind("`soap`", lambda: fo.partition({"matrices": fo.soap(0.1), "rest": fo.adamw(0.1)}, SPLIT)),
    Kind(
        "`masked`",
        lambda: fo.chain(fo.masked(fo.weight_decay(0.1), fo.with_shape(ndim=2)), fo.sgd(0.1)),
    ),
    Kind("`freeze`", lambda: fo.chain(fo.freeze(fo.matching("0.*")), fo.adamw(0.1))),
    Kind("`accumulate`", lambda: fo.chain(fo.accumulate(2), fo.adamw(0.1))),
    Kind("`apply_if_finite`", lambda: fo.chain(fo.apply_if_finite(max_skips=3), fo.adamw(0.1))),
    Kind("`sam`", lambda: fo.chain(fo.sam(0.05), fo.sgd(0.1))),
    Kind("`ema`", lambda: fo.chain(fo.adamw(0.1), fo.ema(0.9))),
    Kind("`lookahead`", lambda: fo.chain(fo.adamw(0.1), fo.lookahead(2))),
    Kind("`schedule_free_adamw`", lambda: fo.schedule_free_adamw(lr=0.1)),
    Kind("`prodigy`", fo.prodigy),
    Kind("an input: `adahessian`", lambda: fo.adahessian(lr=0.1), inputs=True),
    Kind("8-bit state: `stored(...)`", lambda: fo.stored(fo.adamw(lr=0.1), state="int8")),
)

REASONS = {
    "one chain": "one chain for all leaves, and \\w+ acts on",
    "shared scalars": "keeps numbers that belong to no leaf",
    "gradients only": "takes only gradients",
    "numbers only": "a TorchScript program holds numbers|has no Python to ask|"
    "changes with what is fed",
    "all gradients": "needs the gradients of all parameters before",
    "names": "matches no parameter|selects parameters by their names",
    "branches": "data-dependent control flow|calling .item\\(\\) on a Tensor",
    "stored": "is stored already|no plain function",
    "whole tensors": "is a DTensor",
}
"""Short reasons, and what the errors say."""

MEANING = {
    "one chain": "All parameters must have the same chain. Run each part alone, or choose a way "
    "that takes partitions.",
    "shared scalars": "The optimizer keeps scalars that belong to no parameter.",
    "gradients only": "A step takes gradients and nothing else. Use `update` or `TorchOptimizer`.",
    "numbers only": "Hyper-parameters are numbers in a program. Give a number, and set another one "
    "before a step.",
    "all gradients": "The optimizer needs the gradients of all parameters before the first step.",
    "names": "Each parameter has an optimizer of its own, so a selector may match none of them. "
    "Wrap the selector of an override in `if_any`; for other selectors, step after backward.",
    "branches": "A step depends on the values of tensors, and `vmap` has one program for all.",
    "stored": "A stored optimizer is not stored twice, and TorchScript cannot run it.",
    "whole tensors": "A rank has a shard of each tensor, and the optimizer needs more than that.",
}


def outcome(kind: Kind, door: Door, expected: Values) -> str | None:
    """Try a kind of optimizer in one way to run it.

    Returns:
        None if it steps as ``update`` does, else the error that refuses it.

    Raises:
        AssertionError: the parameters differ from those of ``update``.
    """
    try:
        found = door.run(kind)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    for name, value in (found or {}).items():
        distance = float((value - expected[name]).abs().max())
        assert distance <= kind.tolerance, f"{kind.name}, {door.name}, {name}: {distance}"
    return None


def reason(error: str) -> str:
    """Return the short reason of a refusal.

    Raises:
        AssertionError: no reason, or several, fit the error.
    """
    fitting = [name for name, pattern in REASONS.items() if re.search(pattern, error)]
    assert len(fitting) == 1, f"{fitting} fit this error: {error}"
    return fitting[0]


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """Run in a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()


def outcomes() -> dict[tuple[str, str], str | None]:
    """Try everything.

    Returns:
        None or the error, by kind and door.
    """
    with _one_rank():
        found = {}
        for kind in KINDS:
            expected = update(kind)
            for door in DOORS:
                found[kind.name, door.name] = outcome(kind, door, expected)
    return found


HEAD = """# What composes with what

`update` takes every optimizer. This page shows which other ways to run an optimizer take it too.
Each cell was tried: two steps on a small model must give the parameters that `update` gives.
Where a cell says no, the constructor or the first step raises an error that says what to do.
Ways for ranks were tried here on one rank.

An optimizer that evaluates the loss, such as [`lbfgs`](how-to/lbfgs.md), runs by `update` and by
`TorchOptimizer(...).step(closure)`. All other ways refuse it.
"""


def page() -> str:
    """Return the page."""
    found = outcomes()
    parts = [HEAD]
    used = set[str]()
    for title, doors in (("In one process", ALONE), ("During backward, and on ranks", ON_RANKS)):
        rows = []
        for kind in KINDS:
            errors = [found[kind.name, door.name] for door in doors]
            why = [None if error is None else reason(error) for error in errors]
            used.update(one for one in why if one)
            rows.append([kind.name, *("yes" if one is None else f"no: {one}" for one in why)])
        ways = [[f"{door.name}", f"`{door.code}`"] for door in doors]
        parts += [f"## {title}\n", table(["optimizer", *(door.name for door in doors)], rows)]
        parts += [table(["column", "what was run"], ways)]
    assert used == set(MEANING), "a reason is no longer given"
    parts += ["## Reasons\n", table(["reason", "meaning and way out"], MEANING.items())]
    return "\n".join(parts)
