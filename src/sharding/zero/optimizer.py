"""ZeroRedundancyOptimizer: each rank keeps the state of the ranges that it owns, and steps them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh

from functional_optim._torch.distributed import is_joining
from functional_optim._torch.modules import step_without_global_hooks
from functional_optim.engine.calls import disable_compile
from functional_optim.engine.gradients import Scaling
from functional_optim.engine.groups import GroupChains
from functional_optim.engine.options import (
    check_group_overlap,
    common_options,
    copy_option_tensors,
    guard_schedules,
    params_of_groups,
)
from sharding.problem import Policy
from sharding.shard_plan import ShardPlan
from sharding.transport.groups import GroupRank, global_rank, resolve_group
from sharding.zero.checkpoint_mixin import CheckpointMixin, write_states
from sharding.zero.coalescing import ElementMessage
from sharding.zero.groups import Transports, shard_group
from sharding.zero.load import load
from sharding.zero.local_shards import LocalShards
from sharding.zero.norm import clip_gradients
from sharding.zero.owned_groups import OwnedGroup, add_foreign_group, foreign_optimizer
from sharding.zero.parameter_memory import ParameterMemory
from sharding.zero.params import named_params, parse_group, parse_params
from sharding.zero.plan import agree_on_plan, build_plan, extend_plan
from sharding.zero.recipe import build_zero_recipe, divide_group
from sharding.zero.shard_optimizer import ShardOptimizer, load_with_hooks
from sharding.zero.step_agreement import StepWithOthers, agree_on_step


class ZeroRedundancyOptimizer(CheckpointMixin, torch.optim.Optimizer, Joinable):
    """torch's ``ZeroRedundancyOptimizer``: state sharded over ranks, parameters whole on each.

    Every rank steps the ranges that it owns, with gradients that are equal on all ranks (as after a
    backward pass of DistributedDataParallel), and sends the new values to the other ranks:

        for each owned range r of this rank:   p_r, s_r = rule(p_r, g_r, s_r)
        p = gather of all p_r

    It replaces torch's class: change the import. It also takes several groups, mixed dtypes, frozen
    parameters and sub-groups, which torch's class refuses or steps wrongly. Options are read from
    ``param_groups`` at every step, so any scheduler works.

    Args:
        params: parameters, (name, parameter) pairs, or parameter groups. Names are the paths in
            checkpoints; without names, "1.0" is the first parameter of the second group.
        optimizer_class: a class of torch.optim, or one of our optimizers, or a function of
            hyper-parameters that returns an optimizer
            (``lambda lr: chain(clip_by_value(1.0), adamw(lr))``). A class
            with a functional equivalent is stepped by the equivalent, bit for bit as torch's
            for-loop; on CUDA with ``fused=True`` by torch's fused kernels, which round differently.
            For any other class, the rank creates an instance with the parameters that it owns. For
            a partition, or an optimizer with overrides, groups are divided by chain, as in
            TorchOptimizer. An optimizer with shared scalars (accumulation, Schedule-Free, Prodigy)
            steps all parameters at once, from a hook with the last bucket; :attr:`shared` has the
            scalars.
        process_group: a group that this rank is in, or a DeviceMesh of one dimension; by default
            the world.
        parameters_as_bucket_view: move the parameters into flat buffers, one per dtype and device,
            in the order of their owners. They stay the same objects; a gather is then one
            collective for each buffer.
        overlap_with_ddp: step from a communication hook during backward (see
            ``hooks.zero_step_hook``); :meth:`step` then only logs a warning, and hooks of
            ``register_step_pre_hook`` and ``register_step_post_hook`` are not called.
        policy: a key of :data:`sharding.POLICIES`, or a function of a Problem. "greedy" is torch's
            partition. "elements" gives equal shares by cutting parameters, if the rule allows it.
            "sliced" also does, and is the policy for a hook that steps during backward.
        plan: an existing plan, instead of a policy. The policy is then used for groups that are
            added later; in a plan with replicas, within each replica.
        executor: name of the executor that runs the steps, instead of the one described above.
        defaults: the options of the class, or hyper-parameters of the optimizer.

    Attributes:
        plan: the owners of all parameters. It is checked to be the same on all ranks.
        params: every parameter, by path.
        optim: a torch-like optimizer over this rank's shard, with a group for each group.

    Raises:
        TypeError: ``params`` is a tensor, not an iterable, or a mixed list; an option that the
            class does not have.
        ValueError: no parameters, a group without "params", a sparse parameter, parameters that
            share memory; a plan for other parameters; ranks with different parameters (the first
            difference is named); a policy that cuts parameters that the rule needs whole; a
            functional class of torch without overlap, or another class with it.
        RuntimeError: another rank could not make a plan. The error names the rank and its error.

    Example::

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(2, 1)
        >>> zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> zero.step()
        >>> zero.consolidate_state_dict()
        >>> sorted(zero.state_dict()["state"][0])
        ['exp_avg', 'exp_avg_sq', 'step']
        >>> dist.destroy_process_group()

    Reference:
        Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
        SC 2020, stage 1.
    """

    # torch's GradScaler calls step() in any case: see step_agreement.py.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Any,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        policy: str | Policy = "greedy",
        plan: ShardPlan | None = None,
        executor: str | None = None,
        **defaults: Any,
    ) -> None:
        given = parse_params(params)
        recipe = build_zero_recipe(optimizer_class, defaults, executor, overlap=overlap_with_ddp)
        self._chains = None if recipe is None else GroupChains(recipe)
        self._policy, self._built = policy, False
        torch.optim.Optimizer.__init__(
            self, given, dict(defaults if recipe is None else recipe.defaults)
        )
        Joinable.__init__(self)
        self.process_group: dist.ProcessGroup = resolve_group(process_group)
        self.world_size: int = self.process_group.size()
        self.rank: int = self.process_group.rank()
        self.global_rank: int = global_rank(self.process_group, GroupRank(self.rank))
        self.overlap_with_ddp = overlap_with_ddp
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.params: dict[str, Tensor] = named_params(self.param_groups)
        self.plan: ShardPlan = self._agree_on_plan(lambda: self._build_plan(plan))
        self._fix_groups()
        self._memory = ParameterMemory(self.params, self.plan, in_buffers=parameters_as_bucket_view)
        self._sum_transports = Transports(self.process_group)
        self._transports = self._sum_transports
        if self.plan.replicas > 1:
            self._transports = Transports(shard_group(self.process_group, self.plan))
        self._messages: dict[tuple[tuple[str, ...], int], tuple[ElementMessage, ...]] = {}
        self._local: ShardOptimizer | None = None
        if self._chains is not None:
            shards = LocalShards(self._chains, self._memory, self.plan, self.rank)
            for number, group in enumerate(self.param_groups):
                shards.check_options(number, group)
            self._local = ShardOptimizer(shards, self._owned_groups(shards), self._total)
        self.optim: torch.optim.Optimizer = self._local or foreign_optimizer(
            optimizer_class, self.param_groups, self._owned_params(), self.defaults
        )
        self._collected = None
        self.register_state_dict_post_hook(write_states, prepend=True)
        self._built = True

    def _agree_on_plan(self, make: Callable[[], ShardPlan]) -> ShardPlan:
        return agree_on_plan(self.process_group, self.join_device, make)

    def _build_plan(self, given: ShardPlan | None) -> ShardPlan:
        """Check the memory of all parameters, and return their plan."""
        check_group_overlap(self.param_groups)
        arguments = (self.params, self.param_groups, self._chains, self._policy)
        return build_plan(*arguments, self.world_size, given)

    def _extend_plan(self, before: int) -> ShardPlan:
        """Check the parameters and options of new groups, and return the plan with these groups."""
        check_group_overlap(self.param_groups)
        if self._local is not None:
            for number in range(before, len(self.param_groups)):
                self._own.check_options(number, self.param_groups[number])
            self._own.check_common_options(self.param_groups)
        arguments = (self.params, self.param_groups, self._chains, self._policy)
        return extend_plan(self.plan, *arguments)

    def _owned_groups(self, shards: LocalShards, before: int = 0) -> list[OwnedGroup]:
        """Return this rank's part of each group, from a group number on; some may be empty."""
        params: list[list[Tensor]] = [[] for _ in self.param_groups]
        for one in shards.every():
            params[one.group].append(one.tensor)
        return [
            OwnedGroup(self.param_groups, number, params[number])
            for number in range(before, len(params))
        ]

    def _owned_params(self) -> list[list[Tensor]]:
        """Return the parameters that this rank owns as a whole, by group."""
        params: list[list[Tensor]] = [[] for _ in self.param_groups]
        for one in self.owned:
            params[self.plan.specs[one.parameter].group].append(self.params[one.path])
        return params

    # ------------------------------------------------------------------------------- stepping

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the ranges that this rank owns, then gather all parameters. Collective.

        Under GradScaler, a step that one rank skips is skipped on all ranks.

        Args:
            closure: re-evaluates the model and returns the loss; called first, with autograd on.
            kwargs: passed to the step of ``optim``.

        Returns:
            The result of the step of ``optim``: the loss, if there is a closure.

        Raises:
            RuntimeError: a parameter was moved out of its flat buffer; ``overlap_with_ddp``, and no
                communication hook was called, or it has stepped by gradients that are still scaled.
            TransportError: a rank died, or did not come within the group's timeout.
            ValueError: an option or a gradient that does not fit; a parameter that was added to a
                group, or removed from one, by hand. Nothing has changed.
        """
        if self.overlap_with_ddp:
            self._check_hook_unscaled()
            return None
        Join.notify_join_context(self)
        return self._step(closure, kwargs, joined=False)

    @disable_compile
    def _step(
        self, closure: Callable[[], Any] | None, kwargs: dict[str, Any], *, joined: bool
    ) -> Any:
        if closure is None and not self._agree_on_step(joined=joined):
            return None
        self._find_memory(self.params)
        given = {} if closure is None else {"closure": lambda: self._run_closure(closure)}
        loss = step_without_global_hooks(self.optim, **given, **kwargs)
        self._collected = None
        self.gather()
        if joined:  # the gradients are of other ranks: the next backward must not add to them
            self.zero_grad()
        return loss

    def _run_closure(self, closure: Callable[[], Any]) -> Any:
        """Run a closure, and then prepare the gradients for the step."""
        loss = closure()
        self._agree_on_step(joined=False)
        return loss

    def _agree_on_step(self, *, joined: bool) -> bool:
        """Prepare gradients, and return True if the step is run: the same on all ranks."""
        self.check_groups()
        return agree_on_step(self, Scaling.of(self), uneven=is_joining(self), joined=joined)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` over all ranks. Collective.

        Each rank measures the gradients that it owns, in double precision. The results are summed
        over ranks.

        Args:
            max_norm: the largest norm.
            norm_type: the p of the norm, above 0; may be ``math.inf``.
            error_if_nonfinite: True to raise an error if the norm is NaN or infinite.

        Returns:
            The norm before clipping, 0-d, the same on all ranks.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite``; or
                ``overlap_with_ddp``, since the hook has stepped already.
            ValueError: ``norm_type`` is not above 0, or ``max_norm`` below 0.
        """
        if self.overlap_with_ddp:
            raise RuntimeError(
                "clip_grad_norm_() comes too late where overlap_with_ddp=True: the communication "
                "hook has stepped by these gradients already; give max_norm to the hook"
            )
        return clip_gradients(
            self,
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
            alone=is_joining(self),  # a rank without data is not here
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. The owners of all other parameters stay the same. Collective.

        Args:
            param_group: a dict with "params", and the options that differ for them.

        Raises:
            ValueError: a parameter that is in another group, ranks with different parameters, an
                option out of bounds, or an option on which shared scalars depend, and which differs
                from that of the other groups. Nothing has changed.
        """
        if not self._built:
            self._add_divided_group(param_group)
            return
        params, plan, before = self.params, self.plan, len(self.param_groups)
        defaults = self.defaults
        try:
            self._add_divided_group(parse_group(param_group, len(self.param_groups)))
            self.params = named_params(self.param_groups)
            self.plan = self._agree_on_plan(lambda: self._extend_plan(before))
        except BaseException:  # an interrupt, too
            self.params, self.plan, self.defaults = params, plan, defaults
            del self.param_groups[before:]
            if self._chains is not None:
                del self._chains.parts[before:]
            raise
        new = {path: param for path, param in self.params.items() if path not in params}
        self._fix_groups()
        self._memory.extend(new, self.plan)
        if self._local is None:
            own = self._owned_params()
            for number in range(before, len(own)):
                add_foreign_group(self.optim, self.param_groups, number, own[number])
        else:
            self._own.extend(self.plan)
            self._local.extend(self._owned_groups(self._own, before))

    def _add_divided_group(self, group: dict[str, Any]) -> None:
        """Add a group, divided into groups of one chain each; guard scheduled options."""
        chains = self._chains
        if chains is None:
            super().add_param_group(group)
            return
        if chains.divides:
            self.defaults = {}  # each part has only its own options
        parts = divide_group(chains, group, len(params_of_groups(self.param_groups)))
        for number, part in enumerate(parts, len(self.param_groups)):
            super().add_param_group(part)
            copy_option_tensors(self.param_groups[number])
            names = chains.reader(number).names
            self.param_groups[number] = guard_schedules(self.param_groups[number], names)
        if chains.divides:
            every = [one.optimizer.hyper for one in chains.parts]
            self.defaults = common_options(self.param_groups, every)

    # ---------------------------------------------------------------------------- state dicts

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's form: the state of all ranks, or this rank's part of it.

        After :meth:`consolidate_state_dict`, and until the next step, the target rank has the state
        of all ranks, and the other ranks raise an error. State in other storages is decoded to
        float32. Extra digits of parameters keep their names (``master``, ``compensation``);
        torch.optim keeps such entries, and does not use them.

        Otherwise each rank has its part: ranges of elements. ``torch.distributed.checkpoint`` saves
        them, and loads them with any number of ranks and into other optimizers;
        ``get_optimizer_state_dict(model, zero)`` replaces numbers by names. A part cannot be
        pickled, so ``torch.save`` does not write it by mistake. The optimizer changes only with
        :meth:`load_state_dict`.

        Raises:
            RuntimeError: the state was collected on another rank; or a class without functional
                equivalent, if nothing was collected.
        """
        self._check_has_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a state dict of :meth:`state_dict`, or of torch.optim.

        ``state_dict`` is not changed, and shares no memory with the optimizer afterwards. Its
        state may be in any storage, as for :meth:`load`: load the module's parameters first. If the
        parameters of both have names, they are matched by name, else by position. A state dict that
        ``torch.distributed.checkpoint`` has loaded has a part for every rank.

        Raises:
            ValueError: other groups or names, a state that does not fit, or a part of a state dict
                without some elements that this rank owns. Nothing has changed.
        """
        load_with_hooks(self, state_dict, lambda given: load(self, given))
        self._collected = None

    # -------------------------------------------------------------------------- uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook with which a rank without data steps with the others under ``Join``.

        A rank that has data sends the options, and the gradients that this rank needs. List this
        optimizer after the DDP module: ``Join([ddp, zero])``. ``kwargs`` are not used.
        """
        if self.overlap_with_ddp:
            return JoinHook()  # DDP's own hook runs the communication hook
        return StepWithOthers(lambda: self._step(None, {}, joined=True))

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group."""
        return self.process_group
