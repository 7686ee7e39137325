"""Declaration of the combinations of algorithm, storage and executor that work, with reasons.

A test compares the declaration with what the code accepts and refuses. Another test checks the laws
for all combinations that are declared to work.
"""

import itertools
from dataclasses import replace
from typing import Any

import torch

from functional_optim.core.stage import Rule, Transform
from functional_optim.core.state import state_tensors
from functional_optim.core.state_init import init_like
from functional_optim.kernels import EXECUTORS, ExecutorName, is_measured
from functional_optim.optimizer import Optimizer
from functional_optim.storage import PARAM_STORAGES, STATE_STORAGES, stored
from functional_optim.testing.subject import Subject

PARTS = [*itertools.product(PARAM_STORAGES, STATE_STORAGES)]
"""Pairs of a storage of parameters and a storage of state."""


def storage_name(param: str, state: str) -> str:
    """Return the key of a pair in :data:`STORAGES`."""
    named = [*([param] * (param != "float32")), *([f"state {state}"] * (state != "float32"))]
    return ", ".join(named) or "float32"


STORAGES: dict[str, dict[str, Any]] = {
    storage_name(param, state): {
        **({"param": param} if param != "float32" else {}),
        **({"state": state} if state != "float32" else {}),
    }
    for param, state in PARTS
}
"""Arguments of ``stored`` by name: all pairs of a storage of parameters and one of state."""
STORAGES["bfloat16+kahan, state int8+stochastic"]["seed"] = 3
STORAGES["bfloat16+stochastic, state bfloat16"]["state_device"] = "cpu"


def storages_of(row: int) -> list[str]:
    """Return the storages to try a chain in: each of parameters once, and each of state once.

    Five chains in a row have all pairs.
    """
    states = [*STATE_STORAGES]
    return [
        storage_name(param, states[(place + row) % len(states)])
        for place, param in enumerate(PARAM_STORAGES)
    ]


def why_not(optimizer: Optimizer, storage: str, executor: str) -> str | None:
    """Return why an executor cannot run a chain in a storage; None if it can.

    Args:
        optimizer: a chain that is not stored, with its default options.
        storage: a key of :data:`STORAGES`.
        executor: name of the executor.

    Raises:
        ValueError: a storage or an executor that does not exist.
    """
    for what, name, table in (("storage", storage, STORAGES), ("executor", executor, EXECUTORS)):
        if name not in table:
            raise ValueError(f"{what} must be one of {', '.join(map(repr, table))}, got {name!r}")
    stages = optimizer.stages
    refusal = _why_not_stored(optimizer) if STORAGES[storage] else None
    if refusal is not None:
        return refusal
    whole = [stage.name for stage in stages if stage.kind == "per_matrix"]
    if whole and executor != "reference":
        return f"kernels step runs of elements, and {whole[0]} needs its whole tensor"
    if executor not in ("reference", "fused") and (scalar := _stages_with_scalars(optimizer)):
        return f"kernels compute numbers before elements, and {scalar[0]} keeps one in its state"
    return "torch's fused kernels step tensors on CUDA only" if executor == "fused" else None


def _stages_with_scalars(optimizer: Optimizer) -> list[str]:
    """Return the names of the stages whose state has a 0-d tensor."""
    if optimizer.is_composed:
        return []
    hypers = [link.hyper for link in optimizer.links]
    states = init_like(optimizer.stages, hypers, (2, 2), torch.float32).stages
    kept = zip(optimizer.stages, states, strict=True)
    return [stage.name for stage, one in kept if any(t.dim() == 0 for t in state_tensors([one]))]


def _why_not_stored(optimizer: Optimizer) -> str | None:
    if optimizer.is_composed:
        return "a stored step is computed for each leaf alone, but these leaves share scalars"
    measured = [index for index, stage in enumerate(optimizer.stages) if is_measured(stage)]
    last = max(measured, default=0)
    if any(isinstance(stage, Rule) for stage in optimizer.stages[:last]):
        return "a stored step changes a parameter once, but a total is needed between two changes"
    after = optimizer.stages[last:] if measured else ()
    if any(isinstance(stage, Transform) and stage.raw for stage in after):
        return "a stored step begins after the total, and does not have the gradient from before it"
    return None


def stored_subject(subject: Subject, storage: str, executor: ExecutorName = "reference") -> Subject:
    """Return a subject whose optimizers are stored, with parameters in the dtype of the storage.

    Args:
        subject: of optimizers that are not stored. The result has no oracle.
        storage: a key of :data:`STORAGES`.
        executor: name of the executor.
    """
    arguments = STORAGES[storage]

    def factory(**options: Any) -> Optimizer:
        return stored(subject.factory(**options), **arguments).using(executor=executor)

    dtype = PARAM_STORAGES[arguments.get("param", "float32")].dtype
    return replace(subject, factory=factory, oracle=None, dtypes=(dtype,), scripted=not arguments)
