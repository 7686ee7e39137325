"""Parameters to evaluate with, by name or temporarily in a model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from functional_optim._torch.tensors import version_of
from functional_optim.core.interrupts import defer_interrupts

Views = dict[str, Tensor] | list[Tensor]
"""Tensors by parameter name, or in the order of the parameter groups if there are no names."""


class AveragedParams:
    """Mixin for torch.optim front-ends with the methods ``view`` and ``averaged``."""

    param_groups: list[dict[str, Any]]
    _is_averaged: bool = False

    def _viewed(self) -> list[Tensor]:
        """Return the tensors to evaluate with, in the order of the parameter groups."""
        raise NotImplementedError

    def view(self) -> Views:
        """Return the parameters to evaluate with: see :meth:`Optimizer.view`.

        The tensors may share memory with parameters and state, so the next step may change them.
        Copy tensors that you want to keep. :meth:`averaged` writes them into a model.

        Returns:
            A tensor for each parameter. If the optimizer was given names, a dict by name; else a
            list in the order of ``param_groups``. A partition or an override divides groups, so
            this order may differ from that of ``model.parameters()``.

        Raises:
            ValueError: two parameters have the same name.
            RuntimeError: called inside of :meth:`averaged`.

        Example::

            >>> from functional_optim import TorchOptimizer, chain, ema, sgd
            >>> weight = torch.ones(1, requires_grad=True)
            >>> optimizer = TorchOptimizer([("weight", weight)], chain(sgd(lr=1.0), ema(0.5)))
            >>> weight.grad = torch.ones(1)
            >>> optimizer.step()
            >>> weight.tolist(), optimizer.view()["weight"].tolist()
            ([0.0], [0.5])
        """
        self._require_trained_values()
        return _by_name(self.param_groups, self._viewed())

    @contextmanager
    def averaged(self, model: torch.nn.Module) -> Iterator[None]:
        """Evaluate a model with the parameters of :meth:`view`, inside of a ``with`` statement.

        The parameters of the model are overwritten in place. Their old values are restored when the
        ``with`` statement ends, also after an exception. Parameters that this optimizer does not
        step, and buffers such as the statistics of BatchNorm, do not change. Inside of the ``with``
        statement, ``model.state_dict()`` has the averages, and steps of this optimizer are refused.
        If no stage has a view, the model keeps its values, so one loop evaluates every optimizer.

        Args:
            model: a model with parameters of this optimizer. It may have other parameters too, and
                it may be wrapped, as by DistributedDataParallel.

        Raises:
            ValueError: no parameter of the model is stepped by this optimizer.
            RuntimeError: the parameters are averages already; or a parameter was written to inside
                of the ``with`` statement. The old values are restored, so that write is lost.

        Example::

            >>> from functional_optim import TorchOptimizer, chain, ema, sgd
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> _ = torch.nn.init.ones_(model.weight)
            >>> optimizer = TorchOptimizer(model.parameters(), chain(sgd(lr=1.0), ema(0.5)))
            >>> model(torch.ones(1, 1)).sum().backward()
            >>> optimizer.step()
            >>> with optimizer.averaged(model):
            ...     model(torch.ones(1, 1)).item()
            0.5
            >>> model(torch.ones(1, 1)).item()
            0.0
        """
        self._require_trained_values()
        pairs = self._averages_in(model)
        params = [param for param, _ in pairs]
        before = [param.detach().clone() for param in params]
        with _refuse_steps(self):
            self._is_averaged = True
            try:
                write_params(params, [average for _, average in pairs])
                versions = list(map(version_of, params))
                yield
                changed = versions != list(map(version_of, params))
            finally:
                defer_interrupts(write_params, params, before)
                self._is_averaged = False
        if changed:
            raise RuntimeError(
                "a parameter was written to inside of `with optimizer.averaged(model)`, such as by "
                "a hook that steps in backward; every parameter has its value of before, and what "
                "was written is lost. Evaluate there, and train outside"
            )

    def _averages_in(self, model: torch.nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters of a model that this optimizer steps, each with its average."""
        params = [param for group in self.param_groups for param in group["params"]]
        averages = dict(zip(map(id, params), self._viewed(), strict=True))
        every: Iterable[Tensor] = model.parameters()
        found = [(one, averages[id(one)]) for one in every if id(one) in averages]
        if not found:
            raise ValueError(
                f"no parameter of this {type(model).__name__} is one of this optimizer's "
                f"{len(params)} parameters; give the model whose parameters it steps"
            )
        return found

    def _require_trained_values(self) -> None:
        if self._is_averaged:
            _refuse(self)


def write_params(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values into parameters in place."""
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.detach().copy_(value)


@contextmanager
def _refuse_steps(optimizer: Any) -> Iterator[None]:
    """Refuse steps and loads of an optimizer inside of a ``with`` statement."""
    handles = [
        optimizer.register_step_pre_hook(_refuse),
        optimizer.register_load_state_dict_pre_hook(_refuse),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse(*_: Any) -> NoReturn:
    raise RuntimeError(
        "the parameters are averages now, inside of `with optimizer.averaged(model)`; step, load, "
        "view and average outside of that `with` statement"
    )


def _by_name(groups: Iterable[Mapping[str, Any]], tensors: Sequence[Tensor]) -> Views:
    """Return the tensors by the names of the parameters, or as a list if there are no names."""
    names = [name for group in groups for name in group.get("param_names") or ()]
    if len(names) < len(tensors) or not names:
        return list(tensors)
    found = dict(zip(names, tensors, strict=True))
    if len(found) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"two parameters have the name {twice!r}, so no mapping by name has both; give each a "
            "name of its own, or evaluate inside of `with optimizer.averaged(model)`"
        )
    return found
