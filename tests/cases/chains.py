"""Cases of chains: transforms, wrappers, and combinations of algorithms."""

from typing import Any

from hypothesis import strategies as st

from functional_optim import algorithms
from functional_optim.algorithms.adam import scale_by_adam
from functional_optim.algorithms.lion import scale_by_lion
from functional_optim.algorithms.rmsprop import scale_by_rms
from functional_optim.algorithms.sgd import trace
from functional_optim.composition import chain, partition
from functional_optim.optimizer import Optimizer
from functional_optim.transforms import (
    cautious,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    descend,
    maximized,
    scale_by_sign,
)
from functional_optim.wrappers.ema import ema

from .algorithms import ANY_SHAPE
from .case import BETAS, DECAY, FLAG, LR, Case, Options, some
from .muon import MUON_CHAINS
from .transforms import TRANSFORM_CASES


def _clipped(**options: Any) -> Optimizer:
    return chain(clip_by_global_norm(1.0), algorithms.adamw(**options))


def _long(**options: Any) -> Optimizer:
    return chain(
        clip_by_value(2.0),
        decoupled_weight_decay(0.1),
        clip_by_global_norm(1.5),
        algorithms.sgd(momentum=0.9, **options),
    )


def _rooted(kind: str = "adam", **options: Any) -> Optimizer:
    return getattr(algorithms, kind)(eps_root=1e-3, **options)  # type: ignore[no-any-return]


_ROOTED: Options = st.one_of(
    st.builds(dict, kind=st.sampled_from(["adam", "adamw"]), lr=LR, amsgrad=FLAG),
    st.builds(dict, kind=st.just("adagrad"), lr=LR, lr_decay=DECAY),
    st.builds(
        dict, kind=st.just("rmsprop"), lr=LR, centered=FLAG, momentum=st.sampled_from([0.0, 0.9])
    ),
)


def _cautious_roots(kind: str = "rms", lr: float = 0.1, *, maximize: bool = False) -> Optimizer:
    direction = scale_by_rms() if kind == "rms" else scale_by_adam(amsgrad=True)
    unscaled = cautious(rescale=False)
    return chain(maximized(maximize), clip_by_value(0.5), direction, unscaled, descend(lr))


def _cautious_lion(lr: float = 0.1, *, maximize: bool = False, **options: Any) -> Optimizer:
    clip, direction = clip_by_global_norm(1.0), scale_by_lion(**options)
    return chain(maximized(maximize), clip, direction, cautious(), descend(lr))


def _signs(lr: float = 0.1, **options: Any) -> Optimizer:
    return chain(trace(**options), scale_by_sign(), descend(lr))


def _averaged(lr: float = 0.1, decay: float = 0.5) -> Optimizer:
    return chain(clip_by_value(0.5), algorithms.adamw(lr=lr), ema(decay))


def label_by_name(path: tuple[Any, ...], shape: tuple[int, ...]) -> str:
    return "first" if path[:1] == ("a",) else "others"


def _parts(lr: float = 0.1, decay: float = 0.5) -> Optimizer:
    first = chain(algorithms.sgd(lr=lr, momentum=0.9), ema(decay))
    parts = partition({"first": first, "others": algorithms.adamw(lr=lr)}, label_by_name)
    return chain(clip_by_global_norm(1.0), parts)


CHAINS: dict[str, Case] = {
    "clip_by_global_norm, adamw": Case(_clipped, options=some(lr=LR, amsgrad=FLAG)),
    "clip_by_value, decoupled_weight_decay, clip_by_global_norm, sgd": Case(
        _long, options=some(lr=LR, nesterov=FLAG)
    ),
    "eps_root": Case(_rooted, options=_ROOTED),
    "clip_by_value, scale_by_rms or scale_by_adam, cautious without rescaling, descend": Case(
        _cautious_roots, options=some(kind=st.sampled_from(["rms", "adam"]), lr=LR, maximize=FLAG)
    ),
    "clip_by_global_norm, scale_by_lion, cautious, descend": Case(
        _cautious_lion, options=some(lr=LR, betas=BETAS, maximize=FLAG)
    ),
    "trace, scale_by_sign, descend": Case(_signs, options=some(lr=LR, nesterov=FLAG)),
    "clip_by_value, adamw, ema": Case(
        _averaged, options=some(lr=LR, decay=st.sampled_from([0.0, 0.9]))
    ),
    "clip_by_global_norm, partition of sgd with ema and adamw": Case(
        _parts, options=some(lr=LR, decay=st.sampled_from([0.0, 0.9])), one_chain=False
    ),
    **TRANSFORM_CASES,
    **MUON_CHAINS,
}
"""Chains by name: each transform is in one of them, and so is each rule that an option selects."""

ONE_CHAIN = {
    name: one for name, one in {**ANY_SHAPE, **CHAINS}.items() if one.one_chain and not one.matrices
}
"""Cases that can be bound, scripted, captured and stored, with parameters of any shape."""
