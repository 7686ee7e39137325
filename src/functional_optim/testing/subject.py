"""Subject of the laws: a factory of optimizers, and its oracle."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from functional_optim.core.chain import tolerant
from functional_optim.core.state import LeafState, State, map_state
from functional_optim.core.torch_state import to_entries
from functional_optim.core.views import real_view
from functional_optim.optimizer import Optimizer
from functional_optim.testing.inputs import fed
from functional_optim.testing.runs import (
    MATRIX_SHAPES,
    MAX_STEPS,
    REAL_DTYPES,
    USUAL_SHAPES,
    Params,
    Run,
    Shape,
)

Oracle = Callable[..., torch.optim.Optimizer]
"""A torch.optim class, or a function of ``(params, **options)`` that returns such an optimizer."""


@dataclass(frozen=True)
class Subject:
    """An optimizer under test.

    Args:
        factory: ``factory(**options)`` returns an Optimizer.
        oracle: whose parameters and state must be the same.
        options: a strategy of keyword arguments that both take.
        dtypes: parameters are drawn in these.
        ulps: how far parameters and state may be from the oracle's, in units in the last place of
            the largest magnitude in a tensor; 0 is bit for bit.
        scripted: whether TorchScript can run it.
        matrices: whether its parameters are real matrices, and it refuses others.
        device: where parameters and gradients are.
        missing: whether the oracle is also compared with where gradients are missing.
        takes_complex: whether its parameters may be complex.
        max_steps: most steps of a run that is drawn.
        names: of the first parameters.
    """

    factory: Callable[..., Optimizer]
    oracle: Oracle | None = None
    options: st.SearchStrategy[dict[str, Any]] = field(default_factory=lambda: st.just({}))
    dtypes: tuple[torch.dtype, ...] = REAL_DTYPES
    ulps: float = 0.0
    scripted: bool = True
    matrices: bool = False
    device: str = "cpu"
    missing: bool = True
    takes_complex: bool = True
    max_steps: int = MAX_STEPS
    names: tuple[str, ...] = ()

    def shapes(self, usual: tuple[Shape, ...] = USUAL_SHAPES) -> tuple[Shape, ...]:
        """Return the shapes that the subject takes, of those usually drawn; or small matrices."""
        return MATRIX_SHAPES if self.matrices else usual

    def build(self, run: Run) -> Optimizer:
        """The optimizer of a run, whose leaves need not be those of its overrides.

        What its stages take beside gradients, they are given.
        """
        return fed(tolerant(self.factory(**run.kwargs)))


def plain_oracle(oracle: Oracle | None) -> Oracle | None:
    """Torch's own classes in their for-loop implementation, the one that is bit for bit ours."""
    if oracle is torch.optim.SparseAdam:
        return _sparse_adam_of_all_rows
    if not isinstance(oracle, type) or not oracle.__module__.startswith("torch.optim"):
        return oracle
    if "foreach" not in inspect.signature(oracle).parameters:  # it has no other
        return oracle
    if oracle is torch.optim.Adafactor:
        return _adafactor_of_elements
    return lambda params, **options: oracle(params, foreach=False, **options)


def _adafactor_of_elements(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
    """Build torch's Adafactor of parameters that have elements: it divides by their number."""
    stepped = [one for one in params if one.numel()] or [torch.zeros(1)]
    return torch.optim.Adafactor(stepped, foreach=False, **options)


def _sparse_adam_of_all_rows(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
    """Build torch's SparseAdam that takes a dense gradient as one that stores every row."""
    options.pop("takes_dense", None)
    optimizer = torch.optim.SparseAdam(params, **options)

    def store_rows(_: Any, args: Any, kwargs: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad = _all_rows(param.grad)

    optimizer.register_step_pre_hook(store_rows)
    return optimizer


def _all_rows(grad: Tensor) -> Tensor:
    """Return a sparse tensor that stores all rows of a dense one."""
    first = torch.zeros(0, 1, dtype=torch.int64, device=grad.device)  # the one row of a scalar
    rows = torch.arange(len(grad), device=grad.device)[None] if grad.dim() else first
    values = grad if grad.dim() else grad.reshape(1)
    return torch.sparse_coo_tensor(
        rows, values, grad.shape, is_coalesced=True, check_invariants=True
    )


def run_oracle(oracle: Oracle, run: Run) -> tuple[Params, dict[str, dict[str, Tensor]]]:
    """Parameters and state by name after the same steps of a torch.optim optimizer."""
    params = run.params()
    leaves = {name: param.requires_grad_() for name, param in params.items()}
    optimizer = oracle(list(leaves.values()), **run.kwargs)
    for grads in run.grads():
        for name, leaf in leaves.items():
            leaf.grad = grads[name]
        optimizer.step()
    state = {
        name: {
            key: value
            for key, value in optimizer.state.get(leaf, {}).items()
            if isinstance(value, Tensor)
        }
        for name, leaf in leaves.items()
    }
    return {name: leaf.detach() for name, leaf in leaves.items()}, state


def named_state(
    optimizer: Optimizer, name: str, param: Tensor, leaf: LeafState
) -> dict[str, Tensor]:
    """A leaf's state under torch.optim's names."""
    chain = optimizer.chain_at((name,), tuple(param.shape))
    return to_entries(chain.stages, chain.hypers, param, leaf)


def as_real_tree(state: State) -> Any:
    """A state with every complex tensor as its real view."""
    return {
        name: LeafState(leaf.step, tuple(map_state(real_view, one) for one in leaf.stages))
        for name, leaf in state.leaves.items()
    }
