"""Comparisons of transforms with other packages. Each returns the largest relative difference.

The packages are those of the extra ``oracles``.
"""

from typing import Any

import torch
from torch import Tensor

import functional_optim as fo
from tests.agreement.transform_runs import problem, run

LR = 0.1


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def _problem(shape: tuple[int, ...] = (4, 6)) -> tuple[Tensor, list[Tensor]]:
    param, grads = problem(shape)
    return param.double(), [grad.double() for grad in grads]


def _descended(param: Tensor, grads: list[Tensor], change: Any) -> Tensor:
    """Run gradient descent with the gradients that ``change(param, grad)`` returns."""
    for grad in grads:
        param = param - LR * change(param, grad.clone())
    return param


def _optax_change(transform: Any) -> Any:
    """Return a stateless optax transform as ``change``.

    The first dimension becomes the last, as optax expects.
    """
    import jax

    jax.config.update("jax_enable_x64", True)

    def change(param: Tensor, grad: Tensor) -> Tensor:
        given = [jax.numpy.asarray(one.movedim(0, -1).numpy()) for one in (grad, param)]
        made, _ = transform.update(given[0], transform.init(given[1]), given[1])
        return torch.tensor(made.tolist(), dtype=torch.float64).movedim(-1, 0)

    return change


def compare_clip_by_block_rms_with_optax() -> float:
    import optax

    param, grads = _problem()
    found, _ = run(fo.chain(fo.clip_by_block_rms(0.7), fo.sgd(LR)), param, grads)
    return _relative(found, _descended(param, grads, _optax_change(optax.clip_by_block_rms(0.7))))


def compare_adaptive_grad_clip_with_optax() -> float:
    """Compare on a linear layer, a convolution and a vector."""
    import optax

    differences = []
    for shape in ((4, 6), (4, 3, 5, 5), (7,)):
        param, grads = _problem(shape)
        found, _ = run(fo.chain(fo.adaptive_grad_clip(0.2), fo.sgd(LR)), param, grads)
        change = _optax_change(optax.adaptive_grad_clip(0.2))
        differences.append(_relative(found, _descended(param, grads, change)))
    return max(differences)


def compare_adaptive_grad_clip_with_pytorch_optimizer() -> float:
    from pytorch_optimizer.optimizer.agc import agc

    param, grads = _problem()
    found, _ = run(fo.chain(fo.adaptive_grad_clip(0.2), fo.sgd(LR)), param, grads)
    return _relative(found, _descended(param, grads, lambda p, g: agc(p, g, 1e-3, 0.2)))


def compare_centralize_with_pytorch_optimizer() -> float:
    """Compare on a linear layer and a convolution."""
    from pytorch_optimizer.optimizer.gradient_centralization import centralize_gradient

    def change(param: Tensor, grad: Tensor) -> Tensor:
        centralize_gradient(grad)
        return grad

    differences = []
    for shape in ((4, 6), (4, 3, 5, 5)):
        param, grads = _problem(shape)
        found, _ = run(fo.chain(fo.centralize(), fo.sgd(LR)), param, grads)
        differences.append(_relative(found, _descended(param, grads, change)))
    return max(differences)


def compare_mars_with_pytorch_optimizer() -> float:
    """Compare MARS-AdamW on a matrix. pytorch_optimizer corrects the first gradient, too."""
    from pytorch_optimizer import MARS

    param, grads = _problem()
    theirs = torch.nn.Parameter(param.clone())
    optimizer = MARS(
        [theirs], lr=LR, betas=(0.95, 0.99), gamma=0.025, weight_decay=0.01, weight_decouple=True
    )
    for grad in grads:
        theirs.grad = grad.clone()
        optimizer.step()
    own = fo.chain(fo.mars(from_zero=True), fo.adamw(LR, (0.95, 0.99), weight_decay=0.01))
    found, _ = run(own, param, grads)
    return _relative(found, theirs.detach())
