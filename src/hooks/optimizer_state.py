"""What a step hook steps: an optimizer, the parameters of a DDP module by name, and their state."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from functional_optim import LeafState, Optimizer, State
from functional_optim.core.chain import require_gradients_alone, require_one_chain
from functional_optim.core.checks import check_leaf_state, check_params, check_writable
from functional_optim.core.links import keeps_shared
from functional_optim.core.local_shards import check_whole
from functional_optim.core.overrides import LeafChain
from functional_optim.core.tree import flatten, leaf_states
from functional_optim.core.unbroken import unbroken
from functional_optim.frontends.recipe import functional_of
from functional_optim.frontends.torch_checkpoint import own_copy
from functional_optim.kernels import EXECUTORS, is_measured
from functional_optim.plan import StepPlan, composed, engine
from functional_optim.plan.composed import checked_leaf
from functional_optim.plan.composed_plans import is_simple
from functional_optim.plan.composed_steps import ComposedSteps
from functional_optim.plan.shared_numbers import check_shared
from functional_optim.plan.step_leaves import StepLeaf, StepLeaves
from hooks.arrivals import reduced_by
from hooks.torch_form import Group, ParamGroup, read, with_group_values, written
from hooks.usage import may_leave_unused

PLANS = 64
"""For how many buckets plans are kept."""


class OptimizerState:
    """An optimizer with the parameters and the state that :func:`~hooks.step_hook` steps.

    State is kept by parameter name, never by bucket: DDP changes its buckets after the first
    backward, and a bucket is only a slice of the tree.

    Args:
        optimizer: any :class:`functional_optim.Optimizer`, or a constructor of one; or a class of
            torch.optim, or a registered one, with that class's options.
        ddp: the DistributedDataParallel module whose hook this is for.
        params: the parameters to step, by name; by default all of ``ddp.module`` that require
            gradients. Others are left to the caller.
        state: where to go on from, as in :attr:`state`; by default ``optimizer.init(params)``.
        executor: how the chain is run over a bucket.
        options: of the class or constructor, by name.

    Raises:
        TypeError: ``ddp`` is no DistributedDataParallel; a class without functional equivalent; a
            stage that takes inputs beside the gradients.
        ValueError: no parameter, one that DDP is told to ignore or that requires no gradient, or a
            state of another tree.

    Example::

        >>> import torch, torch.distributed as dist
        >>> from functional_optim import adamw
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
        >>> state = OptimizerState(adamw(lr=0.1), ddp)
        >>> sorted(state.params)
        ['bias', 'weight']
        >>> state.set_hyper(lr=0.05)
        >>> state.param_groups[0]["lr"]
        0.05
        >>> torch.optim.AdamW(ddp.parameters()).load_state_dict(state.state_dict())
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        optimizer: Any,
        ddp: DistributedDataParallel,
        *,
        params: Mapping[str, Tensor] | None = None,
        state: State | None = None,
        executor: str = "auto",
        **options: Any,
    ) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                "OptimizerState takes the DistributedDataParallel module that the hook is "
                f"registered on, got {type(ddp).__name__}"
            )
        made = functional_of(optimizer, options)
        require_gradients_alone(made, "a communication hook")
        # Not the module itself: its reducer holds the hook, the hook holds this, and the ring would
        # never be freed.
        self.process_group = ddp.process_group
        """The group over which gradients are reduced."""
        self.may_leave_unused = may_leave_unused(ddp)
        """Whether DDP may put zeros into a bucket for a parameter that had no part in the loss."""
        self.reduced: tuple[Tensor, ...] = tuple(reduced_by(ddp).values())
        """All parameters whose gradients DDP reduces, also those that are not stepped here."""
        self.params: dict[str, Tensor] = dict(
            trainable_parameters(ddp) if params is None else params
        )
        """The parameters stepped, by name."""
        check_params(list(self.params.values()), [(name,) for name in self.params])
        check_whole(self.params, "a communication hook")
        check_writable(self.params)
        frozen = [name for name, param in self.params.items() if not param.requires_grad]
        if frozen:
            raise ValueError(
                f"the parameter {frozen[0]!r} does not require gradients, so no bucket would bring "
                "one; leave it out of params="
            )
        self.optimizer = made.using(executor=executor)
        """The optimizer; ``set_hyper`` changes its hyper-parameters."""
        with torch.no_grad():
            self.state = made.init(self.params) if state is None else state
        """The state, stepped in place; ``state.leaves`` is keyed by parameter name."""
        self._names = {id(param): name for name, param in self.params.items()}
        self._chains = self._chains_of(self.optimizer)
        self._leaves = self._checked_leaves()
        self._plans: dict[tuple[str, ...], StepPlan] = {}
        self._composed: ComposedSteps | None = None
        self._groups: dict[str, int] = {}
        self._beside: dict[str, dict[str, Any]] = {}
        self._use(self._shared_hypers(self.optimizer))

    @property
    def measured(self) -> bool:
        """Whether the chain needs all gradients before it can step any parameter.

        So it does where a step makes numbers that belong to no parameter.
        """
        return keeps_shared(self.optimizer.links) or any(map(is_measured, self.optimizer.stages))

    def set_hyper(self, **hyper: Any) -> None:
        """Change hyper-parameters, by name, from the next backward on.

        Raises:
            TypeError: a name that the chain does not have.
            ValueError: a value out of bounds, or an option that the state was not made for.
        """
        self.use(self.optimizer.replace(**hyper))

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Parameters with the same hyper-parameters, as in torch: options may be written there.

        An optimizer without overrides has one group, of all parameters in their order.

        Raises:
            TypeError: leaves differ in their stages, or something is kept for all of them.
        """
        require_one_chain(self.optimizer, "param_groups")
        return [ParamGroup(self, number) for number in range(len(self._of_group))]

    @property
    def groups(self) -> list[Group]:
        """The same as they are now, by name."""
        found: dict[int, Group] = {}
        for name, param in self.params.items():
            number = self._groups[name]
            if number not in found:
                found[number] = Group({}, self._of_group[number], self._beside.setdefault(name, {}))
            found[number].params[name] = param
        return list(found.values())

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters and state in torch's form, all tensors copied.

        TorchOptimizer and the equivalent torch.optim class load it, where their groups are those
        of :attr:`param_groups`: without overrides, one of all parameters in their order here. Of an
        optimizer whose leaves differ in their stages, or that keeps numbers for all, there is none:
        save :attr:`state`.

        Raises:
            TypeError: it is such an optimizer.
        """
        require_one_chain(self.optimizer, "state_dict")
        copied: dict[str, Any] = own_copy(written(self.optimizer, self.groups, self._leaves))
        return copied

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over hyper-parameters and state in torch's form, from the next backward on.

        Parameters are matched by their place, as in torch. :attr:`state` is another object then;
        it shares no memory with ``state_dict``.

        Args:
            state_dict: of :meth:`state_dict`, of TorchOptimizer, or of the equivalent class of
                torch.optim, whose parameters were those of :attr:`param_groups` in their order.

        Raises:
            ValueError: other groups, a state that does not fit the chain; nothing is changed then.
        """
        require_one_chain(self.optimizer, "load_state_dict")
        groups = self.groups
        found = read(self.optimizer, groups, state_dict)
        known = self.optimizer.hyper
        wanted = [{key: one[key] for key in known} for one in found.options]
        optimizer = with_group_values(self.optimizer, groups, wanted)
        hypers = self._shared_hypers(optimizer)
        for name, leaf in found.leaves.items():
            check_leaf_state(optimizer.stages, hypers[name], self.params[name], leaf, name)
        names, spec = flatten({name: name for name in self.params}, "")
        self.state = State(spec.unflatten([found.leaves[name] for name in names]))
        self._leaves = found.leaves
        self._plans.clear()
        self.optimizer = optimizer
        self._use(hypers)
        for group, one in zip(groups, found.options, strict=True):
            group.beside.clear()
            group.beside.update({key: one[key] for key in one if key not in known})

    def use(self, optimizer: Optimizer) -> None:
        """Step by the hyper-parameters of another optimizer of this chain.

        Raises:
            ValueError: an option that the state was not made for.
        """
        chains = self._chains_of(optimizer)
        for name, leaf in self._leaves.items():
            check_leaf_state(*chains[name][1:], self.params[name], leaf, name)
        self.optimizer, self._chains = optimizer, chains
        self._use({name: one.hypers for name, one in chains.items()})

    def _use(self, hypers: dict[str, tuple[Any, ...]]) -> None:
        """Step by these; parameters that share them are a group."""
        self._hypers = hypers
        self._of_group = list({id(own): own for own in hypers.values()}.values())
        numbers = {id(own): number for number, own in enumerate(self._of_group)}
        groups = {name: numbers[id(own)] for name, own in hypers.items()}
        if groups != self._groups:
            self._plans.clear()
            self._composed = None
        self._groups = groups
        self._stepped = [name for name, one in self._chains.items() if one.stages]
        chains = [self._chains[name] for name in self._stepped]
        self._of_chain = list({id(own): own for own in chains}.values())

    def name_of(self, param: Tensor) -> str | None:
        """The name of a parameter that is stepped here; None for others."""
        return self._names.get(id(param))

    def step(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Step these parameters, in place, by as few calls of a kernel as can be."""
        if self.optimizer.is_composed:
            self._step_composed(dict(zip(names, gradients, strict=True)))
            return
        if not names:
            return
        key = tuple(names)
        plan = self._plans.get(key)
        if plan is not None and plan.make(list(gradients), self._of_group):
            return
        items = [
            engine.Item(self.params[name], gradient, self._leaves[name], self._hypers[name], name)
            for name, gradient in zip(names, gradients, strict=True)
        ]
        stages, executor = self.optimizer.stages, EXECUTORS[self.optimizer.executor]
        engine.update_(stages, executor, items)
        if plan is None and len(self._plans) >= PLANS:
            self._plans.clear()
        self._plans[key] = StepPlan(stages, executor, items, [self._groups[name] for name in key])

    def _step_composed(self, gradients: Mapping[str, Tensor]) -> None:
        """Step parameters that differ in their stages, or share numbers."""
        links, shared = self.optimizer.links, self.state.shared
        executor, known = EXECUTORS[self.optimizer.executor], self._composed
        grads = [gradients.get(name) for name in self._stepped]
        if known is not None:
            step = known.prepared(links, self._of_chain, grads, shared, (), {})
            if step is not None:
                unbroken(known.make, step, shared)
                return
        found = []
        for i, (name, grad) in enumerate(zip(self._stepped, grads, strict=True)):
            leaf = StepLeaf(i, self.params[name], self._leaves[name], self._chains[name], name)
            found.append(checked_leaf(leaf, grad))
        leaves = StepLeaves.of(found, grads)
        decided = composed.decide(links, executor, leaves, shared, (), {})
        composed.update_(executor, decided, shared)
        if known is None and is_simple([leaf.param for leaf in found]):
            numbers = {id(one): number for number, one in enumerate(self._of_chain)}
            chains = [numbers[id(leaf.chain)] for leaf in found]
            known = self._composed = ComposedSteps(executor, found, chains, masks=PLANS)
        if known is not None:
            known.learn(leaves, decided)

    def _chains_of(self, optimizer: Optimizer) -> dict[str, LeafChain]:
        """By name; one object for all that have the same stages and hyper-parameters."""
        names, _ = flatten({name: name for name in self.params}, "")
        return dict(zip(names, optimizer.chains_for(self.params), strict=True))

    def _shared_hypers(self, optimizer: Optimizer) -> dict[str, tuple[Any, ...]]:
        """By name; one tuple for all that have the same, so that they share coefficients."""
        return {name: one.hypers for name, one in self._chains_of(optimizer).items()}

    def _checked_leaves(self) -> dict[str, LeafState]:
        names, spec = flatten({name: name for name in self.params}, "")
        leaves = dict(zip(names, leaf_states(spec, self.state), strict=True))
        check_shared(self.optimizer.links, self.state.shared)
        for name, leaf in leaves.items():
            checked_leaf(StepLeaf(0, self.params[name], leaf, self._chains[name], name), None)
        return leaves


def trainable_parameters(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters of the wrapped module that require gradients, by name.

    Raises:
        ValueError: DDP is told to ignore one of them, so that no hook would ever step it.
    """
    found = {name: param for name, param in ddp.module.named_parameters() if param.requires_grad}
    ignored = [name for name in found if name in ddp.parameters_to_ignore]
    if ignored:
        raise ValueError(
            f"DDP ignores the parameter {ignored[0]!r}, so its hook would never step it; pass "
            "params= without it, and step it yourself"
        )
    return found
