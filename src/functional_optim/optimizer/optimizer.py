"""Optimizer: a frozen chain of stages for any pytree of parameters. State is an argument."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.chain import Chain, with_hyper
from functional_optim.core.checks import check_measured
from functional_optim.core.dynamo import disable_compile
from functional_optim.core.links import has_gates
from functional_optim.core.state import State
from functional_optim.kernels import check_executor
from functional_optim.optimizer.bound import BoundOptimizer
from functional_optim.optimizer.capturable import CapturableOptimizer
from functional_optim.optimizer.explain import explain
from functional_optim.optimizer.scripted_optimizer import ScriptedOptimizer, build_scripted
from functional_optim.plan import leaf_by_leaf, tree_steps
from functional_optim.plan.decision import Decision
from functional_optim.plan.leaf_inputs import flatten_inputs
from functional_optim.plan.shared_numbers import shared_by_name
from functional_optim.plan.tree import initial_state


@dataclass(frozen=True, eq=False, repr=False)
class Optimizer(Chain):
    """A chain of transforms and rules with their hyper-parameters, as :func:`chain` returns it.

    It contains no parameter and no state. So one optimizer can step any number of trees, and can be
    hashed, compared, pickled and shared between threads.

    Params, gradients and state are pytrees (of optree): nested dicts, lists, NamedTuples, nodes
    registered with optree in ``namespace``, ``dict(module.named_parameters())``, or one tensor. A
    parameter or a gradient may be None. Then the leaf is skipped, and its state and step count do
    not change.

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
        """Return the optimizer with another executor, or another namespace of optree.

        Args:
            executor: the name of the executor, for all front-ends. ``auto``, the default, uses the
                fastest kernels with the bits of ``reference``; ``reference`` steps leaf by leaf, in
                Python.
            namespace: the optree namespace of your own node types.

        Raises:
            ValueError: there is no such executor.
        """
        if executor is not None:
            check_executor(executor)
        return replace(
            self,
            executor=self.executor if executor is None else executor,
            namespace=self.namespace if namespace is None else namespace,
        )

    def init(self, params: Any) -> State:
        """Return the state before the first step, for every parameter.

        State that depends on a parameter, or on ``lr``, is differentiable.

        Args:
            params: a pytree of dense floating or complex tensors, or None.

        Returns:
            A :class:`~functional_optim.State` whose ``leaves`` are a tree like ``params``.

        Raises:
            TypeError: a leaf is not a tensor.
            ValueError: there is no tensor, a tensor occurs twice, a parameter is integer or sparse,
                or an override matches no leaf.
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
        """Return parameters and state after a step. No argument changes.

        The step is differentiable, also with torch.func. If you need no derivatives, call it under
        ``torch.no_grad()``, because autograd otherwise keeps the graph of each step. torch.compile
        and torch.export trace the ``reference`` executor, as one graph for all steps. The gates
        ``accumulate``, ``apply_if_finite`` and ``sam`` depend on values, so with them torch.compile
        makes a graph break, and raises an error for ``fullgraph=True``.

        Args:
            params: a pytree of parameters.
            grads: a tree like ``params``, with a gradient or None for each parameter.
            state: the result of ``init`` or of the last ``update``.
            measured: the totals of measured stages, if other shards or ranks contribute to them
                (see :meth:`measure`); by default, totals are sums over ``grads``.
            extra: inputs besides gradients, by name, if a stage needs them. An input is one value,
                such as the loss, or a tree like ``params``, such as an estimate of the Hessian's
                diagonal, with None for leaves without gradient. Inputs are not stored:
                with ``accumulate`` or ``sam``, pass them in the call that changes the parameters.
            hyper: hyper-parameters for this step only. In a compiled step, a hyper-parameter that
                changes is an input of the graph.

        Returns:
            ``(params, state)`` after the step. Leaves without a gradient are the same objects.

        Raises:
            TypeError: an unknown hyper-parameter or input, a missing input, or a gradient that is
                not a tensor.
            ValueError: trees differ; a gradient has another shape, dtype or device; the state is of
                another optimizer or tree; a value is out of bounds; an input does not fit. The
                error names the leaf.
            RuntimeError: the chain does not support a sparse gradient; a stage such as ``stored``
                has no derivative, and torch.func follows an argument, or autograd follows an
                argument that is not a parameter; a CUDA graph is being captured.
        """
        optimizer = with_hyper(self, hyper) if hyper else self
        given, extra = (params, grads, state), extra or {}
        is_traced = torch.compiler.is_compiling()
        made = None if is_traced else tree_steps.step(optimizer, given, measured, extra)
        if made is not None:
            return made
        if is_traced and has_gates(self.links):
            return self._gates_are_not_traced(optimizer, given, measured, extra)
        return tree_steps.update(optimizer, given, measured, extra)

    @disable_compile
    def _gates_are_not_traced(self, optimizer: Chain, *given: Any) -> tuple[Any, State]:
        """Run a step of an optimizer with gates outside of torch.compile's graph."""
        return tree_steps.update(optimizer, *given)

    @disable_compile
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
        """Run the step of :meth:`update` in the tensors of ``params`` and ``state``.

        Gradients do not change, and the plan for later steps keeps no tensor. The step runs without
        autograd, is not traced, and detaches state that :meth:`init` computed from the parameters.
        A gradient may be another parameter: it is read before this parameter is written. Parameters
        that share memory are refused, since ``update`` would return separate values for them.

        Arguments and errors are those of :meth:`update`. Errors are raised before anything is
        written. Ctrl-C waits for the step, so all leaves are stepped and counted, or none. Several
        threads must not step the same tensors at the same time.
        """
        optimizer = with_hyper(self, hyper) if hyper else self
        tree_steps.update_(optimizer, (params, grads, state), measured, extra or {})

    def view(self, params: Any, state: State) -> Any:
        """Return the parameters to evaluate with, such as the averages of ``ema``.

        This is a pure function: training continues with ``params``. If no stage has a view, the
        result is ``params``.

        Args:
            params: the pytree of parameters after the last step.
            state: the state after the last step.

        Returns:
            A tree like ``params``. It may share memory with ``params`` and ``state``.

        Raises:
            ValueError: the state is of another optimizer or tree.

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
        """Return the shared scalars in a state, by the name of their stage.

        Args:
            state: of this optimizer.

        Returns:
            A NamedTuple of floats for each stage with shared scalars.

        Raises:
            ValueError: the state is of another optimizer.

        Example::

            >>> import torch
            >>> from functional_optim import apply_if_finite, chain, sgd
            >>> optimizer = chain(apply_if_finite(3), sgd())
            >>> optimizer.shared(optimizer.init(torch.zeros(1)))["apply_if_finite"].skipped
            0.0
        """
        return shared_by_name(self, state.shared)

    def measure(
        self,
        params: Any,
        grads: Any,
        state: State,
        *,
        measured: Sequence[Tensor] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Return the sum that the next measured stage needs, over the given gradients.

        Use it to step parts of a tree (shards, or the parameters of a rank) with totals of the
        whole tree: add up the ``measure`` of all parts, and pass the total to each ``update``.

        Args:
            params, grads, state: of a part of the tree.
            measured: the totals of earlier measured stages.
            extra: as for :meth:`update`.

        Returns:
            A 0-d float64 tensor, or a vector if the stage needs several sums.

        Raises:
            ValueError: the chain has no further measured stage.

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
        given = flatten_inputs(self.links, spec, found.leaves, extra or {})
        leaf_by_leaf.check_extra(self.links, given)
        executor = found.executor(self)
        return Decision(self.links, executor, found, state.shared, measured, given).total()

    def script(self, params: Any, state: State | None = None) -> ScriptedOptimizer:
        """Return a TorchScript program that steps these parameters.

        Args:
            params: a pytree of parameters. ``step`` takes their gradients as a flat list, in the
                order of :func:`functional_optim.leaf_paths`, without None leaves.
            state: the state before the first step; by default ``init(params)``. Steps change it.

        Returns:
            An object with ``step(gradients)`` and ``step_param(param, gradient)``.

        Raises:
            TypeError: a hyper-parameter is a tensor or a schedule.
            TypeError, ValueError: as for :meth:`init`; the state is of another tree.
        """
        return build_scripted(self, params, state)

    def bind(
        self, params: Any, state: State | None = None, *, capturable: bool = False
    ) -> BoundOptimizer:
        """Bind parameters in flat buffers, which is the fastest way to step many parameters.

        Parameters can be saved as before, together or separately: each has its own storage.

        Args:
            params: a pytree of parameters. They stay the same objects, in other memory.
            state: the state before the first step, which is copied; by default ``init(params)``,
                so load weights before.
            capturable: True if CUDA graphs may capture steps: see :class:`CapturableOptimizer`.

        Returns:
            An object with ``step(grads)``, ``state``, ``gradients`` and ``explain()``.

        Raises:
            TypeError, ValueError: as for :meth:`init`; parameters share memory; the state is of
                another tree; with ``capturable``, a stage or schedule needs Python numbers in each
                step.

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

        If parameters differ in their stages, as in a partition, there is a heading for each chain.
        If a chain has gates, the lines are about a step in which all are open.

        Raises:
            TypeError: the optimizer needs a closure.
            ValueError: the optimizer does not accept the parameters.

        Example::

            >>> import torch
            >>> from functional_optim import adamw
            >>> print(adamw().using(executor="blocked").explain([torch.ones(3), torch.ones(2)]))
            2 parameters, 5 elements of torch.float32 on cpu, together: foreach
        """
        return explain(self, params)
