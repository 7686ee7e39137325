"""Algorithms with one step size per tensor, per block of a tensor, or for all tensors."""

from functional_optim import (
    Optimizer,
    adam_mini,
    came,
    dadapt_adam,
    dadapt_sgd,
    dog,
    ldog,
    novograd,
    sign_sgd,
    signum,
)

VARIANTS: dict[str, Optimizer] = {
    "adam_mini": adam_mini(0.1, weight_decay=0.2),
    "adam_mini of whole tensors": adam_mini(0.1, blocks=1, maximize=True),
    "came": came(0.1, (0.5, 0.9, 0.8), (1e-3, 1e-2), weight_decay=0.1),
    "ldog": ldog(reps_rel=0.1, weight_decay=0.1),
    "novograd": novograd(0.1, weight_decay=0.1),
    "novograd averaging": novograd(0.1, grad_averaging=True, maximize=True),
    "sign_sgd": sign_sgd(0.1, weight_decay=0.2),
    "signum": signum(0.1, weight_decay=0.2),
    "signum coupled": signum(0.1, 0.5, 0.2, decoupled_weight_decay=False, maximize=True),
}
"""Algorithms of one chain, with options that change their state or their path."""

COMPOSED: dict[str, Optimizer] = {
    "dadapt_adam": dadapt_adam(d0=0.1, eps=0.1, use_bias_correction=True),
    "dadapt_adam decays": dadapt_adam(0.5, d0=0.1, eps=0.1, weight_decay=0.1, decouple=True),
    "dadapt_sgd": dadapt_sgd(0.5, 0.7, 0.1, d0=0.1),
    "dog": dog(reps_rel=0.1, weight_decay=0.1),
}
"""Algorithms that keep numbers for all parameters together."""
