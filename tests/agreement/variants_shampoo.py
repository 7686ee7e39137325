"""Other implementations with one change each, for the experiments that show a cause."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.random_normal import counter_of, normal_like


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of a module or an object within the context."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def with_our_draws(optimizer: torch.optim.Optimizer, context: Callable[[], Any]) -> Any:
    """Return the optimizer with the random numbers of our ``kron``, and its steps in a context."""
    step, made = optimizer.step, itertools.count()

    def stepped() -> None:
        number = next(made)

        def draw(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
            draws = normal_like(like.double(), counter_of(0, like) + number)
            return draws.to(dtype or like.dtype)

        eager = torch.compiler.set_stance("force_eager")  # a graph would keep the random numbers
        with eager, replaced(torch, randn_like=draw), context():
            step()

    optimizer.step = stepped  # type: ignore[method-assign,assignment]
    return optimizer


def kron_torch_with_our_draws(groups: Iterable[Any], **options: Any) -> Any:
    """Return kron-torch's Kron with our random numbers, and with two changes.

    It adds no noise to the gradient of the step, and solves in the dtype of the factors.
    """
    from kron_torch import kron

    noisy = kron._calc_A_and_conjB
    [group] = groups
    options.setdefault("precond_dtype", group["params"][0].dtype)

    def changed() -> Any:
        return replaced(
            kron,
            _calc_A_and_conjB=lambda expression, grad, factors: noisy(
                expression, grad.clone(), factors
            ),
            _solve_triangular_right=_solved,
        )

    return with_our_draws(kron.Kron([group], **options), changed)


def pytorch_optimizer_kron_with_our_draws(groups: Iterable[Any], **options: Any) -> Any:
    """Return pytorch-optimizer's Kron with our random numbers, also added to the gradient.

    The noise is added only to the gradient that fits the preconditioner.
    """
    from pytorch_optimizer.optimizer import psgd

    fit = psgd.update_precondition
    [group] = groups
    options.setdefault("precondition_dtype", group["params"][0].dtype)

    def noisy(factors: Any, expressions: Any, v: Tensor, g: Tensor, *rest: Any) -> None:
        fit(factors, expressions, v, g + 2.0**-11.5 * g.abs().mean() * v, *rest)

    def changed() -> Any:
        return replaced(psgd, update_precondition=noisy, solve_triangular_right=_solved)

    return with_our_draws(psgd.Kron([group], **options), changed)


def _solved(x: Tensor, a: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(a, x.reshape(-1, x.size(-1)), upper=True, left=False).view(
        x.shape
    )


def galore_with_our_signs(groups: Iterable[Any], **options: Any) -> Any:
    """Return pytorch-optimizer's GaLore with our signs, and our steps for new projections.

    It computes singular vectors in the dtype of the gradient.
    """
    from pytorch_optimizer.optimizer import galore

    class Projector(galore.GaLoreProjector):  # type: ignore[misc]  # it has no annotations
        def project(self, grad: Tensor, num_steps: int, *rest: Any) -> Tensor:
            return super().project(grad, num_steps - 1, *rest)  # type: ignore[no-any-return]

        def get_orthogonal_matrix(self, weights: Tensor, projection_type: str, **_: Any) -> Tensor:
            left, _, right = torch.linalg.svd(weights, full_matrices=False)
            found = left[:, : self.rank].T if projection_type == "left" else right[: self.rank]
            old = torch.eye(*found.shape, dtype=found.dtype)
            if self.ortho_matrix is not None:
                old = self.ortho_matrix.T if projection_type == "left" else self.ortho_matrix
            signs = torch.where((found * old).sum(1, keepdim=True) < 0, -1.0, 1.0)
            turned = signs.to(found.dtype) * found
            return turned.T if projection_type == "left" else turned

    made = galore.GaLore(groups, **options)
    step = made.step

    def stepped() -> None:
        with replaced(galore, GaLoreProjector=Projector):
            step()

    made.step = stepped
    return made
