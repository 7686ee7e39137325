"""ZeroRedundancyOptimizer: each rank keeps the state of what it owns, and steps that."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh

from functional_optim._torch import (
    is_joining,
    load_state_dict_hooks,
    step_without_global_hooks,
)
from functional_optim.core.compiling import uncompiled
from functional_optim.frontends.loss_scale import Scaling
from functional_optim.frontends.torch_groups import common_options, own_options
from functional_optim.frontends.torch_schedule import guarded
from sharding.problem import Policy
from sharding.shard_plan import ShardPlan
from sharding.transport.groups import resolved
from sharding.transport.peers import GroupRank, global_rank
from sharding.zero.before_step import agreed_on_step
from sharding.zero.checkpointed import Checkpointed, with_states
from sharding.zero.coalescing import Coalescing
from sharding.zero.group_recipes import GroupRecipes
from sharding.zero.groups import Transports, shard_group
from sharding.zero.load import load
from sharding.zero.local_shards import LocalShards
from sharding.zero.modes import AfterBackward, FromHook, Mode
from sharding.zero.norm import clip_gradients
from sharding.zero.optim import ShardOptimizer
from sharding.zero.owned_groups import OwnedGroup, add_foreign_group, foreign_optimizer
from sharding.zero.parameter_memory import ParameterMemory
from sharding.zero.params import checked_group, checked_params, named_params
from sharding.zero.planning import agreed, extended, named_policy, planned
from sharding.zero.recipe import recipe_of
from sharding.zero.shard_steps import ShardSteps


class ZeroRedundancyOptimizer(Checkpointed, torch.optim.Optimizer, Joinable):
    """torch's ``ZeroRedundancyOptimizer``: state sharded over ranks, parameters whole on each.

    Every rank steps what it owns, with gradients that all ranks have (as after a backward pass of
    DistributedDataParallel), and hands it to the others:

        for each owned range r of this rank:   p_r, s_r = rule(p_r, g_r, s_r)
        p = gather of all p_r

    Change the import, and a program that uses torch's class does what it did; so it does with
    several groups, mixed dtypes, frozen parameters and sub-groups, which torch's refuses or gets
    wrong. Options are read from ``param_groups`` at every step, so any scheduler works.

    Args:
        params: parameters, (name, parameter) pairs, or parameter groups. Names are the paths of
            checkpoints; without them, "1.0" is the first parameter of the second group.
        optimizer_class: a class of torch.optim, or one of our optimizers, or a function that makes
            one of its hyper-parameters (``lambda lr: chain(clip_by_value(1.0), adamw(lr))``). A
            class that has a functional equivalent is stepped by that, bit for bit as torch's
            for-loop; on CUDA with ``fused=True`` by torch's fused kernels, which round otherwise.
            Any other class is made over the parameters that the rank owns. Of a partition, or one
            with overrides, groups are divided by chain, as TorchOptimizer divides them. What keeps
            numbers that belong to no parameter (accumulation, Schedule-Free, Prodigy) makes one
            step of all, from a hook with the last bucket; :attr:`shared` has the numbers.
        process_group: a group that this rank is in, or a DeviceMesh of one dimension; by default
            the world.
        parameters_as_bucket_view: move the parameters into flat buffers, one per dtype and device,
            in the order of their owners. They stay the same objects; a gather is then one
            collective for each buffer.
        overlap_with_ddp: step from a communication hook while backward goes on (see
            ``hooks.zero_step_hook``); :meth:`step` then only logs a warning.
        policy: a key of :data:`sharding.POLICIES`, or a function of a Problem. "greedy" is torch's
            partition; "elements" levels exactly, by cutting parameters, where the rule allows it;
            "sliced" does too, and is the one for a hook that steps while backward goes on.
        plan: a plan that was made before, in place of a policy; the policy is then for groups that
            are added later.
        executor: what runs the steps, where it is not to be chosen as said above.
        defaults: the options of the class, or hyper-parameters of the optimizer.

    Attributes:
        plan: who owns what; the same on all ranks, which is checked.
        params: every parameter, by path.
        optim: a torch-like optimizer over this rank's shard, with a group for each group.

    Raises:
        TypeError: ``params`` is a tensor, no iterable, or a mixed list; an option that the class
            does not have.
        ValueError: no parameters, a group without "params", a sparse parameter; a plan for other
            parameters; ranks with different parameters (the first difference is named); a policy
            that cuts what the rule needs whole; one of torch's functional classes without overlap,
            or overlap with a class that has no functional equivalent.
        RuntimeError: another rank could not make a plan; names it, and says why.

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

    # Options of torch's GradScaler are taken: see before_step.py.
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
        given = checked_params(params)
        recipe = recipe_of(optimizer_class, defaults, executor, overlap=overlap_with_ddp)
        self._recipes = None if recipe is None else GroupRecipes(recipe)
        self._policy, self._built = named_policy(policy), False
        torch.optim.Optimizer.__init__(
            self, given, dict(defaults if recipe is None else recipe.defaults)
        )
        Joinable.__init__(self)
        self.process_group: dist.ProcessGroup = resolved(process_group)
        self.world_size: int = self.process_group.size()
        self.rank: int = self.process_group.rank()
        self.global_rank: int = global_rank(self.process_group, GroupRank(self.rank))
        self.overlap_with_ddp = overlap_with_ddp
        self._mode: Mode = FromHook() if overlap_with_ddp else AfterBackward()
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.params: dict[str, Tensor] = named_params(self.param_groups)
        self.plan: ShardPlan = self._agreed(
            lambda: planned(
                self.params, self.param_groups, self._recipes, self._policy, self.world_size, plan
            )
        )
        self._memory = ParameterMemory(self.params, self.plan, in_buffers=parameters_as_bucket_view)
        self._transports = Transports(shard_group(self.process_group, self.plan))
        self._messages: dict[tuple[tuple[str, ...], int], Coalescing] = {}
        self._local = None if self._recipes is None else self._local_optimizer(self._recipes)
        self.optim: torch.optim.Optimizer = (
            foreign_optimizer(optimizer_class, self.param_groups, self._owned_params(), defaults)
            if self._local is None
            else ShardOptimizer(self._local, self._local.owned.recipe.defaults, self._total)
        )
        self._collected = None
        self.register_state_dict_post_hook(with_states, prepend=True)
        self._built = True

    def _agreed(self, make: Callable[[], ShardPlan]) -> ShardPlan:
        return agreed(self.process_group, self.join_device, make)

    def _extended(self, before: int) -> ShardPlan:
        """The plan with more groups than before, once their options are sure to be right."""
        if self._local is not None:
            for number in range(before, len(self.param_groups)):
                self._own.check_options(number, self.param_groups[number])
            self._own.check_common_options(self.param_groups)
        arguments = (self.params, self.param_groups, self._recipes, self._policy)
        return extended(self.plan, *arguments)

    def _local_optimizer(self, recipes: GroupRecipes) -> ShardSteps:
        """The optimizer over what this rank owns, once the options of all groups are right."""
        shards = LocalShards(recipes, self._memory, self.plan, self.rank)
        for number, group in enumerate(self.param_groups):
            shards.check_options(number, group)
        return ShardSteps(shards, self._owned_groups(shards))

    def _owned_groups(self, shards: LocalShards, before: int = 0) -> list[OwnedGroup]:
        """This rank's part of each group from a number on, empty ones too."""
        params: list[list[Tensor]] = [[] for _ in self.param_groups]
        for one in shards.every():
            params[one.group].append(one.tensor)
        return [
            OwnedGroup(self.param_groups, number, params[number])
            for number in range(before, len(params))
        ]

    def _owned_params(self) -> list[list[Tensor]]:
        """The parameters that this rank owns whole, by group."""
        params: list[list[Tensor]] = [[] for _ in self.param_groups]
        for one in self.owned:
            params[self.plan.specs[one.parameter].group].append(self.params[one.path])
        return params

    # ------------------------------------------------------------------------------- stepping

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step what this rank owns, then make all parameters whole on all ranks. Collective.

        Under GradScaler, a step that is to be skipped on one rank is skipped on all.

        Args:
            closure: re-evaluates the model and returns the loss; called first, with autograd on.
            kwargs: handed on to the step of ``optim``.

        Returns:
            What the step of ``optim`` returned: the loss, where there is a closure.

        Raises:
            RuntimeError: a parameter that someone has moved out of its buffer; a GradScaler that
                the communication hook does not know, and so has stepped by scaled gradients.
            TransportError: a rank died, or did not come within the group's timeout.
            ValueError: an option, or a gradient, that does not fit; nothing is changed then.
        """
        return self._mode.step(self, lambda: self._step(closure, kwargs, joined=False))

    @uncompiled
    def _step(
        self, closure: Callable[[], Any] | None, kwargs: dict[str, Any], *, joined: bool
    ) -> Any:
        if closure is None and not self._agreed_on_step(joined=joined):
            return None
        self._find_memory(self.params)
        given = {} if closure is None else {"closure": lambda: self._after(closure)}
        loss = step_without_global_hooks(self.optim, **given, **kwargs)
        self._collected = None
        self.gather()
        return loss

    def _after(self, closure: Callable[[], Any]) -> Any:
        """A closure, and then what comes between a backward pass and a step."""
        loss = closure()
        self._agreed_on_step(joined=False)
        return loss

    def _agreed_on_step(self, *, joined: bool) -> bool:
        """Agree with the other ranks on this step; whether it is to be made."""
        uneven = is_joining(self)
        return agreed_on_step(self._parts, Scaling.of(self), uneven=uneven, joined=joined)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` over all ranks. Collective.

        Each rank measures only what it owns, in double precision, and the ranks add up.

        Args:
            max_norm: the largest norm.
            norm_type: the p of the norm, above 0; may be ``math.inf``.
            error_if_nonfinite: raise where the norm is NaN or infinite.

        Returns:
            The norm before, 0-d, the same on all ranks.

        Raises:
            RuntimeError: it is not finite, and ``error_if_nonfinite``; or ``overlap_with_ddp``,
                where the hook has made the step by now.
            ValueError: ``norm_type`` is not above 0, or ``max_norm`` below 0.
        """
        return self._mode.clip(
            lambda: clip_gradients(
                self._parts,
                max_norm,
                norm_type,
                error_if_nonfinite=error_if_nonfinite,
                alone=is_joining(self),  # a rank without data is not here
            )
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; everything owned so far stays where it is. Collective.

        Args:
            param_group: a dict with "params", and the options that differ for them.

        Raises:
            ValueError: a parameter that is in another group, ranks with different parameters, an
                option out of bounds, or another value than that of the other groups where shared
                scalars depend on it. Nothing is changed then.
        """
        if not self._built:
            self._add_divided(param_group)
            return
        params, plan, before = self.params, self.plan, len(self.param_groups)
        defaults = self.defaults
        try:
            self._add_divided(checked_group(param_group))
            self.params = named_params(self.param_groups)
            self.plan = self._agreed(lambda: self._extended(before))
        except BaseException:  # an interrupt, too
            self.params, self.plan, self.defaults = params, plan, defaults
            del self.param_groups[before:]
            if self._recipes is not None:
                self._recipes.keep(before)
            raise
        new = {path: param for path, param in self.params.items() if path not in params}
        self._memory.extend(new, self.plan)
        if self._local is None:
            own = self._owned_params()
            for number in range(before, len(own)):
                add_foreign_group(self.optim, self.param_groups, number, own[number])
        else:
            self._own.extend(self.plan)
            self._local.extend(self._owned_groups(self._own, before))
        self._show_numbers()

    def _add_divided(self, group: dict[str, Any]) -> None:
        """Add a group, as groups of one chain each; schedulers are told of schedules."""
        if self._recipes is None:
            super().add_param_group(group)
            return
        is_composed = self._recipes.divides
        if is_composed:
            self.defaults = {}  # each part has its own options, and no other
        for part in self._recipes.divided(group):
            super().add_param_group(part)
            own_options(self.param_groups[-1])
            number = len(self.param_groups) - 1
            names = self._recipes.of(number).defaults
            self.param_groups[number] = guarded(self.param_groups[number], names)
        if is_composed:
            every = [self._recipes.of(k).defaults for k in range(len(self.param_groups))]
            self.defaults = common_options(self.param_groups, every)

    # ---------------------------------------------------------------------------- state dicts

    def state_dict(self) -> dict[str, Any]:
        """State as the plain optimizer would write it: all of it, or what this rank has of it.

        After :meth:`consolidate_state_dict`, and until the next step, the rank that was its target
        has the state of all ranks. Other ranks raise. State in other storages is decoded to
        float32; what was kept of the parameter stays under its name (``master``,
        ``compensation``), which torch.optim takes along and does not use.

        Otherwise each rank has its part: ranges of elements, which
        ``torch.distributed.checkpoint`` saves, and loads with any number of ranks and into other
        optimizers; ``get_optimizer_state_dict(model, zero)`` puts names in place of numbers. Such
        a part cannot be pickled, so ``torch.save`` does not write it by mistake. Nothing is read
        into the optimizer before :meth:`load_state_dict`.

        Raises:
            RuntimeError: the state was collected on another rank; or a class of which nothing is
                known, before anything was collected.
        """
        self._check_state_is_here()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of a state dict: one of :meth:`state_dict`, or of torch.optim.

        ``state_dict`` is left as it is, and shares no memory with the optimizer afterwards. It
        may be of any storage, as for :meth:`load`: load the module's parameters first. Where the
        parameters of both have names, they are matched by name, and else by position. It may be
        one that ``torch.distributed.checkpoint`` has loaded, of which every rank has a part.

        Raises:
            ValueError: other groups or names, a state that does not fit, or a part of a state dict
                that lacks elements of this rank's; nothing is changed.
        """
        given: Any = state_dict
        before, after = load_state_dict_hooks(self)
        for hook in before:
            given = hook(self, given) or given
        load(self._parts, given)
        for hook in after:
            hook(self)

    # -------------------------------------------------------------------------- uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook by which a rank without data steps with the others under ``Join``.

        It is handed the gradients of what it owns, and the options, by a rank that has data. List
        this optimizer after the DDP module: ``Join([ddp, zero])``.

        Args:
            kwargs: of other joinables; not used.
        """
        return self._mode.join_hook(lambda: self._step(None, {}, joined=True))

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group."""
        return self.process_group
