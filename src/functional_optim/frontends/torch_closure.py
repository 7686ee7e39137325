"""Front-end for optimizers that evaluate the loss, such as TorchOptimizer(params, lbfgs())."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from functional_optim.core.closure_optimizer import (
    ClosureOptimizer,
    ClosureProblem,
    Point,
)
from functional_optim.core.dynamo import disable_compile
from functional_optim.core.flat_vector import add_direction, check_one_device, flatten_grads
from functional_optim.core.hyper import are_unchanged, copy_tensors
from functional_optim.core.interrupts import defer_interrupts
from functional_optim.core.lock import StepLock
from functional_optim.frontends.averaged_params import write_params
from functional_optim.frontends.checkpoint_names import check_numbers
from functional_optim.frontends.closure_interop import state_of_entries, torch_entries
from functional_optim.frontends.group_overlap import check_group_overlap
from functional_optim.frontends.torch_checkpoint import own_copy, require_state_dict
from functional_optim.frontends.torch_groups import (
    copy_option_tensors,
    options_of,
    require_options,
    with_checked_params,
)
from functional_optim.frontends.torch_optimizer import FOR_CLOSURES, TorchOptimizer


class TorchClosureOptimizer(TorchOptimizer):
    """A :class:`ClosureOptimizer` as a ``torch.optim.Optimizer`` with one parameter group.

    The state is stored in the entries of the first parameter, as in torch.optim.LBFGS, and is
    created in the first step. If the closure raises an error, parameters and state do not change.
    """

    _optimizer: ClosureOptimizer  # type: ignore[assignment]
    """With its hyper-parameters at construction."""

    @disable_compile
    def __init__(self, params: Iterable[Any], optimizer: Any) -> None:
        self._lock = StepLock()
        self._optimizer = optimizer
        torch.optim.Optimizer.__init__(self, params, copy_tensors(optimizer.hyper))

    def explain(self) -> str:
        """Return a description of the step, in one line."""
        params = self._params()
        name, numel = self._optimizer.rule.name, sum(param.numel() for param in params)
        return (
            f"{len(params)} parameters, {numel} elements on {params[0].device}, as one flat "
            f"vector: {name}, by operations of torch"
        )

    @disable_compile
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the only group; raise ValueError for a second one."""
        name = self._optimizer.rule.name
        if self.param_groups:
            raise ValueError(
                f"{name} takes one parameter group, since it steps one flat vector of all "
                "parameters; put them all into one group"
            )
        group: Any = param_group
        if isinstance(group, dict) and "params" in group:
            require_options(group, self._optimizer.hyper)
            self._optimizer.replace(**{**self.defaults, **self._group_options(group)})
            param_group = with_checked_params(group, ())
            check_group_overlap([param_group])
        torch.optim.Optimizer.add_param_group(self, param_group)
        try:
            params = self._params()
            check_one_device([f"params[{place}]" for place in range(len(params))], params)
        except ValueError:
            self.param_groups.pop()
            raise
        copy_option_tensors(self.param_groups[0])

    def step(
        self, closure: Callable[[], Any] | None = None, *, extra: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one step, with as many evaluations as the algorithm needs.

        Args:
            closure: clears gradients, evaluates the model, calls ``backward`` and returns the loss.
            extra: must be None.

        Returns:
            The loss before the step.

        Raises:
            TypeError: no closure; ``extra``.
            ValueError: an option of the group that is out of bounds.
        """
        name = self._optimizer.rule.name
        if extra:
            raise TypeError(f"{name} takes only the loss, so extra= must be empty")
        if not callable(closure):
            raise TypeError(
                f"{name} evaluates the loss several times in a step: write step(closure), with a "
                "function that clears the gradients, calls loss.backward() and returns the loss"
            )
        return self._step_locked(closure)

    @disable_compile
    def _step_locked(self, closure: Callable[[], Any]) -> Any:
        # Two steps must not alternate: each evaluation needs the parameters that its step wrote.
        with self._lock.lock, torch.no_grad():
            return self._step_with(closure)

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        own, params = self._current(), self._params()
        before = [param.detach().clone() for param in params]

        def evaluate(point: Point) -> tuple[float, Tensor]:
            write_params(params, point)
            with torch.enable_grad():
                loss = closure()
            return float(loss), _gradient_of(params)

        def read(point: Point) -> Point:
            return [param.detach().clone() for param in params]

        try:
            with torch.enable_grad():  # at the current parameters
                first = closure()
            after, state = own.rule.step(
                ClosureProblem(evaluate, add_direction, read),
                read(before),
                float(first),
                _gradient_of(params),
                self._read(),
                own.values,
            )
        except BaseException:
            defer_interrupts(write_params, params, before)
            raise
        self._lock.run(self._finish, params, after, state)
        return first

    def _finish(self, params: list[Tensor], after: Point, state: Any) -> None:
        write_params(params, after)
        self.state[params[0]] = torch_entries(state)

    @disable_compile
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a checkpoint of this class or of the equivalent torch.optim class.

        Raises:
            TypeError: no dict.
            ValueError: no state dict of an optimizer; groups, names or the order of parameters
                differ; a number stands for two parameters, or has state and is in no group; or the
                state is of parameters of another size. Nothing has changed.
        """
        require_state_dict(state_dict)
        self._check_names(state_dict)
        check_numbers(state_dict["state"], state_dict["param_groups"], self.param_groups)
        before = (self.state, self.param_groups)
        try:
            torch.optim.Optimizer.load_state_dict(self, own_copy(state_dict))
            self._current()
            state = self._read()
        except Exception:
            self.state, self.param_groups = before
            raise
        if self._params()[0] in self.state:
            self.state[self._params()[0]] = torch_entries(state)

    def _check_names(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError if names differ in order, since flat vectors have that order."""
        saved = [group.get("param_names") for group in state_dict["param_groups"][:1]]
        own = self.param_groups[0].get("param_names")
        if own and saved and saved[0] and list(saved[0]) != list(own):
            pairs = zip(saved[0], own, strict=False)
            differing = next((pair for pair in pairs if pair[0] != pair[1]), ())
            raise ValueError(
                "the checkpoint is of parameters with other names, or in another order "
                f"({' instead of '.join(differing) or 'their number differs'}), and the state is "
                "one flat vector in their order"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {
            **torch.optim.Optimizer.__getstate__(self),
            "_optimizer": self._optimizer,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)
        self._lock = StepLock()

    def _viewed(self) -> list[Tensor]:
        return self._params()

    def _params(self) -> list[Tensor]:
        return cast("list[Tensor]", self.param_groups[0]["params"])

    def _read(self) -> Any:
        params = self._params()
        return state_of_entries(self._optimizer, self.state.get(params[0], {}), params)

    def _group_options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        names = self._optimizer.hyper
        return {name: value for name, value in options_of(group).items() if name in names}

    def _current(self) -> ClosureOptimizer:
        """Return the optimizer with the current options of the group."""
        options = self._group_options(self.param_groups[0])
        missing = self._optimizer.hyper.keys() - options
        if missing:
            raise ValueError(f"the parameter group has no {', '.join(sorted(missing))}")
        known = self._optimizer.hyper
        if are_unchanged(list(known.values()), [options[name] for name in known]):
            return self._optimizer
        return self._optimizer.replace(**options)


def _gradient_of(params: list[Tensor]) -> Tensor:
    return flatten_grads(params, [param.grad for param in params])


FOR_CLOSURES.append(TorchClosureOptimizer)
