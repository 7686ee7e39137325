"""Optimizer: a chain of stages over any pytree of parameters. Frozen; all state is handed in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.capturing import check_not_captured
from functional_optim.core.chain import Chain, with_hyper
from functional_optim.core.checks import check_measured
from functional_optim.core.compiling import uncompiled
from functional_optim.core.interrupts import defer_interrupts
from functional_optim.core.links import has_gates
from functional_optim.core.state import State
from functional_optim.kernels import check_executor
from functional_optim.optimizer.bound import BoundOptimizer
from functional_optim.optimizer.capturable import CapturableOptimizer
from functional_optim.optimizer.explain import explain
from functional_optim.optimizer.scripted import ScriptedOptimizer, build_scripted
from functional_optim.plan import leaf_by_leaf, tree_steps
from functional_optim.plan.decision import Decision
from functional_optim.plan.items import check_in_place, initial_state
from functional_optim.plan.leaf_inputs import of_tree
from functional_optim.plan.shared_numbers import shared_by_name


@dataclass(frozen=True, eq=False, repr=False)
class Optimizer(Chain):
    """A chain of transforms and rules, with their hyper-parameters. Made by :func:`chain`.

    It holds no parameter and no state, so one optimizer serves any number of trees, and can be
    hashed, compared, pickled and shared between threads.

    Params, gradients and state are pytrees (of optree): nested dicts, lists, NamedTuples, nodes
    registered with optree in ``namespace``, ``dict(module.named_parameters())``, or one tensor.
    None may stand for a parameter, and for a gradient that is missing: that leaf and its state,
    step count included, are then left alone.

    Example::

        >>> import torch
        >>> from functional_optim import adamw, chain, clip_by_global_norm
        >>> optimizer = chain(clip_by_global_norm(1.0), adamw(lr=0.1))
        >>> params = {"w": torch.ones(2), "b": None}
        >>> state = optimizer.init(params)
        >>> params, state = optimizer.update(params, {"w": torch.ones(2), "b": None}, state)
        >>> params, state = optimizer.update(params, {"w": None, "b": None}, state, lr=0.2)
        >>> int(state.leaves["w"].step)
        1
    """

    def using(self, *, executor: str | None = None, namespace: str | None = None) -> "Optimizer":
        """A new optimizer, run by another executor or over nodes of another optree namespace.

        Args:
            executor: ``auto``, the default, takes the fastest kernels that have the reference's
                bits; ``reference`` steps leaf by leaf, in Python. So they do in every door.
            namespace: of optree.

        Raises:
            ValueError: an executor that does not exist.
        """
        if executor is not None:
            check_executor(executor)
        return replace(
            self,
            executor=self.executor if executor is None else executor,
            namespace=self.namespace if namespace is None else namespace,
        )

    def init(self, params: Any) -> State:
        """The state before the first step: complete, for every parameter.

        Where a rule's state starts from the parameter, or from ``lr``, it is differentiable, as
        ``update`` is.

        Args:
            params: a pytree of dense floating or complex tensors, or None.

        Returns:
            A :class:`~functional_optim.State` whose ``leaves`` mirror ``params``.

        Raises:
            TypeError: a leaf that is no tensor.
            ValueError: no tensor at all, one tensor at two places, an integer or sparse parameter;
                an override that is meant for no leaf.
        """
        return initial_state(self, params)

    def update(
        self,
        params: Any,
        grads: Any,
        state: State,
        *,
        measured: Sequence[Tensor] = (),
        extra: Mapping[str, Any] | None = None,
        **hyper: Any,
    ) -> tuple[Any, State]:
        """Step as a pure function: no argument changes.

        It is differentiable: where no derivative is wanted, call it under ``torch.no_grad()``, or
        the graph of each step is kept. torch.func goes through it; torch.compile and torch.export
        trace it, by the reference, as one graph for every step. Where a gate looks at numbers
        (``accumulate``, ``apply_if_finite``, ``sam``), torch.compile runs it as it is, with a
        graph break, and with ``fullgraph=True`` says that it cannot be traced.

        Args:
            params: a pytree of parameters.
            grads: the same tree with a gradient, or None, in place of each parameter.
            state: what ``init`` or the last ``update`` returned.
            measured: for chains with measured stages, their totals where other shards or ranks
                have a part in them (see :meth:`measure`); otherwise summed over ``grads``.
            extra: inputs beside the gradients, by name, where a stage needs them: what belongs to
                no leaf, such as the loss, or what is a tensor for each leaf, such as an estimate of
                the Hessian's diagonal. That is a tree like ``params``, with None where there is no
                gradient; where no stage takes it, it is not looked at. It is for this step, and
                not kept; behind ``accumulate`` or ``sam`` it is given in the call that steps.
            hyper: hyper-parameters for this step only. What torch.compile makes of the step has one
                that changes as an input.

        Returns:
            ``(params, state)`` after the step. Leaves without a gradient are the same objects.

        Raises:
            TypeError: an unknown hyper-parameter, or a gradient that is no tensor.
            ValueError: trees that differ; a gradient of another shape, dtype or device; a state
                of another optimizer or tree; a value out of bounds; an input that does not fit, or
                is missing. Each names the leaf.
            RuntimeError: a sparse gradient that the chain cannot take; a derivative that a stage
                does not have (``stored``), if torch.func follows an argument, or autograd one that
                is no parameter; a CUDA graph is being captured.
        """
        optimizer = with_hyper(self, hyper) if hyper else self
        given, extra = (params, grads, state), extra or {}
        is_traced = torch.compiler.is_compiling()
        made = None if is_traced else tree_steps.step(optimizer, given, measured, extra)
        if made is not None:
            return made
        if is_traced and has_gates(self.links):
            return self._gates_are_not_traced(optimizer, *given, measured, extra)
        return self._update(optimizer, *given, measured, extra)

    def _update(self, optimizer: Chain, *given: Any) -> tuple[Any, State]:
        """The pure step of a tree for which there is no plan."""
        made, leaves, decided = leaf_by_leaf.update(optimizer, *given)
        if not torch.compiler.is_compiling():
            tree_steps.plan(optimizer, given[:3], leaves, in_place=False)
            tree_steps.learn(optimizer, given[:3], leaves, decided, in_place=False)
        return made

    @uncompiled
    def _gates_are_not_traced(self, optimizer: Chain, *given: Any) -> tuple[Any, State]:
        """Run a step of an optimizer with gates outside of torch.compile's graph."""
        return self._update(optimizer, *given)

    @uncompiled
    def update_(
        self,
        params: Any,
        grads: Any,
        state: State,
        *,
        measured: Sequence[Tensor] = (),
        extra: Mapping[str, Any] | None = None,
        **hyper: Any,
    ) -> None:
        """Make the step of :meth:`update` in the tensors of ``params`` and ``state``.

        Gradients are not changed, and no memory that was allocated outlives the call: what is kept
        for the next step holds no tensor of the tree. It runs without autograd, is not traced, and
        detaches what :meth:`init` computed from the parameters.
        A gradient may be another parameter: it is read before that is written. Arguments and errors
        as for :meth:`update`; all are raised before anything is written. Ctrl-C waits for the step:
        all leaves are stepped and counted then, or none. Several threads must not step the same
        tensors at once.
        """
        optimizer = with_hyper(self, hyper) if hyper else self
        given, extra = (params, grads, state), extra or {}
        if not tree_steps.step_(optimizer, given, measured, extra):
            defer_interrupts(self._update_, optimizer, given, measured, extra)

    def _update_(
        self,
        optimizer: "Optimizer",
        given: tuple[Any, Any, State],
        measured: Sequence[Tensor],
        extra: Mapping[str, Any],
    ) -> None:
        """The step in place of a tree for which there is no plan."""
        leaves, spec, _, read = leaf_by_leaf.step_leaves(optimizer, *given)
        stepped = read.stepped
        check_in_place(leaves, spec, stepped)
        check_not_captured(leaf.param for leaf in stepped)
        planned = tree_steps.plan(optimizer, given, read, in_place=True)
        if planned and tree_steps.step_(optimizer, given, measured, extra):
            return
        found = read.with_gradients_apart()
        extra = of_tree(optimizer.links, spec, found.leaves, extra)
        executor = found.executor(optimizer)
        shared = given[2].shared
        with torch.no_grad():
            decided = leaf_by_leaf.decide(optimizer.links, executor, found, shared, measured, extra)
        leaf_by_leaf.bound(executor, decided, shared)()
        tree_steps.learn(optimizer, given, found, decided, in_place=True)

    def view(self, params: Any, state: State) -> Any:
        """The parameters to evaluate with: those that an average, say, has come to.

        A pure function beside the step, never a mode: training goes on with ``params``, and
        checkpoints hold both. Of an optimizer none of whose stages has such a view it is
        ``params``.

        Args:
            params: a pytree of parameters, as the last step has left them.
            state: likewise.

        Returns:
            The same tree; it may share memory with ``params`` and ``state``.

        Raises:
            ValueError: a state of another optimizer or tree.

        Example::

            >>> import torch
            >>> from functional_optim import chain, ema, sgd
            >>> optimizer = chain(sgd(lr=1.0), ema(0.5))
            >>> params, state = optimizer.update(
            ...     torch.ones(1), torch.ones(1), optimizer.init(torch.ones(1)))
            >>> params, optimizer.view(params, state)
            (tensor([0.]), tensor([0.5000]))
        """
        return leaf_by_leaf.view(self, params, state)

    def shared(self, state: State) -> dict[str, Any]:
        """The numbers in a state that belong to no leaf, by the name of the stage that keeps them.

        Args:
            state: of this optimizer.

        Returns:
            For each such stage a NamedTuple of floats; an empty dict where none keeps any.

        Raises:
            ValueError: a state of another optimizer.

        Example::

            >>> import torch
            >>> from functional_optim import apply_if_finite, chain, sgd
            >>> optimizer = chain(apply_if_finite(3), sgd())
            >>> optimizer.shared(optimizer.init(torch.zeros(1)))["apply_if_finite"].skipped
            0.0
        """
        return shared_by_name(self.links, state.shared)

    def measure(
        self,
        params: Any,
        grads: Any,
        state: State,
        *,
        measured: Sequence[Tensor] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """The sum that a measured stage needs, over the gradients at hand.

        To step a part of a tree (a shard, the parameters of one rank) by the norm of all of it:
        add up every part's ``measure``, and hand the total to each part's ``update``.

        Args:
            measured: the totals of the measured stages before the one that is asked for.
            extra: as for the step that is to be made.

        Returns:
            A 0-d float64 tensor; a vector for a stage that needs several sums.

        Raises:
            ValueError: the chain has no such stage.

        Example::

            >>> import torch
            >>> from functional_optim import chain, clip_by_global_norm, sgd
            >>> optimizer = chain(clip_by_global_norm(1.0), sgd())
            >>> params = torch.zeros(2)
            >>> optimizer.measure(params, torch.tensor([3.0, 4.0]), optimizer.init(params))
            tensor(25., dtype=torch.float64)
        """
        check_measured(self.stages, measured, asked=1)
        _, spec, _, found = leaf_by_leaf.step_leaves(self, params, grads, state)
        given = of_tree(self.links, spec, found.leaves, extra or {})
        leaf_by_leaf.check_extra(self.links, given)
        executor = found.executor(self)
        return Decision(self.links, executor, found, state.shared, measured, given).total()

    def script(self, params: Any, state: State | None = None) -> ScriptedOptimizer:
        """This optimizer bound to parameters, as one TorchScript program.

        Args:
            params: a pytree of parameters; ``step`` takes their gradients as a flat list, in the
                order of :func:`functional_optim.leaf_paths`, None leaves left out.
            state: where to go on from; by default ``init(params)``. It is stepped in place.

        Returns:
            An object with ``step(gradients)`` and ``step_param(param, gradient)``.

        Raises:
            TypeError: a hyper-parameter that is a tensor or a schedule.
            TypeError, ValueError: as for :meth:`init`; a state of another tree.
        """
        return build_scripted(self, params, state)

    def bind(
        self, params: Any, state: State | None = None, *, capturable: bool = False
    ) -> BoundOptimizer:
        """This optimizer bound to parameters, in flat buffers: the fastest way to step them.

        The model is saved as before, whole or in part: each parameter has a storage of its own.

        Args:
            params: a pytree of parameters. They stay the same objects, in other memory.
            state: where to go on from; by default ``init(params)``, from the values that
                parameters have now: load weights before. Its values are copied.
            capturable: whether CUDA graphs may capture its steps: see :class:`CapturableOptimizer`.

        Returns:
            An object with ``step(grads)``, ``state``, ``gradients`` and ``explain()``.

        Raises:
            TypeError, ValueError: as for :meth:`init`; a state of another tree; with
                ``capturable``, something that takes Python's numbers at each step.

        Example::

            >>> import torch
            >>> from functional_optim import sgd
            >>> params = {"w": torch.ones(2), "b": torch.ones(1)}
            >>> bound = sgd(lr=0.5).bind(params)
            >>> bound.step({"w": torch.ones(2), "b": None})
            >>> params
            {'w': tensor([0.5000, 0.5000]), 'b': tensor([1.])}
        """
        return (CapturableOptimizer if capturable else BoundOptimizer)(self, params, state)

    def explain(self, params: Any) -> str:
        """Describe how the executor steps these parameters, and why; ``auto`` may compile a loop.

        Where parameters differ in their stages, as in a partition, the lines about a chain stand
        below it. Of a chain with gates, they are about a step in which all are open.

        Raises:
            TypeError: an optimizer that steps by a closure.
            ValueError: parameters that the optimizer does not accept.

        Example::

            >>> import torch
            >>> from functional_optim import adamw
            >>> print(adamw().using(executor="blocked").explain([torch.ones(3), torch.ones(2)]))
            2 parameters, 5 elements of torch.float32 on cpu, together: foreach
        """
        return explain(self, params)
