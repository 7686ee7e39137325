"""MatrixOwnerOptimizer: rules for whole matrices under FSDP2's fully_shard."""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from functional_optim import Optimizer, TorchOptimizer
from functional_optim.engine.calls import disable_compile
from functional_optim.engine.groups import BetweenRuns, CurrentGroups, GroupChains, check_extra
from functional_optim.engine.options import params_of_groups, require_optimizer
from functional_optim.engine.recipes import Recipe
from functional_optim.engine.stages import has_gates, require_gradients_alone
from functional_optim.engine.tensors import is_dtensor, local_gradient, to_local, unshard_like
from sharding.cost import Cost
from sharding.matrices.agreement import Attempt, check_same_gradients, failed_ranks
from sharding.matrices.exchange import OwnedMatrix, PendingRows
from sharding.matrices.owners import Owners
from sharding.matrices.shard_group import find_shard_group
from sharding.matrices.stand_ins import StandIns, StandInStates
from sharding.matrices.state_dict import local_state, part_of_state
from sharding.matrices.totals import compute_totals
from sharding.problem import Policy
from sharding.shard_plan import ShardPlan
from sharding.transport.packed import copy_pairs
from sharding.transport.protocol import TransportError
from sharding.zero.params import named_params


class MatrixOwnerOptimizer(TorchOptimizer):
    """A :class:`~functional_optim.TorchOptimizer` for FSDP2 that steps whole matrices.

    After ``fully_shard``, each rank holds some rows of every parameter, but Muon, SOAP, Shampoo and
    LAMB need whole tensors. With ``G_r`` the rows of rank r of a gradient, and o the rank that owns
    the parameter P:

        on rank o:   G = [G_0; G_1; ...],  P = [P_0; P_1; ...]
                     P, S = rule(P, G, S)
        on rank r:   P_r = rows_r(P)

    One all_to_all gathers all matrices, and one returns all rows, while each rank steps its part of
    the other parameters. Results equal those of one process with the whole tensors, bit for bit on
    the CPU. Pointwise chains, and rules over stacked matrices ``[E, m, n]``
    (``muon(batch_axes=1)``), step the rows of each rank without communication. Each total over all
    gradients (``clip_by_global_norm``, ``apply_if_finite``) takes one sum over ranks more. The
    addends of pointwise parameters to a total are summed over ranks: the total is the same on all
    ranks, and may differ from that of one process in the last bit of a float64. Only the owner
    keeps the state of a matrix.

    The constructor, :meth:`step` and :meth:`add_param_group` are collective over the ranks that
    share a copy of the parameters: with a mesh of replicas and shards, those along the sharded
    dimension.

    Args:
        params: parameters of the module, (name, parameter) pairs, or parameter groups: sharded on
            dimension 0 along one dimension of one mesh, replicated, or plain and equal on all
            ranks. Give tied parameters once, as ``module.parameters()`` does.
        optimizer: the chain or partition, with the defaults for all groups.
        policy: decides which rank owns which matrix: a key of :data:`sharding.POLICIES` that does
            not cut parameters, or a function of a Problem.
        cost: the cost that the policy balances over ranks; by default :class:`~sharding.StepCost`:
            the floating-point operations that rules declare, and the bytes of parameter, gradient
            and state.

    Raises:
        TypeError: ``optimizer`` is no Optimizer, or takes inputs besides gradients; else as for
            :class:`~functional_optim.TorchOptimizer`.
        ValueError: a parameter of tensor parallelism (sharded on another dimension than 0, or
            along two dimensions of its mesh); parameters on different meshes; no sharded parameter;
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

    @disable_compile
    def __init__(
        self,
        params: Iterable[Any],
        optimizer: Optimizer,
        *,
        policy: str | Policy = "two_resource",
        cost: Cost | None = None,
    ) -> None:
        require_gradients_alone(require_optimizer(optimizer), "MatrixOwnerOptimizer")
        self._built = False
        self._failed: Exception | None = None
        """The error of a step that failed on this rank after its rows were sent."""
        self._stand_ins = StandIns()
        super().__init__(params, optimizer)
        self.register_state_dict_post_hook(_write_part)
        shards = find_shard_group(named_params(self.param_groups))
        self._owners = Owners(shards, self._stand_ins, policy, cost, self._optimizer_of)
        self._built = True
        self._find_owners()

    @property
    def plan(self) -> ShardPlan:
        """The owners of all matrices: of sharded parameters that are stepped as a whole.

        The plan is the same on all ranks, which the constructor checks.
        """
        return self._owners.plan

    @staticmethod
    def _chains_of(recipe: Recipe) -> GroupChains:
        return GroupChains(recipe, check=lambda stages, param, name: None, divides=True)

    @disable_compile
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. The owners of all other parameters stay the same. Collective.

        Raises:
            TypeError, ValueError: as for the constructor. Nothing has changed.
        """
        if not self._built:  # the constructor checks all parameters together
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
        if self._built:
            self._find_owners()

    def _find_owners(self) -> None:
        params = named_params(self.param_groups)
        self._owners.extend(params, self.param_groups, self._chain_of)
        for param in params.values():  # torch's helpers make a step if a parameter has no state
            self.state.setdefault(param, {})
        self._complete_all()

    def _chain_of(self, number: int) -> tuple[Any, Any]:
        stages = self._optimizer_of(number).stages
        return stages, self._options_of(number).hypers(self.param_groups[number])

    def _complete_all(self) -> None:
        for number in range(len(self.param_groups)):
            self._complete_state(number)

    def _activate(self, paths: Sequence[str]) -> None:
        """Allocate matrices that were frozen until now, and create their state. Collective."""
        self._owners.activate(paths)
        self._complete_all()

    # ---------------------------------------------------------- the tensors that this rank steps

    def _complete_state(self, number: int) -> None:
        if self._built:
            super()._complete_state(number)

    def _tensors(self, number: int) -> list[Tensor]:
        return self._stand_ins.tensors(self.param_groups[number]["params"])

    @property
    def _stepped_groups(self) -> list[dict[str, Any]]:
        return list(map(self._stand_ins.stepped, self.param_groups))

    @property
    def _states(self) -> MutableMapping[Tensor, dict[str, Any]]:
        return StandInStates(self.state, self._stand_ins)

    # ------------------------------------------------------------------------------- stepping

    def _step_now(self, loss: Any, extra: Mapping[str, Any]) -> None:
        """Gather matrices, step them and the local rows of other parameters, and return rows."""
        check_extra(self._optimizer.links, extra)  # it takes no inputs
        owners, attempt = self._owners, Attempt()
        attempt.error = self._failed
        self._stand_ins.refresh()
        groups = attempt.run(self._groups) or []  # checks the options before rows are sent
        grads = attempt.run(self._local_gradients) or {}
        mask = {path: path in grads for path in owners.params}
        if self._gather(attempt, grads, mask):
            groups = self._groups()
        given = self._gradients_of_stand_ins(grads, mask)

        def gradients(params: list[Tensor]) -> list[Tensor | None]:
            return [given.get(id(one)) for one in params]

        def now() -> CurrentGroups:
            return self._chains.current_groups(groups, self._states, self._leaf_states, gradients)

        def addends(before: Sequence[Tensor]) -> Mapping[int, Tensor]:
            return self._steps.addends(now(), before)[0]

        totals = compute_totals(owners, self._optimizer, addends, attempt)
        sent = list[PendingRows]()
        # Rows are sent while this rank steps its part of all other parameters.
        send = BetweenRuns(self._is_matrix, lambda: sent.extend(self._send_rows(attempt)))
        attempt.run(lambda: self._steps.step(now(), totals, between=send))
        if attempt.error is None:
            self._chains.write_shared(self.param_groups)
        elif isinstance(attempt.error, TransportError):
            raise attempt.error  # a rank is gone
        self._receive(sent or self._send_rows(attempt), attempt, mask)

    def _is_matrix(self, tensor: Tensor) -> bool:
        """Return True for a whole matrix that this rank owns."""
        return self._stand_ins.by_tensor[id(tensor)].is_matrix

    def _local_gradients(self) -> dict[str, Tensor]:
        """Return the local part of each gradient, by the path of its parameter."""
        found = {}
        for path, param in self._owners.params.items():
            grad = param.grad
            if grad is not None:
                found[path] = local_gradient(param, grad, path) if is_dtensor(param) else grad
        return found

    def _gradients_of_stand_ins(
        self, grads: Mapping[str, Tensor], mask: Mapping[str, bool]
    ) -> dict[int, Tensor | None]:
        """Return the gradients of the stand-ins of this rank, by ``id`` of the stand-in."""
        owners = self._owners
        found = {id(one.whole): one.grad for one in owners.exchange.matrices if mask[one.path]}
        for path, grad in grads.items():
            one = self._stand_ins.by_param.get(id(owners.params[path]))
            if one is not None and not one.is_matrix:
                found[id(one.tensor)] = grad
        return found

    def _gather(
        self, attempt: Attempt, grads: Mapping[str, Tensor], mask: Mapping[str, bool]
    ) -> bool:
        """Gather matrices and their gradients. All ranks must have the same gradients.

        Returns:
            True if matrices have a gradient for the first time, and are stepped from now on.
        """
        owners = self._owners
        if not self.plan.specs:
            return False
        present = list(mask.values())
        headers = owners.exchange.gather(attempt.header(present), grads)
        attempt.raise_failures(owners.shards, failed_ranks(headers), "begin a step")
        check_same_gradients(owners.shards, headers, list(mask), present)
        late = [path for path in owners.idle if mask[path]]
        if late:
            self._activate(late)
            owners.exchange.gather(attempt.header(present), grads)
        return bool(late)

    def _send_rows(self, attempt: Attempt) -> list[PendingRows]:
        """Start to send the rows of all matrices to their ranks; empty if there are none."""
        exchange = self._owners.exchange
        return [exchange.scatter(attempt.header(), _whole)] if exchange.matrices else []

    def _receive(
        self, sent: Sequence[PendingRows], attempt: Attempt, mask: Mapping[str, bool]
    ) -> None:
        """Copy received rows of matrices that may have changed."""
        owners = self._owners
        matrices, rows = owners.exchange.matrices, dict[str, Tensor]()
        failed = [False]
        for one in sent:
            headers, rows = one()
            failed = failed_ranks(headers)
        late = has_gates(self._optimizer.links)  # a gate may step by earlier gradients
        changed = [one for one in matrices if late or mask[one.path]] if not any(failed) else []
        copy_pairs([(to_local(one.param.detach()), rows[one.path]) for one in changed])
        if sent and attempt.error is not None and not any(failed):
            self._failed = attempt.error  # after the rows were sent: raised in the next step
        attempt.raise_failures(owners.shards, failed, "make its part of the step")

    def _viewed(self) -> list[Tensor]:
        """Return the evaluation value of each parameter, sharded like the parameter. Collective."""
        owners = self._owners
        stepped = params_of_groups(self._stepped_groups)
        views = dict(zip(map(id, stepped), super()._viewed(), strict=True))
        _, rows = owners.exchange.scatter(Attempt().header(), lambda one: views[id(one.whole)])()
        for path, param in owners.params.items():
            one = self._stand_ins.by_param.get(id(param))
            if one is not None and not one.is_matrix:
                rows[path] = views[id(one.tensor)]
        paths = {id(param): path for path, param in owners.params.items()}
        every = params_of_groups(self.param_groups)
        # No rank steps frozen parameters, and this rank may have no rows of others.
        found = [rows.get(paths[id(one)], to_local(one.detach())) for one in every]
        return list(map(unshard_like, found, every))

    # ---------------------------------------------------------------------------- state dicts

    @disable_compile
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state.

        Collective if a matrix that was frozen has become trainable since the last step: its owner
        then creates its state.
        """
        idle = self._owners.idle.items()
        unfrozen = [path for path, param in idle if param.requires_grad]
        if unfrozen:
            self._activate(unfrozen)
        return super().state_dict()

    @disable_compile
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a state dict, or the whole state of one process.

        ``state_dict()`` has the state of the matrices that this rank owns, and of its rows of other
        parameters. Saved with ``torch.distributed.checkpoint``, it is loaded by any number of
        ranks, by a :class:`~functional_optim.TorchOptimizer` in one process, and by FSDP2 with a
        class of torch.optim.

        A whole state is that of a :class:`~functional_optim.TorchOptimizer`, or of the equivalent
        class of torch.optim, over the same parameters: each rank loads its part. State of a
        frozen matrix is loaded if the matrix was stepped before. This is collective if a matrix was
        frozen until now.

        Raises:
            ValueError: a part of another rank, or of another plan; else as for
                :class:`~functional_optim.TorchOptimizer`. Nothing has changed.
        """
        groups, owners = self.param_groups, self._owners
        super().load_state_dict(local_state(state_dict, groups, owners, self._activate))

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a MatrixOwnerOptimizer has a process group, and cannot be copied or pickled; save "
            "get_optimizer_state_dict() by torch.distributed.checkpoint, and load it into a new one"
        )


def _write_part(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace the state of a state dict by this rank's part, before any other hook."""
    assert isinstance(optimizer, MatrixOwnerOptimizer)
    owners = optimizer._owners  # noqa: SLF001
    state_dict.update(part_of_state(state_dict, optimizer.param_groups, owners))


def _whole(matrix: OwnedMatrix) -> Tensor:
    assert matrix.whole is not None, "this rank owns the matrix"
    return matrix.whole
