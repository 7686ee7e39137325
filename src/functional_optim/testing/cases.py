"""The table of cases: every algorithm of this package, its options, its oracle.

A new algorithm is one entry here, and all laws run over it. A test fails if one is missing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from functional_optim import algorithms
from functional_optim.algorithms.adam import scale_by_adam
from functional_optim.algorithms.lion import scale_by_lion
from functional_optim.algorithms.rmsprop import scale_by_rms
from functional_optim.algorithms.sgd import trace
from functional_optim.composition import chain, partition
from functional_optim.optimizer import Optimizer
from functional_optim.testing.subject import Subject, plain_oracle
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

NAN = float("nan")
Options = st.SearchStrategy[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One optimizer of this package.

    Args:
        factory: its constructor.
        oracle: the torch.optim class that it equals bit for bit.
        options: a strategy over every documented option that changes the numbers.
        refused: keyword arguments that raise ValueError in constructor and oracle alike.
        refused_here: keyword arguments that raise ValueError in the constructor only (NaN, mostly,
            which some of torch's classes let through).
        matrices: whether parameters must be real matrices.
        coarsest: the dtype that it computes in, whatever the parameter's.
        one_chain: whether all leaves have the same stages, which keep nothing together; the laws of
            what is bound, scripted or captured are not for others.
    """

    factory: Callable[..., Optimizer]
    oracle: type[torch.optim.Optimizer] | None = None
    options: Options = field(default_factory=lambda: st.just({}))
    refused: tuple[dict[str, Any], ...] = ()
    refused_here: tuple[dict[str, Any], ...] = ()
    matrices: bool = False
    coarsest: torch.dtype | None = None
    one_chain: bool = True

    def subject(self) -> Subject:
        """The case as the laws take it."""
        return Subject(
            self.factory,
            plain_oracle(self.oracle),
            self.options,
            matrices=self.matrices,
            coarsest=self.coarsest,
            one_chain=self.one_chain,
        )


def _some(**options: st.SearchStrategy[Any]) -> Options:
    """Any subset of these options."""
    return st.fixed_dictionaries({}, optional=options)


_LR = st.sampled_from([0.0, 1e-3, 0.1, 1.0])
_DECAY = st.sampled_from([0.0, 0.01, 0.5])
_BETAS = st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.8, 0.0)])
_EPS = st.sampled_from([1e-8, 1e-3])
_FLAG = st.booleans()


def _sgd_options() -> Options:
    plain = _some(lr=_LR, weight_decay=_DECAY, maximize=_FLAG)
    damped = {"momentum": st.sampled_from([0.5, 0.9]), "dampening": st.sampled_from([0.0, 0.3])}
    nesterov = {"momentum": st.sampled_from([0.5, 0.9]), "nesterov": st.just(value=True)}
    extra: Options = st.one_of(
        st.just({}), st.fixed_dictionaries(damped), st.fixed_dictionaries(nesterov)
    )
    return st.builds(lambda a, b: {**a, **b}, plain, extra)


_BAD_LR = ({"lr": -0.1},)
_NAN_LR = ({"lr": NAN}, {"lr": float("inf")})
_BAD_ADAM = (
    *_BAD_LR,
    {"betas": (1.0, 0.9)},
    {"betas": (0.9, 1.0)},
    {"betas": (-0.1, 0.9)},
    {"eps": -1.0},
    {"weight_decay": -1.0},
)
_NAN_ADAM = (*_NAN_LR, {"betas": (NAN, 0.9)}, {"betas": (0.9, NAN)}, {"eps": NAN})
_ADAM_OPTIONS = {
    "lr": _LR,
    "betas": _BETAS,
    "eps": _EPS,
    "weight_decay": _DECAY,
    "amsgrad": _FLAG,
    "maximize": _FLAG,
}

_SCHEDULE_FREE = {
    "warmup_steps": st.sampled_from([0, 1, 3]),
    "r": st.sampled_from([-0.5, 0.0, 1.0]),
    "weight_lr_power": st.sampled_from([0.0, 1.0, 2.0]),
    "maximize": _FLAG,
}
_BAD_SCHEDULE_FREE = ({"warmup_steps": -1}, {"r": NAN}, {"weight_lr_power": -1.0})

CASES: dict[str, Case] = {
    "sgd": Case(
        algorithms.sgd,
        torch.optim.SGD,
        _sgd_options(),
        refused=(
            *_BAD_LR,
            {"momentum": -0.1},
            {"weight_decay": -0.1},
            {"nesterov": True},
            {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
        ),
        refused_here=(*_NAN_LR, {"momentum": NAN}, {"dampening": NAN}, {"weight_decay": NAN}),
    ),
    "adam": Case(
        algorithms.adam,
        torch.optim.Adam,
        _some(**_ADAM_OPTIONS, decoupled_weight_decay=_FLAG),
        refused=_BAD_ADAM,
        refused_here=_NAN_ADAM,
    ),
    "adamw": Case(
        algorithms.adamw,
        torch.optim.AdamW,
        _some(**_ADAM_OPTIONS),
        refused=_BAD_ADAM,
        refused_here=_NAN_ADAM,
    ),
    "adagrad": Case(
        algorithms.adagrad,
        torch.optim.Adagrad,
        _some(
            lr=_LR,
            lr_decay=st.sampled_from([0.0, 0.1]),
            weight_decay=_DECAY,
            initial_accumulator_value=st.sampled_from([0.0, 0.3]),
            eps=st.sampled_from([1e-10, 1e-3]),
            maximize=_FLAG,
        ),
        refused=(
            *_BAD_LR,
            {"lr_decay": -1.0},
            {"weight_decay": -1.0},
            {"initial_accumulator_value": -1.0},
            {"eps": -1.0},
        ),
        refused_here=(*_NAN_LR, {"lr_decay": NAN}, {"initial_accumulator_value": NAN}),
    ),
    "adadelta": Case(
        algorithms.adadelta,
        torch.optim.Adadelta,
        _some(
            lr=_LR,
            rho=st.sampled_from([0.0, 0.9, 1.0]),
            eps=st.sampled_from([1e-6, 1e-3]),
            weight_decay=_DECAY,
            maximize=_FLAG,
        ),
        refused=(*_BAD_LR, {"rho": 1.5}, {"rho": -0.1}, {"eps": -1.0}, {"weight_decay": -1.0}),
        refused_here=(*_NAN_LR, {"rho": NAN}, {"eps": NAN}),
    ),
    "adamax": Case(
        algorithms.adamax,
        torch.optim.Adamax,
        _some(lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY, maximize=_FLAG),
        refused=_BAD_ADAM,
        refused_here=_NAN_ADAM,
    ),
    "rmsprop": Case(
        algorithms.rmsprop,
        torch.optim.RMSprop,
        _some(
            lr=_LR,
            alpha=st.sampled_from([0.0, 0.9, 0.99]),
            eps=_EPS,
            weight_decay=_DECAY,
            momentum=st.sampled_from([0.0, 0.9]),
            centered=_FLAG,
            maximize=_FLAG,
        ),
        refused=(
            *_BAD_LR,
            {"eps": -1.0},
            {"momentum": -1.0},
            {"weight_decay": -1.0},
            {"alpha": -1.0},
        ),
        refused_here=(*_NAN_LR, {"alpha": NAN}, {"momentum": NAN}),
    ),
    "rprop": Case(
        algorithms.rprop,
        torch.optim.Rprop,
        _some(
            lr=_LR,
            etas=st.sampled_from([(0.5, 1.2), (0.1, 3.0)]),
            step_sizes=st.sampled_from([(1e-6, 50.0), (0.01, 0.1)]),
            maximize=_FLAG,
        ),
        refused=(*_BAD_LR, {"etas": (0.0, 1.2)}, {"etas": (0.5, 1.0)}, {"etas": (1.1, 1.2)}),
        refused_here=(*_NAN_LR, {"step_sizes": (NAN, 50.0)}),
    ),
    "muon": Case(
        algorithms.muon,
        torch.optim.Muon,
        _some(
            lr=_LR,
            weight_decay=_DECAY,
            momentum=st.sampled_from([0.0, 0.5, 0.95]),
            nesterov=_FLAG,
            ns_coefficients=st.sampled_from([(3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)]),
            eps=st.sampled_from([1e-7, 0.5]),
            ns_steps=st.sampled_from([0, 1, 5]),
            adjust_lr_fn=st.sampled_from([None, "original", "match_rms_adamw"]),
        ),
        refused=(
            *_BAD_LR,
            {"momentum": -0.1},
            {"weight_decay": -0.1},
            {"adjust_lr_fn": "other"},
        ),
        refused_here=(
            *_NAN_LR,
            {"momentum": NAN},
            {"ns_coefficients": (NAN, 0.0, 0.0)},
            {"eps": NAN},
            {"ns_steps": 100},
            {"ns_steps": -1},
        ),
        matrices=True,
        coarsest=torch.bfloat16,
    ),
    "soap": Case(
        algorithms.soap,
        options=_some(
            lr=_LR,
            betas=_BETAS,
            shampoo_beta=st.sampled_from([0.0, 0.9]),
            weight_decay=_DECAY,
            precondition_frequency=st.sampled_from([1, 2]),
            max_precond_dim=st.sampled_from([0, 2, 100]),
        ),
        refused_here=(
            *_BAD_LR,
            *_NAN_LR,
            {"betas": (1.0, 0.5)},
            {"shampoo_beta": 1.0},
            {"shampoo_beta": NAN},
            {"eps": -1.0},
            {"weight_decay": -1.0},
            {"precondition_frequency": 0},
            {"max_precond_dim": -1},
        ),
        matrices=True,
    ),
    "qhm": Case(
        algorithms.qhm,
        options=_some(
            lr=_LR,
            momentum=st.sampled_from([0.0, 0.9]),
            nu=st.sampled_from([0.0, 0.7, 1.0]),
            weight_decay=_DECAY,
            weight_decay_type=st.sampled_from(["grad", "direct"]),
            maximize=_FLAG,
        ),
        refused_here=(
            *_BAD_LR,
            *_NAN_LR,
            {"momentum": 1.0},
            {"momentum": NAN},
            {"nu": NAN},
            {"weight_decay": -1.0},
            {"weight_decay_type": "other"},
        ),
    ),
    "lamb": Case(
        algorithms.lamb,
        options=_some(
            lr=_LR,
            betas=_BETAS,
            eps=_EPS,
            weight_decay=_DECAY,
            min_norm=st.sampled_from([0.0, 0.5]),
            max_ratio=st.sampled_from([0.3, 10.0]),
            maximize=_FLAG,
        ),
        refused_here=(
            *_BAD_ADAM,
            *_NAN_ADAM,
            {"min_norm": -1.0},
            {"min_norm": NAN},
            {"max_ratio": -1.0},
            {"max_ratio": NAN},
        ),
    ),
    "lars": Case(
        algorithms.lars,
        options=_some(
            lr=_LR,
            momentum=st.sampled_from([0.5, 0.9]),
            weight_decay=_DECAY,
            nesterov=_FLAG,
            trust_coefficient=st.sampled_from([1e-3, 0.5]),
            maximize=_FLAG,
        ),
        refused_here=(
            *_BAD_LR,
            *_NAN_LR,
            {"momentum": -0.1},
            {"momentum": NAN},
            {"weight_decay": -0.1},
            {"trust_coefficient": -1.0},
            {"trust_coefficient": NAN},
        ),
    ),
    "lion": Case(
        algorithms.lion,
        options=_some(lr=_LR, betas=_BETAS, weight_decay=_DECAY, maximize=_FLAG),
        refused_here=(*_BAD_LR, *_NAN_LR, {"betas": (1.0, 0.5)}, {"betas": (0.5, NAN)}),
    ),
    "rowwise_adagrad": Case(
        algorithms.rowwise_adagrad,
        options=_some(lr=_LR, eps=_EPS, weight_decay=_DECAY, maximize=_FLAG),
        refused_here=(*_BAD_LR, *_NAN_LR, {"eps": -1.0}, {"eps": NAN}, {"weight_decay": -1.0}),
    ),
    "ftrl": Case(
        algorithms.ftrl,
        options=_some(
            lr=_LR,
            beta=st.sampled_from([0.0, 0.5]),
            l1=st.sampled_from([0.0, 0.3, 10.0]),
            l2=_DECAY,
            maximize=_FLAG,
        ),
        refused_here=(*_BAD_LR, *_NAN_LR, {"beta": -1.0}, {"l1": NAN}, {"l1": -1.0}, {"l2": -1.0}),
    ),
    "prodigy": Case(
        algorithms.prodigy,
        options=_some(
            lr=st.sampled_from([0.0, 0.5, 1.0]),
            betas=_BETAS,
            beta3=st.sampled_from([0.0, 0.9, 1.0]),
            eps=_EPS,
            weight_decay=_DECAY,
            decouple=_FLAG,
            use_bias_correction=_FLAG,
            safeguard_warmup=_FLAG,
            d0=st.sampled_from([1e-6, 0.1]),
            d_coef=st.sampled_from([0.5, 2.0]),
            growth_rate=st.sampled_from([1.0, 1.5]),
            slice_p=st.sampled_from([1, 2, 11]),
            maximize=_FLAG,
        ),
        refused_here=(
            *_BAD_ADAM,
            *_NAN_ADAM,
            {"beta3": 1.5},
            {"eps": 0.0},
            {"d0": 0.0},
            {"d_coef": NAN},
            {"growth_rate": 0.5},
            {"slice_p": 0},
        ),
        one_chain=False,
    ),
    "schedule_free_sgd": Case(
        algorithms.schedule_free_sgd,
        options=_some(
            lr=_LR,
            momentum=st.sampled_from([0.1, 0.9]),
            weight_decay=_DECAY,
            **_SCHEDULE_FREE,
        ),
        refused_here=(
            *_BAD_LR,
            *_NAN_LR,
            *({"momentum": bad} for bad in (0.0, 1.0, NAN)),
            {"weight_decay": -1.0},
            *_BAD_SCHEDULE_FREE,
        ),
        one_chain=False,
    ),
    "schedule_free_adamw": Case(
        algorithms.schedule_free_adamw,
        options=_some(
            lr=_LR,
            betas=st.sampled_from([(0.9, 0.999), (0.1, 0.0)]),
            eps=_EPS,
            weight_decay=_DECAY,
            **_SCHEDULE_FREE,
        ),
        refused_here=(*_BAD_ADAM, *_NAN_ADAM, {"betas": (0.0, 0.9)}, *_BAD_SCHEDULE_FREE),
        one_chain=False,
    ),
}
"""One case per algorithm, by the name of its constructor."""


ANY_SHAPE: dict[str, Case] = {name: one for name, one in CASES.items() if not one.matrices}
"""Those that take parameters of any shape."""


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
    st.builds(dict, kind=st.sampled_from(["adam", "adamw"]), lr=_LR, amsgrad=_FLAG),
    st.builds(dict, kind=st.just("adagrad"), lr=_LR, lr_decay=_DECAY),
    st.builds(
        dict,
        kind=st.just("rmsprop"),
        lr=_LR,
        centered=_FLAG,
        momentum=st.sampled_from([0.0, 0.9]),
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


def _of_name(path: tuple[Any, ...], shape: tuple[int, ...]) -> str:
    return "first" if path[:1] == ("a",) else "others"


def _parts(lr: float = 0.1, decay: float = 0.5) -> Optimizer:
    first = chain(algorithms.sgd(lr=lr, momentum=0.9), ema(decay))
    parts = partition({"first": first, "others": algorithms.adamw(lr=lr)}, _of_name)
    return chain(clip_by_global_norm(1.0), parts)


CHAINS: dict[str, Case] = {
    "clip_by_global_norm, adamw": Case(_clipped, options=_some(lr=_LR, amsgrad=_FLAG)),
    "clip_by_value, decoupled_weight_decay, clip_by_global_norm, sgd": Case(
        _long, options=_some(lr=_LR, nesterov=_FLAG)
    ),
    "eps_root": Case(_rooted, options=_ROOTED),
    "clip_by_value, scale_by_rms or scale_by_adam, cautious without rescaling, descend": Case(
        _cautious_roots,
        options=_some(kind=st.sampled_from(["rms", "adam"]), lr=_LR, maximize=_FLAG),
    ),
    "clip_by_global_norm, scale_by_lion, cautious, descend": Case(
        _cautious_lion, options=_some(lr=_LR, betas=_BETAS, maximize=_FLAG)
    ),
    "trace, scale_by_sign, descend": Case(_signs, options=_some(lr=_LR, nesterov=_FLAG)),
    "clip_by_value, adamw, ema": Case(
        _averaged, options=_some(lr=_LR, decay=st.sampled_from([0.0, 0.9]))
    ),
    "clip_by_global_norm, partition of sgd with ema and adamw": Case(
        _parts, options=_some(lr=_LR, decay=st.sampled_from([0.0, 0.9])), one_chain=False
    ),
}
"""Chains in which the transforms stand, each in one of them, and the rules that options choose."""

ONE_CHAIN = {name: one for name, one in {**ANY_SHAPE, **CHAINS}.items() if one.one_chain}
"""Those that can be bound, scripted, captured and stored, with parameters of any shape."""
