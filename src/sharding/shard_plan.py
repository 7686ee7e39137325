"""ShardPlan: frozen, serialisable, self-checking data on who owns which elements."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sharding import picture, plan_diff, plan_json, report, table
from sharding.assignment import OwnedSpecs, assign, policy_named
from sharding.cost import Cost
from sharding.model_specs import as_specs
from sharding.ownership import Ownership
from sharding.pieces import Pieces
from sharding.problem import Policy
from sharding.spec import check_specs
from sharding.steppers import Stepper
from sharding.views import views_of


@dataclass(frozen=True)
class ShardPlan(Ownership):
    """Owner of each parameter, or of each range of its elements. Made by :func:`plan`.

    Every element has exactly one owner (in each replica, where a plan has several); that is
    checked when a plan is made, by whomever. The owner of a parameter holds its state and steps
    it. Plans are values: they compare, hash, pickle, and travel as JSON.

    Args:
        world_size: the number of ranks.
        specs: the parameters.
        pieces: who owns what, among the ranks of one replica.
        policy: the name of the policy that made it.
        replicas: how many groups of ranks each own everything. Ranks ``r * shard_ranks`` to
            ``(r + 1) * shard_ranks - 1`` are replica ``r``, and each owns what the same rank of
            the first replica owns.

    Raises:
        TypeError: a world size or a number of replicas that is no whole number, an entry of
            ``specs`` that is no spec.
        ValueError: fewer than one rank, replicas that do not divide the ranks, a path that stands
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
        """See whether this plan is for these parameters.

        Path, shape, dtype, kind and group of each must be the same, in the same order (of a model,
        which knows of no kind and group: path, shape and dtype). Devices and ``requires_grad`` may
        differ: they change while owners stay.

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
        """SHA-256 of the plan's JSON, in hexadecimal: equal on two ranks only for equal plans."""
        return sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The plan as JSON, without spaces, keys in a fixed order: equal plans give equal text."""
        return plan_json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> "ShardPlan":
        """The plan that :meth:`to_json` wrote.

        Raises:
            ValueError: text that is none, of another version, with fields missing or unknown, or
                in which an element has two owners or none.
        """
        return cls(**plan_json.loads(text))

    def report(self, optimizer: Stepper | None = None) -> report.Report:
        """Return a report of each rank: elements, bytes of each kind, and traffic.

        Args:
            optimizer: whose state is counted, as in :class:`sharding.ByteCost`; None: no state.
        """
        return report.report(self, optimizer)

    def table(self, optimizer: Stepper | None = None, *, rows: int = 16) -> str:
        """The report as a table of text.

        Args:
            optimizer: whose state is counted.
            rows: so many ranks at most; of more, the first are shown, and the fullest.
        """
        return table.table(self, optimizer, rows)

    def plot(self, path: str | Path, optimizer: Stepper | None = None) -> None:
        """Draw the bytes on each rank, and write the picture. Needs matplotlib.

        Args:
            path: where to; the ending chooses the format.
            optimizer: whose state is counted.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        picture.draw(self, optimizer, Path(path))

    def views(self, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what a rank steps, as views: whole parameters, blocks, and ranges of elements.

        A rule that steps the views in place, each as a parameter of its own, steps the tensors.

        Args:
            rank: of the plan.
            tensors: every parameter that the rank owns, by path; or their gradients.

        Returns:
            The parameter under ``path``, its block number k under ``path[k]``, and a range of its
            flattened elements under ``path[start:stop]``.

        Raises:
            ValueError: a rank that does not exist; a tensor that is missing, has another shape, or
                is to be cut and not contiguous.

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
        optimizer: Stepper | None = None,
        cost: Cost | None = None,
        **options: Any,
    ) -> "ShardPlan":
        """A plan with more parameters, in which everything owned so far stays where it is.

        Args:
            specs: the new parameters, or a model.
            policy: for the new ones; by default this plan's own.
            optimizer: as for :func:`plan`: its bytes are what is levelled.
            cost: as for :func:`plan`: another cost model.
            options: of the policy.

        Raises:
            TypeError: an option that the policy does not have.
            ValueError: a path that the plan has already, an unknown policy, or one that makes
                replicas of its own.

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
        _, function = policy_named(self.policy.rpartition("/")[2] if policy is None else policy)
        owned = OwnedSpecs(len(self.specs), self.pieces)
        found = assign(every, self.shard_ranks, function, optimizer, cost, options, owned)
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
