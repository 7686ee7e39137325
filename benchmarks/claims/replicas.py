"""Replicas of a model, stacked in one process: their gradients, and their inner steps."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor, nn

from functional_optim import LeafState, Optimizer, State
from functional_optim.core.chain import require_gradients_alone
from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.format import format_value
from functional_optim.core.on_global_step import has_global_schedule
from hooks.averaging import ModelAverager
from sharding.transport.local import LocalWorld
from sharding.transport.ordered_sum import add_in_rank_order

_tree: Any = optree  # whose annotations have trees of trees only

Named = dict[str, Tensor]

Loss = Callable[..., Tensor]
"""``loss(model, *batch)``, a 0-d tensor; ``model`` is called as the module is."""

Function = Callable[..., Any]
OverReplicas = Callable[[Function], Function]
"""Turns a function of one replica's trees of tensors into a function of all replicas' stacked
trees."""


def at_once(function: Function) -> Function:
    """Vectorize a function over replicas, by ``torch.func.vmap``: each operation runs once for all.

    Elementwise operations give the same bits as for each replica alone. Matrix products are
    batched, and may round differently.

    Args:
        function: takes and returns trees of tensors.

    Example::

        >>> at_once(torch.sum)(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([3., 7.])
    """
    mapped: Function = torch.func.vmap(function, randomness="different")
    return mapped


def one_by_one(function: Function) -> Function:
    """Apply a function to one replica after the other, with the bits that each gives alone.

    Args:
        function: takes and returns trees of tensors.

    Example::

        >>> one_by_one(torch.sum)(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([3., 7.])
    """

    def mapped(*trees: Any) -> Any:
        size = len(_tree.tree_leaves(trees)[0])
        done = [function(*slice_of(trees, number)) for number in range(size)]
        return stacked(*done)

    return mapped


def slice_of(trees: Any, number: int) -> Any:
    """Return the trees of one replica, cut from the stacked trees."""
    return _tree.tree_map(lambda tensor: tensor[number], trees)


def stacked(*trees: Any) -> Any:
    """Stack the trees of all replicas: the inverse of ``slice_of``."""
    return _tree.tree_map(lambda *slices: torch.stack(slices), *trees)


class ReplicatedModel:
    """Replicas of a module that start equal. Each imitates a rank, and has its own data.

    For replica ``k`` with parameters ``x_k`` and batch ``b_k``, :meth:`gradients` is

        g_k = d loss(x_k, b_k) / d x_k

    A :class:`ReplicatedOptimizer` makes the inner steps, and :class:`ReplicatedAverager` takes the
    means. With the same gradients, both give the bits of ranks. With ``over=one_by_one``, the
    gradients have the bits of ranks too.

    Args:
        module: the first state of all replicas. It is called with the parameters of a replica; its
            own parameters do not change.
        count: the number of replicas.
        over: :func:`at_once`, or :func:`one_by_one`, which is slower and gives the bits of ranks.

    Attributes:
        params: leaf tensors of shape (count, ...) by name. The objects never change.
        buffers: tensors of shape (count, ...) by name.
        count: the number of replicas.

    Raises:
        ValueError: ``count`` below 1.

    Example::

        >>> from functional_optim import sgd
        >>> from hooks.averaging import OuterModelAverager
        >>> model = ReplicatedModel(nn.Linear(2, 1), 3)
        >>> inner = ReplicatedOptimizer(model.params, sgd(lr=0.1))
        >>> diloco = sgd(lr=0.7, momentum=0.9, nesterov=True)
        >>> outer = ReplicatedAverager(model, lambda params, group: OuterModelAverager(
        ...     params, diloco, period=2, process_group=group))
        >>> for step in range(2):
        ...     losses, grads = model.gradients(
        ...         lambda model, inputs: model(inputs).square().mean(), torch.randn(3, 5, 2))
        ...     inner.step(grads)
        ...     outer.average_parameters()
        >>> losses.shape, bool((model.params["weight"] == model.params["weight"][0]).all())
        (torch.Size([3]), True)
    """

    def __init__(self, module: nn.Module, count: int, *, over: OverReplicas = at_once) -> None:
        if count < 1:
            raise ValueError(f"count must be a number of replicas from 1 on, got {count}")
        self.count = count
        self._module, self._over = module, over
        self.params: dict[str, Tensor] = {
            name: nn.Parameter(_repeated(one, count)) for name, one in module.named_parameters()
        }
        self.buffers: dict[str, Tensor] = {
            name: _repeated(one, count) for name, one in module.named_buffers()
        }

    def gradients(self, loss: Loss, *batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the gradients of each replica on its batch. Update the buffers.

        Args:
            loss: ``loss(model, *batch)``, 0-d.
            batch: tensors, or trees of them, of shape (count, ...): a batch for each replica.

        Returns:
            (losses, gradients): losses of shape (count,), and gradients like ``params``.

        Raises:
            ValueError: a tensor of ``batch`` without a slice for each replica.
        """
        for place, one in enumerate(batch):
            if isinstance(one, Tensor) and one.shape[:1] != (self.count,):
                raise ValueError(
                    f"batch tensor {place} has shape {tuple(one.shape)}, its first dimension must "
                    f"be of {self.count}, one slice for each replica: stack them with torch.stack"
                )

        def of_one(
            params: dict[str, Tensor], buffers: dict[str, Tensor], *given: Any
        ) -> tuple[Tensor, dict[str, Tensor]]:
            # Forward passes write to buffers, and torch.func forbids writes to outer tensors.
            held = {**params, **{name: one.clone() for name, one in buffers.items()}}

            def model(*args: Any, **named: Any) -> Any:
                return torch.func.functional_call(self._module, held, args, named)

            return loss(model, *given), {name: held[name] for name in buffers}

        both = torch.func.grad_and_value(of_one, has_aux=True)
        params = {name: param.detach() for name, param in self.params.items()}
        grads, (losses, buffers) = self._over(both)(params, self.buffers, *batch)
        for name, value in buffers.items():
            self.buffers[name].copy_(value)
        return losses, grads

    @torch.no_grad()
    def replica(self, number: int) -> nn.Module:
        """Return a new module with the current parameters and buffers of a replica.

        Args:
            number: the number of the replica, from 0.
        """
        made = copy.deepcopy(self._module)
        for name, param in made.named_parameters():
            param.copy_(self.params[name][number])
        for name, buffer in made.named_buffers():
            buffer.copy_(self.buffers[name][number])
        return made


def _require_nothing_shared(optimizer: Optimizer) -> None:
    """Refuse stages that keep state that belongs to no leaf.

    Raises:
        TypeError: a stage keeps such state; the message names the stage.
    """
    for link in optimizer.links:
        if link.stage.combine is not None or has_global_schedule([link.hyper]):
            raise TypeError(
                "ReplicatedOptimizer takes optimizers whose leaves have nothing in common, and "
                f"{link.stage.name} keeps numbers that belong to no leaf: use update, update_, "
                "TorchOptimizer or a hook"
            )


class ReplicatedOptimizer:
    """Optimizer of stacked parameters: the pure ``update`` steps each replica alone.

        x_k, s_k <- update(x_k, g_k, s_k)        for each replica k

    A rule gets the tensors of one replica, so norms and rules for matrices work as on a rank.
    All replicas make the same number of steps, so a leaf has one step count, and coefficients
    are computed once. Elementwise rules give the bits of ranks. Rules with sums over elements or
    products of matrices give the bits of ranks with ``over=one_by_one``.

    Args:
        params: tensors of shape (count, ...) by name: :attr:`ReplicatedModel.params`. They are
            stepped in place.
        optimizer: an optimizer with any rules.
        over: :func:`at_once` or :func:`one_by_one`.

    Attributes:
        state: the state from ``optimizer.init``, with one step count for all replicas, and all
            other tensors of shape (count, ...). It can be saved and set.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, or its stages keep scalars that belong to no
            leaf, or take inputs besides the gradients.
        ValueError: there are no parameters, or ``optimizer.init`` refuses them.

    Example::

        >>> from functional_optim import adamw
        >>> params = {"weight": torch.ones(2, 3)}
        >>> inner = ReplicatedOptimizer(params, adamw(lr=0.5, weight_decay=0.0))
        >>> inner.step({"weight": torch.tensor([[1.0, 1.0, 1.0], [-1.0, 0.0, 1.0]])})
        >>> params["weight"]
        tensor([[0.5000, 0.5000, 0.5000],
                [1.5000, 1.0000, 0.5000]])
        >>> inner.state.leaves["weight"].step
        tensor(1)
    """

    def __init__(
        self, params: Mapping[str, Tensor], optimizer: Optimizer, *, over: OverReplicas = at_once
    ) -> None:
        refuse_closure(optimizer, "ReplicatedOptimizer")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be an Optimizer, such as adamw(), got {format_value(optimizer)}"
            )
        _require_nothing_shared(optimizer)
        require_gradients_alone(optimizer, "ReplicatedOptimizer")
        if not params:
            raise ValueError("params has no parameters: there is nothing to step")
        self._params = dict(params)
        self._over = over
        self.optimizer = optimizer.using(executor="reference")  # the one that torch.func takes
        """The optimizer of each replica."""
        self.state = self._init()

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor | None], **hyper: Any) -> None:
        """Step all replicas.

        Args:
            grads: gradients by name, each of the shape of its parameter. A gradient that no replica
                has is None or missing.
            hyper: hyper-parameters for this step only, such as ``lr``.

        Raises:
            TypeError, ValueError: ``optimizer.update`` refuses the gradients, or no parameter has
                the name. Nothing is changed.
        """
        unknown = sorted(grads.keys() - self._params.keys())
        if unknown:
            raise ValueError(f"there are gradients for {unknown}, which are no parameters here")
        steps = {name: leaf.step for name, leaf in self.state.leaves.items()}

        def of_one(params: Named, given: Named, stages: Mapping[str, Any]) -> Any:
            state = State({name: LeafState(steps[name], stages[name]) for name in params})
            found = {name: given.get(name) for name in params}
            params, state = self.optimizer.update(params, found, state, **hyper)
            return (
                {name: params[name] for name in given},
                {name: state.leaves[name].stages for name in given},
            )

        params = {name: param.detach() for name, param in self._params.items()}
        given = {name: grad for name, grad in grads.items() if grad is not None}
        stages = {name: leaf.stages for name, leaf in self.state.leaves.items()}
        if not given:
            return
        stepped, after = self._over(of_one)(params, given, stages)
        leaves = dict(self.state.leaves)
        for name, value in stepped.items():
            self._params[name].copy_(value)
            leaves[name] = LeafState(steps[name] + 1, after[name])
        self.state = State(leaves)

    def _init(self) -> State:
        params = {name: param.detach() for name, param in self._params.items()}
        count = len(next(iter(params.values())))
        states = [self.optimizer.init(slice_of(params, number)) for number in range(count)]
        stages = stacked(*({n: leaf.stages for n, leaf in one.leaves.items()} for one in states))
        steps = {name: leaf.step for name, leaf in states[0].leaves.items()}
        return State({name: LeafState(steps[name], stages[name]) for name in params})


class ReplicatedAverager:
    """Averagers of all replicas, each on its own thread, over slices of stacked parameters.

    Args:
        model: the replicas.
        make: ``make(params, group)`` returns the averager of one replica.

    Example::

        >>> from hooks import PeriodicModelAverager
        >>> model = ReplicatedModel(nn.Linear(1, 1), 2)
        >>> with torch.no_grad():
        ...     _ = model.params["bias"].copy_(torch.tensor([[1.0], [3.0]]))
        >>> averager = ReplicatedAverager(
        ...     model, lambda params, group: PeriodicModelAverager(4, process_group=group))
        >>> averager.average_parameters()
        >>> model.params["bias"].tolist()
        [[2.0], [2.0]]
    """

    def __init__(self, model: ReplicatedModel, make: Callable[[Any, Any], ModelAverager]) -> None:
        self._world = LocalWorld(model.count)
        # Averagers write to slices, which share memory with the stacked parameters.
        self._params = [
            [nn.Parameter(one.detach()[k]) for one in model.params.values()]
            for k in range(model.count)
        ]
        self._averagers = self._world.run(lambda group: make(self._params[group.rank()], group))

    def average_parameters(self) -> None:
        """Count a step of all replicas, and average if a mean is due."""
        self._world.run(
            lambda group: self._averagers[group.rank()].average_parameters(
                self._params[group.rank()]
            )
        )


def mean_of_slices(stacked: Tensor) -> Tensor:
    """Return the mean over the first dimension in new memory, added up in the order of ranks."""
    first, *others = (row.reshape(-1) for row in stacked.detach().clone())
    add_in_rank_order(first, 0, others, 1)
    mean: Tensor = first.div_(len(stacked)).view(stacked.shape[1:])
    return mean


def _repeated(tensor: Tensor, count: int) -> Tensor:
    return tensor.detach().expand(count, *tensor.shape).clone()
