"""Table of which algorithms run by which executors over which storages, with reasons.

This is a declaration, in words: a test holds it against what the code accepts and refuses, and
the laws are checked for all that is declared possible.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import torch

from functional_optim.core.initial import init_like
from functional_optim.core.stage import Rule, Stage, Transform
from functional_optim.core.state import state_tensors
from functional_optim.kernels import EXECUTORS, ExecutorName, is_measured
from functional_optim.optimizer import Optimizer
from functional_optim.storage import PARAM_STORAGES, STATE_STORAGES, stored
from functional_optim.testing.subject import Subject

STORAGES: dict[str, dict[str, Any]] = {
    "float32": {},
    **{name: {"param": name} for name in PARAM_STORAGES if name != "float32"},
    **{f"state {name}": {"state": name} for name in STATE_STORAGES if name != "float32"},
    "bfloat16+kahan, state int8+stochastic": {
        "param": "bfloat16+kahan",
        "state": "int8+stochastic",
        "seed": 3,
    },
    "bfloat16+stochastic, state bfloat16, on the CPU": {
        "param": "bfloat16+stochastic",
        "state": "bfloat16",
        "state_device": "cpu",
    },
}
"""Arguments of ``stored`` by name: each storage of parameters, each of state, and some together."""


def why_not(optimizer: Optimizer, storage: str, executor: str) -> str | None:
    """Return why an executor cannot run a chain in a storage; None if it can.

    Args:
        optimizer: a chain, not stored, with the options that it has by default.
        storage: a key of :data:`STORAGES`.
        executor: its name.

    Returns:
        The reason, in words.

    Raises:
        ValueError: a storage or an executor that does not exist.

    Example::

        >>> from functional_optim import lion
        >>> why_not(lion(), "state int8", "blocked")
        >>> why_not(lion(), "state int8", "fused")
        "torch's fused kernels step tensors on CUDA only"
    """
    for what, name, table in (
        ("storage", storage, STORAGES),
        ("executor", executor, EXECUTORS),
    ):
        if name not in table:
            raise ValueError(f"{what} must be one of {', '.join(map(repr, table))}, got {name!r}")
    stages = optimizer.stages
    is_stored = bool(STORAGES[storage])
    refusal = _why_not_stored(optimizer) if is_stored else None
    if refusal is not None:
        return refusal
    whole = [stage.name for stage in stages if stage.kind == "per_matrix"]
    if whole and executor != "reference":
        return f"kernels step runs of elements, and {whole[0]} needs its whole tensor"
    if executor not in ("reference", "fused") and (keeping := _keeping_numbers(optimizer)):
        return f"kernels compute numbers before elements, and {keeping[0]} keeps one in its state"
    return "torch's fused kernels step tensors on CUDA only" if executor == "fused" else None


def _keeping_numbers(optimizer: Optimizer) -> list[str]:
    """Return the names of the stages whose state has one number for a whole parameter."""
    if optimizer.is_composed:
        return []
    hypers = [link.hyper for link in optimizer.links]
    states = init_like(optimizer.stages, hypers, (2, 2), torch.float32).stages
    kept = zip(optimizer.stages, states, strict=True)
    return [stage.name for stage, one in kept if any(t.dim() == 0 for t in state_tensors([one]))]


def _why_not_stored(optimizer: Optimizer) -> str | None:
    if optimizer.is_composed:
        return "a stored step is a leaf's alone, and here leaves have numbers in common"
    if _rule_before_a_sum(optimizer.stages):
        return "a stored step does all to the parameter at once, and here a sum is taken in between"
    if _raw_behind_a_sum(optimizer.stages):
        return "a stored step begins behind the sum, and has no gradient from before it"
    return None


def _rule_before_a_sum(stages: Sequence[Stage]) -> bool:
    """Return True if a rule stands before a transform that measures all gradients."""
    sums = [index for index, stage in enumerate(stages) if is_measured(stage)]
    return any(isinstance(stage, Rule) for stage in stages[: max(sums, default=0)])


def _raw_behind_a_sum(stages: Sequence[Stage]) -> bool:
    """Return True if a transform takes the raw gradient behind one that measures all gradients."""
    sums = [index for index, stage in enumerate(stages) if is_measured(stage)]
    behind = stages[max(sums) :] if sums else ()
    return any(isinstance(stage, Transform) and stage.raw for stage in behind)


def possible_executors(optimizer: Optimizer, storage: str) -> list[ExecutorName]:
    """The executors that can run a chain in a storage.

    Example::

        >>> from functional_optim import lion
        >>> possible_executors(lion(), "bfloat16+kahan")
        ['auto', 'reference', 'blocked', 'prefer_fused', 'eager']
    """
    names: tuple[ExecutorName, ...] = get_args(ExecutorName)
    return [name for name in names if why_not(optimizer, storage, name) is None]


def stored_subject(subject: Subject, storage: str, executor: ExecutorName = "reference") -> Subject:
    """A subject whose optimizers are kept in a storage and run by an executor.

    Args:
        subject: of optimizers that are not stored; its oracle is left out.
        storage: a key of :data:`STORAGES`.
        executor: its name.

    Returns:
        A subject with the same options, of parameters in the storage's dtype.
    """
    arguments = STORAGES[storage]

    def factory(**options: Any) -> Optimizer:
        return stored(subject.factory(**options), **arguments).using(executor=executor)

    dtype = PARAM_STORAGES[arguments.get("param", "float32")].dtype
    return replace(subject, factory=factory, oracle=None, dtypes=(dtype,), scripted=not arguments)
