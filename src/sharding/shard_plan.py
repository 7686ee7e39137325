"""ShardPlan: immutable, serializable, checked data on who owns which elements. plan() makes one."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sharding import plan_diff, plan_json, report, table
from sharding.assignment import assign, find_policy
from sharding.cost import Cost
from sharding.model_specs import as_specs
from sharding.optimizer_costs import OptimizerOrFactory
from sharding.ownership import Ownership, views_of
from sharding.pieces import Pieces
from sharding.problem import Policy, check_world_size
from sharding.spec import check_specs


@dataclass(frozen=True)
class ShardPlan(Ownership):
    """Owner of each parameter, or of each range of its elements. Made by :func:`plan`.

    Every element has exactly one owner, or one in each replica. The constructor checks this. The
    owner of a parameter stores its state and steps it. Plans are values: they can be compared,
    hashed, pickled, and converted to JSON.

    Args:
        world_size: the number of ranks.
        specs: the parameters.
        pieces: ranges of elements and their owners, for the ranks of one replica.
        policy: the name of the policy.
        replicas: number of groups of ranks that each own all elements. Ranks ``r * shard_ranks`` to
            ``(r + 1) * shard_ranks - 1`` are replica ``r``. Each owns the same elements as the
            corresponding rank of the first replica.

    Raises:
        TypeError: the world size or the number of replicas is not an integer, or an entry of
            ``specs`` is not a spec.
        ValueError: fewer than one rank, replicas that do not divide the ranks, a path that occurs
            twice, elements with two owners or none (the error names the parameter).

    Example::

        >>> from sharding import ParameterSpec, plan
        >>> specs = [ParameterSpec("a", (6,)), ParameterSpec("b", (2,))]
        >>> shares = plan(specs, 2, "elements")
        >>> [(one.path, one.start, one.stop) for one in shares.owned(1)]
        [('a', 4, 6), ('b', 0, 2)]
        >>> [(one.ranks, one.start, one.stop) for one in shares.owners("a")]
        [((0,), 0, 4), ((1,), 4, 6)]
        >>> ShardPlan.from_json(shares.to_json()) == shares
        True
    """

    def check(self, specs: Any) -> None:
        """Check that this plan is for these parameters.

        Path, shape, dtype, kind, group and blocks must be equal, in the same order. For a model,
        path, shape and dtype are compared. Devices and ``requires_grad`` can differ, because owners
        do not depend on them.

        Args:
            specs: specs, or a model.

        Raises:
            ValueError: names the first difference.
        """
        is_model = isinstance(specs, (nn.Module, Mapping))
        plan_diff.check_same(self.specs, as_specs(specs), shapes_only=is_model)

    def diff(self, other: "ShardPlan") -> plan_diff.PlanDiff:
        """Return the differences from another plan: parameters, and elements with other owners."""
        return plan_diff.diff(self, other)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan's JSON, in hexadecimal, to compare the plans of ranks."""
        return sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the plan as JSON. Equal plans have equal text."""
        return plan_json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> "ShardPlan":
        """Return the plan of a text of :meth:`to_json`.

        Raises:
            ValueError: the text is not a plan, has another version, has missing or unknown fields,
                or an element has two owners or none.
        """
        return cls(**plan_json.loads(text))

    def report(self, optimizer: OptimizerOrFactory | None = None) -> report.Report:
        """Return a report of each rank: elements, bytes of each kind, and traffic.

        Args:
            optimizer: of the state that is counted, as in :class:`sharding.ByteCost`; None: no
                state.
        """
        return report.report(self, optimizer)

    def table(self, optimizer: OptimizerOrFactory | None = None, *, rows: int = 16) -> str:
        """Return the report as a table of text.

        Args:
            optimizer: of the state that is counted.
            rows: the largest number of ranks shown: the first ranks, and the fullest rank.
        """
        return table.table(self, optimizer, rows)

    def plot(self, path: str | Path, optimizer: OptimizerOrFactory | None = None) -> None:
        """Draw the bytes on each rank, and write the picture. Needs matplotlib.

        Args:
            path: of the picture; the suffix sets the format.
            optimizer: of the state that is counted.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        report.draw(self, optimizer, Path(path))

    def views(self, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters that a rank steps, as views: whole, blocks, or ranges of elements.

        A rule that steps each view in place as a separate parameter steps the tensors.

        Args:
            rank: of the plan.
            tensors: all parameters that the rank owns, by path; or their gradients.

        Returns:
            The parameter under ``path``, its block number k under ``path[k]``, and a range of its
            flattened elements under ``path[start:stop]``.

        Raises:
            ValueError: the rank does not exist; a tensor is missing, has another shape, or is cut
                and not contiguous.

        Example::

            >>> import torch
            >>> from sharding import MatrixBlocks, ParameterSpec, plan
            >>> heads = MatrixBlocks(row_blocks=2)
            >>> specs = [ParameterSpec("qkv", (6, 4), kind="per_matrix", blocks=heads)]
            >>> found = plan(specs, 2, "two_resource").views(1, {"qkv": torch.zeros(6, 4)})
            >>> {name: tuple(one.shape) for name, one in found.items()}
            {'qkv[1]': (3, 4)}
        """
        return views_of(self.specs, self.owned(rank), tensors)

    def extended(
        self,
        specs: Any,
        *,
        policy: str | Policy | None = None,
        optimizer: OptimizerOrFactory | None = None,
        cost: Cost | None = None,
        **options: Any,
    ) -> "ShardPlan":
        """Return a plan with more parameters. The owners of present parameters do not change.

        Args:
            specs: the new parameters, or a model.
            policy: for the new parameters; by default that of this plan.
            optimizer: as for :func:`plan`.
            cost: as for :func:`plan`.
            options: of the policy.

        Raises:
            TypeError: an option that the policy does not have.
            ValueError: the plan already has a path, the policy is unknown, or it makes replicas.

        Example::

            >>> from sharding import ParameterSpec, plan
            >>> before = plan([ParameterSpec("a", (6,))], 2, "greedy")
            >>> after = before.extended([ParameterSpec("b", (5,), group=1)])
            >>> [after.owners(path)[0].ranks for path in "ab"]
            [(0,), (1,)]
        """
        added = as_specs(specs, optimizer)
        every = (*self.specs, *added)
        check_specs(every)
        _, function = find_policy(self.policy.rpartition("/")[2] if policy is None else policy)
        found = assign(every, self.shard_ranks, function, optimizer, cost, options, self.pieces)
        if found.replicas != 1:
            raise ValueError(
                f"a plan of {self.replicas} replicas is extended within each; take a policy for "
                f"the ranks of a replica, not one that makes {found.replicas}"
            )
        first, new = len(self.specs), found.pieces
        pieces = Pieces(
            (*self.pieces.parameter, *(first + index for index in new.parameter)),
            (*self.pieces.start, *new.start),
            (*self.pieces.stop, *new.stop),
            (*self.pieces.rank, *new.rank),
        )
        return ShardPlan(self.world_size, every, pieces, self.policy, self.replicas)


def plan(
    specs: Any,
    world_size: int,
    policy: str | Policy = "largest_first",
    optimizer: OptimizerOrFactory | None = None,
    *,
    cost: Cost | None = None,
    **options: Any,
) -> ShardPlan:
    """Decide which rank owns which parameter, or which range of its elements.

    The function is pure: it needs no process group, makes and reads no tensor, and returns the same
    plan on every rank. Parameters can be on the meta device.

    Args:
        specs: a :class:`ParameterSpec` of each parameter, a ``torch.nn.Module``, or tensors by
            name.
        world_size: number of ranks. There can be more ranks than parameters.
        policy: a key of :data:`sharding.POLICIES`, or a function from a
            :class:`~sharding.problem.Problem` to an :class:`~sharding.problem.Assignment`.
        optimizer: the optimizer of all parameters, or a function from a spec to its optimizer. The
            plan then balances the bytes of parameters, gradients and state ("two_resource" also
            balances the time of a step), and cuts no parameter that a stage needs whole. Without an
            optimizer, the plan balances elements.
        cost: another cost model: :class:`ElementCost`, :class:`ByteCost`, :class:`FlopCost`,
            :class:`StepCost`, or any function from specs to :class:`Weights` or :class:`Costs`.
        options: of the policy, such as ``align`` and ``mixed`` of "elements", ``node_size`` and
            ``within`` of "hierarchical".

    Returns:
        A :class:`ShardPlan`.

    Raises:
        TypeError: an argument of a wrong type, or an option that the policy does not have.
        ValueError: ``world_size`` below 1 or above 262,144, a path that occurs twice, an unknown
            policy (the error has the names), a per_matrix parameter that the policy would cut.

    Example::

        >>> import torch
        >>> from functional_optim import adamw
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 2))
        >>> round(plan(model, 4, "greedy").report().imbalance("elements"), 3)
        3.828
        >>> round(plan(model, 4, "elements").report().imbalance("elements"), 3)
        1.005
    """
    check_world_size(world_size)
    name, function = find_policy(policy)
    known = as_specs(specs, optimizer)
    found = assign(known, world_size, function, optimizer, cost, options)
    name = f"{name}/{found.within}" if found.within else name
    return ShardPlan(world_size, known, found.pieces, name, found.replicas)
