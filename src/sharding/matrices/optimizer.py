"""MatrixOwnerOptimizer: rules for whole matrices over a module that went through fully_shard."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from functional_optim.core.chain import require_gradients_alone
from functional_optim.core.compiling import uncompiled
from functional_optim.core.dtensors import from_local_part, is_sharded, local
from functional_optim.core.links import has_gates
from functional_optim.core.local_shards import local_gradient
from functional_optim.frontends.group_chains import GroupChains
from functional_optim.frontends.group_steps import GroupsNow
from functional_optim.frontends.torch_groups import (
    params_of_groups,
    require_optimizer,
)
from functional_optim.frontends.torch_optimizer import TorchOptimizer
from functional_optim.optimizer import Optimizer
from functional_optim.plan.between_runs import BetweenRuns
from functional_optim.plan.leaf_by_leaf import check_extra
from sharding.cost import Cost
from sharding.matrices.agreement import Attempt, check_same_gradients, has_failed
from sharding.matrices.exchange import OwnedMatrix, PendingRows, copy_pairs
from sharding.matrices.owners import Owners
from sharding.matrices.shard_group import find_shard_group
from sharding.matrices.stand_ins import StandIns, StandInStates
from sharding.matrices.state_dict import local_state, part_of_state
from sharding.matrices.totals import all_totals
from sharding.problem import Policy
from sharding.shard_plan import ShardPlan
from sharding.transport.protocol import TransportError
from sharding.zero.params import group_numbers, named_params


class MatrixOwnerOptimizer(TorchOptimizer):
    """A :class:`~functional_optim.TorchOptimizer` for FSDP2 that steps whole matrices.

    After ``fully_shard``, each rank holds some rows of every parameter, and Muon, SOAP, Shampoo or
    LAMB need whole tensors. With ``G_r`` the rows of rank r of a gradient, and o the rank that owns
    the parameter P:

        on rank o:   G = [G_0; G_1; ...],  P = [P_0; P_1; ...]
                     P, S = rule(P, G, S)
        on rank r:   P_r = rows_r(P)

    One all_to_all gathers all matrices, and one brings all rows back, while each rank steps its
    part of the other parameters. Results are those of one process with the whole tensors, bit for
    bit on the CPU. Pointwise chains, and rules over stacked matrices ``[E, m, n]``
    (``muon(batch_axes=1)``), step the rows of each rank without communication. Each total over all
    gradients (``clip_by_global_norm``, ``apply_if_finite``) takes one all_reduce more. What the
    rows of pointwise parameters add to a total is summed over ranks: the total is the same on all
    ranks, and may differ from that of one process in the last bit of a float64. State is kept by
    the owner alone.

    The constructor, :meth:`step` and :meth:`add_param_group` are collective over the ranks that
    share a copy of the parameters: with a mesh of replicas and shards, those along the sharded
    dimension.

    Args:
        params: parameters of the module, (name, parameter) pairs, or parameter groups: sharded on
            dimension 0 along one dimension of one mesh, replicated, or plain and equal on all
            ranks. Tied parameters are given once, as ``module.parameters()`` gives them.
        optimizer: the chain or partition, with the defaults for all groups.
        policy: decides who owns which matrix: a key of :data:`sharding.POLICIES` that leaves
            parameters whole, or a function of a Problem.
        cost: what the policy levels over ranks; by default :class:`~sharding.StepCost`: the
            floating-point operations that rules declare, and the bytes of parameter, gradient and
            state.

    Raises:
        TypeError: ``optimizer`` is no Optimizer, or takes inputs beside gradients; else as for
            :class:`~functional_optim.TorchOptimizer`.
        ValueError: a parameter of tensor parallelism (sharded on another dimension than 0, or
            along two dimensions of its mesh); parameters on different meshes; none that is sharded;
            ranks with different parameters; a policy that cuts parameters; else as for
            :class:`~functional_optim.TorchOptimizer`.

    Example::

        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.distributed.fsdp import fully_shard
        >>> from functional_optim import muon
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(4, 4, bias=False)
        >>> _ = fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        >>> optimizer = MatrixOwnerOptimizer(model.named_parameters(), muon(lr=0.02))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> [spec.path for spec in optimizer.plan.specs]
        ['weight']
        >>> dist.destroy_process_group()

    Reference:
        Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
        SC 2020 (state at one owner); Jordan et al., "Muon: An optimizer for hidden layers in neural
        networks", 2024.
    """

    @uncompiled
    def __init__(
        self,
        params: Iterable[Any],
        optimizer: Optimizer,
        *,
        policy: str | Policy = "two_resource",
        cost: Cost | None = None,
    ) -> None:
        require_gradients_alone(require_optimizer(optimizer), "MatrixOwnerOptimizer")
        self._owners: Owners | None = None
        self._failed: Exception | None = None
        """The error of a step that failed here when its matrices were on their way already."""
        self._stand_ins = StandIns()
        super().__init__(params, optimizer)
        self.register_state_dict_post_hook(_as_part)
        shards = find_shard_group(named_params(self.param_groups))
        self._owners = Owners(shards, self._stand_ins, policy, cost, self._optimizer_of)
        self._find_owners()

    @property
    def plan(self) -> ShardPlan:
        """The owner of each matrix: of each sharded parameter that is stepped as a whole.

        It is the same on all ranks, which the constructor checks.
        """
        found = self._of_ranks.plan
        assert found is not None, "made by the constructor"
        return found

    @property
    def _of_ranks(self) -> Owners:
        assert self._owners is not None, "made by the constructor"
        return self._owners

    @staticmethod
    def _chains_of(optimizer: Optimizer) -> GroupChains:
        return GroupChains(optimizer, check=lambda stages, param, name: None, divides=True)

    @uncompiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; everything owned so far stays where it is. Collective.

        Raises:
            TypeError, ValueError: as for the constructor. Nothing is changed then.
        """
        if self._owners is None:  # the constructor sees all parameters together
            super().add_param_group(param_group)
            return
        group: Any = param_group
        given = group.get("params") if isinstance(group, dict) else None
        if isinstance(given, Iterable) and not isinstance(given, (Tensor, set)):
            every = list(given)
            param_group = {**param_group, "params": every}
            named = [
                one if isinstance(one, tuple) else (str(k), one) for k, one in enumerate(every)
            ]
            find_shard_group(dict(named), self._owners.shards)
        super().add_param_group(param_group)

    def _add_group(self, group: Any) -> None:
        super()._add_group(group)
        if self._owners is not None:
            self._find_owners()

    def _find_owners(self) -> None:
        params = named_params(self.param_groups)
        numbers = group_numbers(self.param_groups)
        self._of_ranks.extend(params, numbers, self._chain_of)
        for param in params.values():  # torch's helpers make a step where there is no state
            self.state.setdefault(param, {})
        self._complete_all()

    def _chain_of(self, number: int) -> tuple[Any, Any]:
        stages = self._optimizer_of(number).stages
        return stages, self._hypers(number, self.param_groups[number])

    def _complete_all(self) -> None:
        for number in range(len(self.param_groups)):
            self._complete_state(number)

    # ------------------------------------------------------- what stands for each parameter here

    def _complete_state(self, number: int) -> None:
        if self._owners is not None:
            super()._complete_state(number)

    def _tensors(self, number: int) -> list[Tensor]:
        return self._stand_ins.tensors(self.param_groups[number]["params"])

    def _stepped_groups(self) -> list[dict[str, Any]]:
        return list(map(self._stand_ins.stepped, self.param_groups))

    @property
    def _states(self) -> MutableMapping[Tensor, dict[str, Any]]:
        return StandInStates(self.state, self._stand_ins)

    # ------------------------------------------------------------------------------- stepping

    def _step_now(self, loss: Any, extra: Mapping[str, Any]) -> None:
        """Gather matrices, step what this rank owns and its rows of the rest, bring rows back."""
        check_extra(self._optimizer.links, extra)  # none is taken
        owners, attempt = self._of_ranks, Attempt()
        attempt.error = self._failed
        self._stand_ins.refresh()
        groups = attempt.make(self._groups) or []  # options are checked before anything moves
        grads = attempt.make(self._local_gradients) or {}
        mask = {path: path in grads for path in owners.params}
        if self._gather(attempt, grads, mask):
            groups = self._groups()
        given = self._gradients_of_stand_ins(grads, mask)

        def gradients(params: list[Tensor]) -> list[Tensor | None]:
            return [given.get(id(one)) for one in params]

        def now() -> GroupsNow:
            return self._chains.now(groups, self._states, self._leaf_state, gradients)

        def addends(before: Sequence[Tensor]) -> Mapping[int, Tensor]:
            return self._steps.addends(now(), before)[0]

        totals = all_totals(owners, self._optimizer, addends, attempt)
        sent = list[PendingRows]()
        # Rows travel while this rank steps its part of all other parameters.
        send = BetweenRuns(self._is_matrix, lambda: sent.extend(self._sent(attempt)))
        attempt.make(lambda: self._steps.step(now(), totals, between=send))
        if attempt.error is None:
            self._chains.show(self.param_groups)
        elif isinstance(attempt.error, TransportError):
            raise attempt.error  # a rank is gone
        self._receive(sent or self._sent(attempt), attempt, mask)

    def _is_matrix(self, tensor: Tensor) -> bool:
        """Return True for a matrix that this rank owns."""
        return self._stand_ins.by_tensor[id(tensor)].is_matrix

    def _local_gradients(self) -> dict[str, Tensor]:
        """Return the part of each gradient that this rank has, by the path of its parameter."""
        found = {}
        for path, param in self._of_ranks.params.items():
            grad = param.grad
            if grad is not None:
                found[path] = local_gradient(param, grad, path) if is_sharded(param) else grad
        return found

    def _gradients_of_stand_ins(
        self, grads: Mapping[str, Tensor], mask: Mapping[str, bool]
    ) -> dict[int, Tensor | None]:
        """Return the gradient of what this rank steps, by the identity of that."""
        owners = self._of_ranks
        found = {id(one.whole): one.grad for one in owners.exchange.matrices if mask[one.path]}
        for path, grad in grads.items():
            one = self._stand_ins.by_param.get(id(owners.params[path]))
            if one is not None and not one.is_matrix:
                found[id(one.tensor)] = grad
        return found

    def _gather(
        self, attempt: Attempt, grads: Mapping[str, Tensor], mask: Mapping[str, bool]
    ) -> bool:
        """Gather matrices and their gradients, which all ranks have of the same parameters.

        Returns:
            True if matrices are stepped from now on that had no gradient before.
        """
        owners = self._of_ranks
        if not self.plan.specs:
            return False
        present = list(mask.values())
        headers = owners.exchange.gather(attempt.header(present), grads)
        attempt.raise_failures(owners.shards, has_failed(headers), "begin a step")
        check_same_gradients(owners.shards, headers, list(mask), present)
        late = owners.late(mask)
        if late:
            owners.own(late)
            self._complete_all()
            owners.exchange.gather(attempt.header(present), grads)
        return bool(late)

    def _sent(self, attempt: Attempt) -> list[PendingRows]:
        """Begin to bring rows back to the ranks that hold them; no list entry without matrices."""
        exchange = self._of_ranks.exchange
        return [exchange.scatter(attempt.header(), _whole)] if exchange.matrices else []

    def _receive(
        self, sent: Sequence[PendingRows], attempt: Attempt, mask: Mapping[str, bool]
    ) -> None:
        """Copy the rows of matrices that may have changed."""
        owners = self._of_ranks
        matrices, rows = owners.exchange.matrices, dict[str, Tensor]()
        failed = [False]
        for one in sent:
            headers, rows = one.wait()
            failed = has_failed(headers)
        late = has_gates(self._optimizer.links)  # a gate lets through what it has kept
        changed = [one for one in matrices if late or mask[one.path]] if not any(failed) else []
        copy_pairs([(local(one.param.detach()), rows[one.path]) for one in changed])
        if sent and attempt.error is not None and not any(failed):
            self._failed = attempt.error  # after its rows were sent: others learn of it next time
        attempt.raise_failures(owners.shards, failed, "make its part of the step")

    def _viewed(self) -> list[Tensor]:
        """Return what each parameter is evaluated with, sharded as it is. Collective."""
        owners = self._of_ranks
        stepped = params_of_groups(self._stepped_groups())
        views = dict(zip(map(id, stepped), super()._viewed(), strict=True))
        pending = owners.exchange.scatter(Attempt().header(), lambda one: views[id(one.whole)])
        _, rows = pending.wait()
        for path, param in owners.params.items():
            one = self._stand_ins.by_param.get(id(param))
            if one is not None and not one.is_matrix:
                rows[path] = views[id(one.tensor)]
        paths = {id(param): path for path, param in owners.params.items()}
        every = params_of_groups(self.param_groups)
        # What no rank steps here is what it is: frozen, or rows that this rank has none of.
        found = [rows.get(paths[id(one)], local(one.detach())) for one in every]
        return list(map(from_local_part, found, every))

    # ---------------------------------------------------------------------------- state dicts

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a state dict, or the whole state of one process.

        ``state_dict()`` has the state of the matrices that this rank owns, and of its rows of other
        parameters, for ``torch.distributed.checkpoint``: saved with ``dcp.save``, it is loaded by
        any number of ranks, by a :class:`~functional_optim.TorchOptimizer` in one process, and by
        FSDP2 with a class of torch.optim.

        Whole state is that of a :class:`~functional_optim.TorchOptimizer`, or of the equivalent
        class of torch.optim, over the same parameters: each rank takes its part.

        Raises:
            ValueError: a part of another rank, or of another plan; else as for
                :class:`~functional_optim.TorchOptimizer`. Nothing is changed.
        """
        super().load_state_dict(local_state(state_dict, self.param_groups, self._of_ranks))

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a MatrixOwnerOptimizer has a process group, and cannot be copied or pickled; save "
            "get_optimizer_state_dict() by torch.distributed.checkpoint, and load it into a new one"
        )


def _as_part(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Change a state dict to this rank's part, before any hook of the caller."""
    assert isinstance(optimizer, MatrixOwnerOptimizer)
    owners = optimizer._of_ranks  # noqa: SLF001
    state_dict.update(part_of_state(state_dict, optimizer.param_groups, owners))


def _whole(matrix: OwnedMatrix) -> Tensor:
    assert matrix.whole is not None, "asked at its owner"
    return matrix.whole
