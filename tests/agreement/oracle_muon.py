"""Comparisons of orthogonal-matrix algorithms with programs of other authors.

Each function returns the largest difference after 20 steps, relative to the change of the
parameters. The packages are those of the extra ``oracles``. ``python -m
tests.agreement.oracle_muon`` prints all differences.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from functional_optim import Optimizer, PolarFactor, muon, normuon, scion

SHAPES = ((6, 5), (4, 10), (8, 8))
STEPS = 20


def largest_difference(
    optimizer: Optimizer, oracle: Callable[[list[nn.Parameter]], Any], dtype: torch.dtype
) -> float:
    """Return the largest difference after steps of both optimizers with the same gradients."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> list[Tensor]:
        return [
            torch.randn(one, generator=generator, dtype=torch.float64).to(dtype) for one in SHAPES
        ]

    start = drawn()
    params, theirs = start, [nn.Parameter(one.clone()) for one in start]
    state, other = optimizer.init(params), oracle(theirs)
    for _ in range(STEPS):
        grads = drawn()
        params, state = optimizer.update(params, grads, state)
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad.clone()  # some optimizers overwrite gradients
        other.step()
    worst = 0.0
    for one, param, before in zip(params, theirs, start, strict=True):
        moved = float((param.detach() - before).abs().max())
        worst = max(worst, float((one - param.detach()).abs().max()) / moved)
    return worst


def compare_muon(dtype: torch.dtype = torch.float64, **options: Any) -> float:
    """Compare with pytorch-optimizer's Muon, which has the conventions of torch.optim."""
    from pytorch_optimizer import Muon

    given = {"lr": 0.1, "weight_decay": 0.1, "use_muon": True, **options}
    adjust = "match_rms_adamw" if options.get("use_adjusted_lr") else None
    polar = {
        "quintic": PolarFactor.tuned_quintic(),
        "polar_express": PolarFactor.polar_express(),
    }.get(options.get("ns_coeffs", ""))
    return largest_difference(
        muon(0.1, 0.1, adjust_lr_fn=adjust, polar=polar),
        lambda params: Muon([{"params": params, **given}]),
        dtype,
    )


def compare_muon_by_heavyball(dtype: torch.dtype = torch.float64) -> float:
    """Compare with heavyball's Muon without Nesterov momentum.

    It uses five polynomials, in the dtype of the parameters.
    """
    from heavyball import Muon

    ours = muon(
        0.1,
        0.1,
        nesterov=False,
        polar=PolarFactor.tuned_quintic(),
        iteration_dtype="parameter",
        normalization="before_cast",
        adjust_lr_fn="original",
    )
    plain: Any = {"multi_tensor": False, "compile_step": False, "promote": False}
    return largest_difference(
        ours,
        lambda params: Muon(
            params, lr=0.1, betas=(0.95, 0.99), weight_decay=0.1, nesterov=False, **plain
        ),
        dtype,
    )


def compare_normuon(dtype: torch.dtype = torch.float64, *, paper: bool = False) -> float:
    """Compare with pytorch-optimizer's NorMuon, as in the authors' program or in the paper."""
    from pytorch_optimizer import NorMuon

    theirs: dict[str, Any] = {"nesterov": not paper}
    theirs["update_scale"] = "match_rms" if paper else "preserve_norm"
    adjust = "match_rms_adamw" if paper else None
    return largest_difference(
        normuon(0.1, 0.1, nesterov=not paper, adjust_lr_fn=adjust),
        lambda params: NorMuon(
            [{"params": params, "use_muon": True, "lr": 0.1, "weight_decay": 0.1, **theirs}]
        ),
        dtype,
    )


def compare_scion(
    norm: str = "spectral", dtype: torch.dtype = torch.float64, *, unconstrained: bool = False
) -> float:
    """Compare with pytorch-optimizer's SCION."""
    from pytorch_optimizer import SCION
    from pytorch_optimizer.optimizer.scion import LMONorm

    kinds = {
        "spectral": LMONorm.SPECTRAL,
        "sign": LMONorm.SIGN,
        "row_norm": LMONorm.ROW,
        "col_norm": LMONorm.COL,
    }
    return largest_difference(
        scion(0.1, 0.9, norm, 3.0, unconstrained),
        lambda params: SCION(
            params,
            lr=0.1,
            momentum=0.1,
            norm_type=kinds[norm],
            scale=3.0,
            constraint=not unconstrained,
        ),
        dtype,
    )


COMPARISONS: dict[str, Callable[[torch.dtype], float]] = {
    "muon, pytorch-optimizer": compare_muon,
    "muon, pytorch-optimizer, match_rms_adamw": lambda dtype: compare_muon(
        dtype, use_adjusted_lr=True
    ),
    "muon, pytorch-optimizer, tuned_quintic": lambda dtype: compare_muon(
        dtype, ns_coeffs="quintic"
    ),
    "muon, pytorch-optimizer, polar_express": lambda dtype: compare_muon(
        dtype, ns_coeffs="polar_express"
    ),
    "muon, heavyball": compare_muon_by_heavyball,
    "normuon, pytorch-optimizer": compare_normuon,
    "normuon, pytorch-optimizer, paper": lambda dtype: compare_normuon(dtype, paper=True),
    "scion, pytorch-optimizer, spectral": lambda dtype: compare_scion("spectral", dtype),
    "scion, pytorch-optimizer, sign": lambda dtype: compare_scion("sign", dtype),
    "scion, pytorch-optimizer, row_norm": lambda dtype: compare_scion("row_norm", dtype),
    "scion, pytorch-optimizer, col_norm": lambda dtype: compare_scion("col_norm", dtype),
    "scion, pytorch-optimizer, unconstrained": lambda dtype: compare_scion(
        "spectral", dtype, unconstrained=True
    ),
}
"""Comparisons by name, as functions of the parameters' dtype."""


if __name__ == "__main__":
    for name, compare in COMPARISONS.items():
        differences = [f"{compare(dtype):.1e}" for dtype in (torch.float64, torch.float32)]
        print(f"{name}: {', '.join(differences)}")  # noqa: T201  a command
