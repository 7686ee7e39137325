"""Drawn cases as plain data, which ranks read from JSON."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from functional_optim import (
    Optimizer,
    adagrad,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    sgd,
    stored,
)
from sharding import hierarchical, sliced

SGD = sgd(lr=0.1, momentum=0.9, weight_decay=0.01)
TORCH_SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ADAMW = adamw(lr=1e-2, weight_decay=0.1)


class Made(NamedTuple):
    """Optimizer for ZeRO, and the equal optimizer for one process."""

    given: Any
    oracle: Optimizer
    options: Mapping[str, Any] = MappingProxyType({})
    """Further arguments of ZeroRedundancyOptimizer."""


def _ours(optimizer: Optimizer) -> Made:
    return Made(optimizer, optimizer)


OPTIMIZERS: Mapping[str, Made] = MappingProxyType(
    {
        "sgd": _ours(SGD),
        "adamw": _ours(ADAMW),
        "adagrad": _ours(adagrad(lr=0.05)),
        "clip by value": _ours(chain(clip_by_value(0.5), SGD)),
        "clip by norm": _ours(chain(clip_by_global_norm(0.5), SGD)),
        "int8": _ours(stored(ADAMW, state="int8")),
        "torch sgd": Made(torch.optim.SGD, SGD, MappingProxyType(TORCH_SGD)),
    }
)

POLICIES: Mapping[str, Callable[[int], Any]] = MappingProxyType(
    {
        **{
            name: lambda ranks, name=name: name
            for name in (
                *("greedy", "largest_first", "contiguous"),
                *("elements", "sliced", "two_resource"),
            )
        },
        # The policy "sliced" cuts only large parameters, but thin slices cut nearly all.
        "thin slices": lambda ranks: partial(sliced, least=2, align=1, mixed=True),
        "nodes of one": lambda ranks: partial(hierarchical, node_size=1),
        "nodes of two": lambda ranks: partial(hierarchical, node_size=2),
        "nodes, cut": lambda ranks: partial(
            hierarchical, node_size=max(1, ranks // 2), within="elements", mixed=True
        ),
    }
)
"""Functions from the number of ranks to a policy for ZeroRedundancyOptimizer."""
CUTTING = ("elements", "sliced", "thin slices", "nodes, cut")
NODES = ("nodes of one", "nodes of two", "nodes, cut")

HOOKS = ("scatter", "held", "interleaved")
"""zero_step_hook, and torch's two hooks."""
INNERS = ("ordered", "allreduce", "list", "copy", "at once", "fp16", "bf16")
"""PowerSGD is left out: its result is no mean, so one process alone cannot compute it."""
DTYPES = MappingProxyType(
    {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
)


class Drawn(NamedTuple):
    """Drawn parameter."""

    shape: Sequence[int]
    dtype: str = "float32"
    turned: bool = False
    """True if the parameter is transposed in memory."""
    frozen: bool = False
    used: str = "always"
    """See :func:`is_used`."""
    group: int = 0
    left: bool = False
    """True if DDP reduces the parameter, but ZeRO does not have it."""
    beside: bool = False
    """True if the parameter belongs to the same module as the one before."""


class Group(NamedTuple):
    """Hyper-parameters of one parameter group, as multiples of those of the optimizer."""

    lr: float = 1.0
    weight_decay: float = 1.0


class Case(NamedTuple):
    """Training run."""

    hook: str
    optimizer: str
    policy: str
    params: Sequence[Drawn]
    groups: Sequence[Group] = (Group(),)
    inner: str = "allreduce"
    world: int = 2
    members: Sequence[int] | None = None
    """The ranks that train, or None if all do."""
    cap: float = 0.03
    """``bucket_cap_mb`` of DDP."""
    unused: bool = False
    """``find_unused_parameters`` of DDP."""
    static: bool = False
    """``static_graph`` of DDP."""
    bucket_view: bool = False
    """``gradient_as_bucket_view`` of DDP."""
    param_view: bool = False
    """``parameters_as_bucket_view`` of ZeroRedundancyOptimizer."""
    overlap: bool = True
    """``overlap_with_ddp`` of ZeroRedundancyOptimizer."""
    backwards: int = 1
    """Number of backward passes in an iteration, see :meth:`parts`."""
    iterations: int = 4
    changes: int | None = None
    """The iteration before which hyper-parameters change, or None."""
    memory: bool = False
    """True if ranks exchange all data through shared memory, even tiny messages."""
    executor: str | None = None
    """Executor of the steps, or None for the fastest."""
    seed: int = 0

    @property
    def ranks(self) -> int:
        """Return the number of ranks that train."""
        return self.world if self.members is None else len(self.members)

    def parts(self, iteration: int) -> int:
        """Return the number of backward passes in an iteration; all but the last use ``no_sync``.

        DDP itself fails, even without a hook, if the first forward pass of a static graph uses
        ``no_sync``.
        """
        return 1 if self.static and not iteration else self.backwards

    @property
    def exact(self) -> bool:
        """Return True if gradients must be small whole numbers, whose sums are exact in any order.

        With more than two ranks, gloo's all-reduce adds in an unknown order. A compressed
        all-reduce rounds. So the results for other numbers cannot be predicted.
        """
        if self.hook == "scatter" or self.inner == "ordered":
            return False
        return self.ranks > 2 or self.inner in ("fp16", "bf16")


def of_json(told: Mapping[str, Any]) -> Case:
    """Return a case from its JSON data."""
    params = [Drawn(*one) for one in told["params"]]
    groups = [Group(*one) for one in told["groups"]]
    return Case(**{**told, "params": params, "groups": groups})


def is_used(used: str, rank: int, iteration: int) -> bool:
    """Return True if a parameter contributes to the loss of a rank in an iteration."""
    return {
        "always": True,
        "never": False,
        "one rank": rank == 1,
        "odd": iteration % 2 == 1,
        "now and then": rank == 0 and iteration % 3 == 0,
    }[used]


USES = ("always", "never", "one rank", "odd", "now and then")
FIXED_USES = USES[:3]
"""Uses that are the same in all iterations, as static_graph requires."""


def refusals(case: Case) -> list[str]:
    """Return the errors that the documentation allows for a case, empty if the case must run."""
    nodes = {"nodes of one": 1, "nodes of two": 2, "nodes, cut": max(1, case.ranks // 2)}
    size = nodes.get(case.policy, case.ranks)
    stepped = [one for one in case.params if not one.left and not one.frozen]
    left = any(one.left and not one.frozen for one in case.params)
    reasons = {
        "node_size must divide the number of ranks": case.ranks % size != 0,
        "align must be a multiple of 256": case.optimizer == "int8"
        and case.policy == "thin slices",
        "takes parameters of torch.float32": case.optimizer == "int8"
        and any(one.dtype != "float32" for one in stepped),
        "zero must be made with overlap_with_ddp=True to be stepped by a hook": not case.overlap,
        "whose gradients would reach no rank": case.hook == "scatter" and left,
        "replicas, and a reduction has one owner for each element": case.hook == "scatter"
        and case.ranks > size,
    }
    return [text for text, refused in reasons.items() if refused]
