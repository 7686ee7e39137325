"""Other implementations of adaptive algorithms with one thing changed, to show a cause."""

from typing import Any

import torch


def adopt_without_bias_correction(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Return heavyball's ADOPT whose averages keep their decays at every step."""
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
