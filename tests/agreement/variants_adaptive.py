"""Other implementations of adaptive algorithms, each with one change that shows a cause."""

from typing import Any

import torch


def adopt_without_bias_correction(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Return heavyball's ADOPT with constant decays, without bias correction."""
    import heavyball

    class Plain(heavyball.ADOPT):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            corrected = heavyball.utils.beta_debias
            heavyball.utils.beta_debias = lambda beta, step: beta
            try:
                return super().step(closure)
            finally:
                heavyball.utils.beta_debias = corrected

    heavyball.utils.compile_mode = None
    made: torch.optim.Optimizer = Plain(params, **options)
    return made


def adan_with_a_first_step(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Return adan-pytorch's Adan with a full first step.

    The previous gradient of that step is the first gradient itself.
    """
    import adan_pytorch

    class Started(adan_pytorch.Adan):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            b1, _, b3 = self.param_groups[0]["betas"]
            for param in self.param_groups[0]["params"]:
                if not self.state[param]:
                    grad = param.grad.clone()
                    averages = {"m": b1 * grad, "v": torch.zeros_like(grad), "n": b3 * grad**2}
                    self.state[param].update(step=0, prev_grad=grad, **averages)
            return super().step(closure)

    made: torch.optim.Optimizer = Started(params, **options)
    return made


def yogi_from_zero(learning_rate: float, b1: float, b2: float) -> Any:
    """Return optax's Yogi whose averages start at 0."""
    import optax

    return optax.chain(
        optax.scale_by_yogi(b1, b2, initial_accumulator_value=0.0),
        optax.scale_by_learning_rate(learning_rate),
    )


def laprop_with_a_plain_root(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Return pytorch-optimizer's LaProp with eps added after the root only."""
    return _with_a_plain_root("LaProp", params, options)


def adabound_with_a_plain_root(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Return pytorch-optimizer's AdaBound with eps added after the root only."""
    return _with_a_plain_root("AdaBound", params, options)


def _with_a_plain_root(name: str, params: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    import pytorch_optimizer

    base: Any = getattr(pytorch_optimizer, name)

    class Plain(base):
        @staticmethod
        def apply_ams_bound(exp_avg_sq: torch.Tensor, eps: float, **_: Any) -> torch.Tensor:
            return exp_avg_sq.sqrt().add_(eps)

    made: torch.optim.Optimizer = Plain(params, **options)
    return made
