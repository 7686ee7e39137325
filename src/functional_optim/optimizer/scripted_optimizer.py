"""ScriptedOptimizer: the result of ``optimizer.script(params)``, with one TorchScript program."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.aliasing import clone_aliased
from functional_optim.core.chain import Chain, require_one_dense_chain, with_hyper
from functional_optim.core.checks import (
    check_count,
    check_grad,
    check_leaf_state,
    check_writable,
    check_writable_state,
    detach_states,
)
from functional_optim.core.dynamo import disable_compile, disable_compile_of_class
from functional_optim.core.graph_capture import check_not_captured
from functional_optim.core.hyper import is_plain
from functional_optim.core.leaf import is_measured
from functional_optim.core.links import Links
from functional_optim.core.local_shards import check_no_dtensor
from functional_optim.core.lock import StepLock, with_lock
from functional_optim.core.overrides import shape_of
from functional_optim.core.selectors import Shape
from functional_optim.core.stage import Link
from functional_optim.core.state import LeafState, State, map_state, state_tensors
from functional_optim.core.tree import Path, leaf_states, path_name
from functional_optim.core.views import has_other_strides, real_view
from functional_optim.kernels import ReferenceExecutor
from functional_optim.optimizer.torchscript import compile_program, run_unfused
from functional_optim.plan import item_steps
from functional_optim.plan.item import Item
from functional_optim.plan.tree import initial_state, params_of


@disable_compile_of_class
class ScriptedOptimizer:
    """A chain bound to its parameters, with the interface of torch's functional optimizers.

    ``optimizer.script(params)`` returns it. ``module`` is a ScriptModule with parameters, state and
    hyper-parameters. It can be saved by ``torch.jit.save`` and called from other TorchScript, and
    runs without the GIL. It calls each stage for each parameter, with new memory for each
    operation.

    The methods of this class check their arguments, then call ``module``. Several threads may call
    them: they run one after the other. Ctrl-C waits until a step is complete. If you call
    ``module`` directly, there is no lock, and Ctrl-C does not wait.

    Example::

        >>> import torch
        >>> from functional_optim import sgd
        >>> params = [torch.ones(2), torch.ones(3)]
        >>> scripted = sgd(lr=0.5).script(params)
        >>> scripted.step([torch.ones(2), None])
        >>> scripted.step_param(params[1], torch.ones(3))
        >>> params
        [tensor([0.5000, 0.5000]), tensor([0.5000, 0.5000, 0.5000])]
    """

    def __init__(
        self,
        optimizer: Chain,
        firsts: Sequence[tuple[Path, Shape]],
        group_of: Sequence[int],
        params: Sequence[Tensor],
        states: Sequence[LeafState],
        names: Sequence[str],
        state: State,
    ) -> None:
        self._lock = StepLock()
        self.params = list(params)
        """The parameters. ``step`` takes gradients in the same order."""
        self.state = state
        """The state, which steps change in place."""
        self._optimizer = optimizer
        self._firsts = firsts
        """The path and shape of the first parameter of each group. Groups differ in overrides."""
        self._groups = self._groups_of(optimizer)
        self._group_of = list(group_of)
        self._states = list(states)
        self._names = list(names)
        states_of = [one for leaf in self._states for one in state_tensors(leaf.stages)]
        self._written = [*self.params, *states_of]
        self._on_cuda = [param for param in self.params if param.is_cuda][:1]
        self._index = {id(param): i for i, param in enumerate(self.params)}
        self._stages = tuple(optimizer.stages)
        self._as_gradient = any(stage.as_gradient for stage in self._stages)
        self._check_plain(self._groups)
        fields = [
            [map_state(real_view, one.stages[i]) for one in self._states]
            for i, stage in enumerate(self._stages)
            if stage.stateful
        ]
        self.module: Any = compile_program(
            self._stages,
            self.params,
            [one.step for one in self._states],
            self._group_of,
            *fields,
            *self._hypers(),
        )

    @with_lock
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Step all parameters that have a gradient. None skips a parameter and its state.

        Raises:
            ValueError: the number of gradients is wrong, or a gradient has another shape, dtype or
                device.
        """
        check_count(gradients, len(self.params))
        check_not_captured(self._on_cuda)
        in_python = False
        for param, grad, name in zip(self.params, gradients, self._names, strict=True):
            if grad is not None:
                check_grad(param, grad, name)
                in_python = in_python or self._needs_python(param, grad)
        gradients = clone_aliased(gradients, self._written)
        if in_python:
            self._step_in_python(gradients)
        else:
            run_unfused(self._on_cuda, self.module.step, list(gradients))

    @with_lock
    def step_param(self, param: Tensor, gradient: Tensor | None) -> None:
        """Step one parameter. Do nothing if its gradient is None.

        Raises:
            ValueError: the parameter is not in the program, the gradient does not fit, or the chain
                needs all gradients at once.
        """
        if id(param) not in self._index:
            raise ValueError(
                f"this parameter (shape {tuple(param.shape)}) is none of the {len(self.params)} "
                "that this program was made for"
            )
        measured = [stage.name for stage in self._stages if is_measured(stage)]
        if measured:
            raise ValueError(
                f"{measured[0]} needs the gradients of all parameters at once: use step(gradients)"
            )
        if gradient is None:
            return
        check_not_captured(self._on_cuda)
        check_grad(param, gradient, self._names[self._index[id(param)]])
        if self._needs_python(param, gradient):
            gradients: list[Tensor | None] = [None] * len(self.params)
            gradients[self._index[id(param)]] = gradient
            self._step_in_python(gradients)
        else:
            run_unfused(self._on_cuda, self.module.step_param, param, gradient)

    @with_lock
    def set_hyper(self, **hyper: Any) -> None:
        """Change hyper-parameters, by name, from the next step on. Overrides keep their values.

        Raises:
            TypeError: a name that the chain does not have, or a value that is not a number.
            ValueError: a value out of bounds, or an option that needs other state.
        """
        optimizer = with_hyper(self._optimizer, hyper)
        groups = self._groups_of(optimizer)
        self._check_plain(groups)
        for param, state, group, name in zip(
            self.params, self._states, self._group_of, self._names, strict=True
        ):
            hypers = [link.hyper for link in groups[group]]
            check_leaf_state(self._stages, hypers, param, state, name)
        self._optimizer, self._groups = optimizer, groups
        self.module.set_hypers(*self._hypers())

    def explain(self) -> str:
        """Return how the program steps its parameters."""
        return "one TorchScript program, with new memory for each operation"

    def _groups_of(self, optimizer: Chain) -> list[Links]:
        hypers = [optimizer.hypers_at(path, shape) for path, shape in self._firsts]
        return [tuple(map(Link, optimizer.stages, one)) for one in hypers]

    def _hypers(self) -> list[list[Any]]:
        every = [[links[i].hyper for links in self._groups] for i in range(len(self._stages))]
        return [[hyper or () for hyper in one] for one in every]  # a program has no empty record

    @staticmethod
    def _check_plain(groups: Sequence[Links]) -> None:
        for links in groups:
            for stage, hyper, *_ in links:
                if not is_plain(hyper):
                    raise TypeError(
                        f"{stage.name} has a hyper-parameter that is not a number ({hyper}); a "
                        "TorchScript program holds numbers: give one, and change it before a step "
                        "by set_hyper"
                    )

    def _needs_python(self, param: Tensor, grad: Tensor) -> bool:
        """Return True if the program cannot step a gradient: it is sparse, or has odd strides."""
        if grad.layout != torch.strided:
            return True
        return self._as_gradient and has_other_strides(param, grad)

    def _step_in_python(self, gradients: Sequence[Tensor | None]) -> None:
        """Step with the reference executor, which supports sparse gradients."""
        hypers = [tuple(link.hyper for link in links) for links in self._groups]
        items = [
            Item(param, grad, state, hypers[group], name)
            for param, grad, state, group, name in zip(
                self.params, gradients, self._states, self._group_of, self._names, strict=True
            )
            if grad is not None
        ]
        item_steps.update_(self._stages, ReferenceExecutor(), items)


@disable_compile
def build_scripted(optimizer: Chain, params: Any, state: State | None) -> ScriptedOptimizer:
    """Return an optimizer bound to a tree of parameters, as :meth:`Optimizer.script` does."""
    require_one_dense_chain(optimizer, "script")
    leaves, spec, paths = params_of(optimizer, params)
    with torch.no_grad():
        state = initial_state(optimizer, params) if state is None else state
    states = leaf_states(spec, state)
    hypers = optimizer.hypers_for(params)
    kept = [i for i, leaf in enumerate(leaves) if leaf is not None]
    names = [path_name(paths[i]) for i in kept]
    check_no_dtensor({path_name(paths[i]): leaves[i] for i in kept}, "a TorchScript program")
    check_writable({path_name(paths[i]): leaves[i] for i in kept})
    for i, name in zip(kept, names, strict=True):
        check_leaf_state(optimizer.stages, hypers[i], leaves[i], states[i], name)
    check_writable_state({name: states[i] for i, name in zip(kept, names, strict=True)})
    detach_states(states[i] for i in kept)
    firsts: dict[int, int] = {}
    for i in kept:
        firsts.setdefault(id(hypers[i]), i)
    numbers = {key: number for number, key in enumerate(firsts)}
    return ScriptedOptimizer(
        optimizer,
        [(paths[i], shape_of(leaves[i])) for i in firsts.values()],
        [numbers[id(hypers[i])] for i in kept],
        [leaves[i] for i in kept],
        [states[i] for i in kept],
        names,
        state,
    )
