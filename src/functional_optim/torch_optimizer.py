"""The local front-end: a torch.optim.Optimizer whose mathematics is any chain."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from functional_optim import engine
from functional_optim.checks import check_param, check_writable
from functional_optim.executors import EXECUTORS
from functional_optim.initial import init_leaf
from functional_optim.links import Links, with_values
from functional_optim.optimizer import Optimizer
from functional_optim.state import LeafState
from functional_optim.torch_state import from_entries, to_entries, torch_step


class TorchOptimizer(torch.optim.Optimizer):
    """An :class:`~functional_optim.Optimizer` where torch wants a ``torch.optim.Optimizer``.

    Parameter groups carry the chain's hyper-parameters under their names, so learning-rate
    schedulers, per-group options, closures, hooks, GradScaler and checkpoints work as they do for
    torch's own classes. State is complete from construction on, and a checkpoint of the
    equivalent torch.optim class loads.

    Args:
        params: an iterable of parameters, of (name, parameter) pairs, or of dicts with "params"
            and the hyper-parameters that differ for that group.
        optimizer: the chain, with the defaults for all groups.

    Raises:
        TypeError: ``params`` is no iterable of tensors, pairs or dicts; ``optimizer`` no Optimizer.
        ValueError: no parameters; one in two groups; groups partly with names; an integer or
            sparse parameter; a hyper-parameter out of bounds.

    Example::

        >>> from functional_optim import adamw, chain, clip_by_global_norm
        >>> model = torch.nn.Linear(2, 1)
        >>> decay, plain = [model.weight], [model.bias]
        >>> optimizer = TorchOptimizer(
        ...     [{"params": decay}, {"params": plain, "weight_decay": 0.0}],
        ...     chain(clip_by_global_norm(1.0), adamw(lr=0.1)))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.param_groups[1]["weight_decay"]
        0.0
    """

    def __init__(self, params: Iterable[Any], optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "optimizer must be a functional_optim.Optimizer, such as adamw(lr=1e-3), got "
                f"{optimizer!r}"
            )
        if optimizer.overrides:
            raise ValueError(
                "this optimizer has overrides by path; here, hyper-parameters that differ go into "
                "the parameter groups"
            )
        self._optimizer = optimizer
        self._resolved: dict[int, tuple[tuple[Any, ...], tuple[Any, ...]]] = {}
        super().__init__(params, optimizer.hyper)

    @property
    def optimizer(self) -> Optimizer:
        """The chain, with the defaults for all groups."""
        return self._optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and state for its parameters: as torch's, but checked first."""
        if isinstance(param_group, dict):
            self._links_of({**self.defaults, **param_group})
            given = param_group.get("params", [])
            for one in [given] if isinstance(given, Tensor) else list(given):
                param = one[1] if isinstance(one, tuple) else one
                if isinstance(param, Tensor):
                    name = str(one[0]) if isinstance(one, tuple) else "params"
                    check_param(param, name)
                    check_writable({name: param})
            if not isinstance(given, (Tensor, set)):
                # An iterator was used up by the look at it, so torch gets the list.
                param_group = {**param_group, "params": given}
        super().add_param_group(param_group)
        self._complete_state(self.param_groups[-1])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss; called first, with autograd on.

        Returns:
            What the closure returned, else None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stages = self._optimizer.stages
        items = []
        for index, group in enumerate(self.param_groups):
            hypers = self._hypers(index, group)
            names = group.get("param_names")
            for k, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                name = names[k] if names else f"param_groups[{index}][{k}]"
                state = self._leaf_state(hypers, param, name)
                items.append(engine.Item(param, param.grad, state, hypers, name))
        engine.update_(stages, EXECUTORS[self._optimizer.executor], items)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As torch's; its tensors are the live ones, but for step counts.

        Those are float32, as in torch.optim's checkpoints, so that the equivalent torch class
        loads it too.
        """
        found = super().state_dict()
        return {
            **found,
            "state": {
                key: {
                    name: torch_step(value) if name == "step" else value
                    for name, value in entries.items()
                }
                for key, entries in found["state"].items()
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a checkpoint of this class or of the equivalent torch.optim class.

        ``state_dict`` is left as it is, and shares no memory with the optimizer afterwards.

        Raises:
            ValueError: other groups, or a state that does not fit the chain; nothing is changed.
        """
        before = (self.state, self.param_groups)
        super().load_state_dict(_own_copy(state_dict))
        try:
            for group in self.param_groups:
                self._complete_state(group)
        except Exception:
            self.state, self.param_groups = before
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_optimizer": self._optimizer, "_resolved": {}}

    def _leaf_state(self, hypers: tuple[Any, ...], param: Tensor, name: str) -> LeafState:
        """The state of a parameter.

        Before its first step (also where a caller has cleared it)
        it is made anew, from the hyper-parameters of now, as torch's classes make theirs then.
        """
        stages, entries = self._optimizer.stages, self.state[param]
        if not entries or entries.get("step") == 0:
            with torch.no_grad():
                state = init_leaf(stages, hypers, param)
            self.state[param] = to_entries(stages, hypers, param, state)
            return state
        return from_entries(stages, hypers, param, entries, name)

    def _complete_state(self, group: dict[str, Any]) -> None:
        """State for every parameter of a group: what is there, checked, or the initial one."""
        hypers = tuple(link.hyper for link in self._links_of(group))
        stages = self._optimizer.stages
        made = {
            param: from_entries(stages, hypers, param, self.state.get(param, {}), f"params[{k}]")
            for k, param in enumerate(group["params"])
        }
        for param, state in made.items():
            self.state[param] = to_entries(stages, hypers, param, state)

    def _hypers(self, index: int, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """The hyper-parameters in a group now; built and checked again only when one changed."""
        values = tuple(group[name] for name in self._optimizer.hyper)
        known = self._resolved.get(index)
        if known is not None and all(map(_same, known[0], values)):
            return known[1]
        hypers = tuple(link.hyper for link in self._links_of(group))
        self._resolved[index] = (values, hypers)
        return hypers

    def _links_of(self, group: Mapping[str, Any]) -> Links:
        values = {name: group[name] for name in self._optimizer.hyper}
        return with_values(self._optimizer.links, values)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b))


def _own_copy(value: Any) -> Any:
    """The same dicts and lists, with tensors of their own."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _own_copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_own_copy(item) for item in value]
    return value
