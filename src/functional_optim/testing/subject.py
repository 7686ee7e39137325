"""Subject of the laws: a factory of optimizers, and an oracle."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from functional_optim.core.chain import allow_unmatched
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
        oracle: must give the same parameters and state.
        options: strategy of keyword arguments for both.
        dtypes: of the parameters.
        ulps: allowed distance from the oracle, in units in the last place of the largest magnitude
            in a tensor; 0 is bit for bit.
        scripted: True if TorchScript can run it.
        matrices: True if it takes real matrices only.
        device: of parameters and gradients.
        missing: True if the oracle is also compared in runs with missing gradients.
        takes_complex: True if parameters may be complex.
        max_steps: largest number of steps in a run.
        names: of the first parameters.

    Example::

        >>> from functional_optim import sgd
        >>> from functional_optim.testing import check_law
        >>> check_law("pure", Subject(sgd), max_examples=2)
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
        """Return the shapes to draw: ``usual``, or small matrices."""
        return MATRIX_SHAPES if self.matrices else usual

    def build(self, run: Run) -> Optimizer:
        """Return the optimizer for a run, with computed inputs per leaf.

        Its selectors may match no leaf.
        """
        return fed(allow_unmatched(self.factory(**run.kwargs)))


def plain_oracle(oracle: Oracle | None) -> Oracle | None:
    """Return the for-loop implementation of a class of torch, whose bits equal ours."""
    if oracle is torch.optim.SparseAdam:
        return _build_sparse_adam
    if not isinstance(oracle, type) or not oracle.__module__.startswith("torch.optim"):
        return oracle
    if "foreach" not in inspect.signature(oracle).parameters:  # it has only for loops
        return oracle
    if oracle is torch.optim.Adafactor:
        return _build_adafactor
    return lambda params, **options: oracle(params, foreach=False, **options)


def _build_adafactor(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
    """Build torch's Adafactor without empty parameters, since it divides by their size."""
    stepped = [one for one in params if one.numel()] or [torch.zeros(1)]
    return torch.optim.Adafactor(stepped, foreach=False, **options)


def _build_sparse_adam(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
    """Build torch's SparseAdam with a hook that converts dense gradients to sparse ones."""
    options.pop("takes_dense", None)
    optimizer = torch.optim.SparseAdam(params, **options)

    def store_rows(_: Any, args: Any, kwargs: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad = _all_rows(param.grad)

    optimizer.register_step_pre_hook(store_rows)
    return optimizer


def _all_rows(grad: Tensor) -> Tensor:
    """Return a sparse tensor that stores all rows of a dense tensor."""
    first = torch.zeros(0, 1, dtype=torch.int64, device=grad.device)  # the row of a 0-d tensor
    rows = torch.arange(len(grad), device=grad.device)[None] if grad.dim() else first
    values = grad if grad.dim() else grad.reshape(1)
    return torch.sparse_coo_tensor(
        rows, values, grad.shape, is_coalesced=True, check_invariants=True
    )


def run_oracle(oracle: Oracle, run: Run) -> tuple[Params, dict[str, dict[str, Tensor]]]:
    """Return parameters and state by name after the steps of a torch.optim optimizer."""
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
    """Return the state of a leaf under the names of torch.optim."""
    chain = optimizer.chain_at((name,), tuple(param.shape))
    return to_entries(chain.stages, chain.hypers, param, leaf)


def as_real_tree(state: State) -> Any:
    """Return a state with the real views of all complex tensors."""
    return {
        name: LeafState(leaf.step, tuple(map_state(real_view, one) for one in leaf.stages))
        for name, leaf in state.leaves.items()
    }
