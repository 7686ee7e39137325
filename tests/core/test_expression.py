"""Printed text of an optimizer, which is the expression that makes it."""

import pickle
from functools import partial
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_optim
from functional_optim import (
    NoState,
    Optimizer,
    Rule,
    accumulate,
    adam,
    adamw,
    algorithms,
    apply_if_finite,
    cautious,
    chain,
    clip_by_global_norm,
    clip_by_value,
    cosine,
    decoupled_weight_decay,
    ema,
    freeze,
    if_any,
    joined,
    labels,
    lion,
    lookahead,
    masked,
    matching,
    maximized,
    muon,
    on_global_step,
    partition,
    qhm,
    rprop,
    sam,
    sgd,
    stored,
    trace,
    warmup,
    weight_decay,
    with_shape,
)
from functional_optim.core.hyper import format_hyper
from functional_optim.transforms.decoupled_weight_decay import DECOUPLED_WEIGHT_DECAY
from tests.cases import CASES, CHAINS, INPUT_CASES
from tests.cases.chains import label_by_name
from tests.choices import case, examples

from .support import EVERY, noise

KNOWN = {name: getattr(functional_optim, name) for name in functional_optim.__all__}


def read(optimizer: Any) -> Any:
    """Evaluate the printed expression with the public names."""
    return read_text(repr(optimizer))


def read_text(text: str) -> Any:
    return eval(text, {**KNOWN, "is_bias": is_bias, "label_of": label_of})


def label_of(path: tuple[Any, ...], shape: tuple[int, ...]) -> str:
    return "matrices" if len(shape) == 2 else "rest"


def is_bias(path: tuple[Any, ...]) -> bool:
    return path[-1] == "bias"


LONG = joined([cosine(0.5 / k, to=0.1 / k, steps=9) for k in (1, 3, 7)], [9, 18])
RATE = warmup(5, then=LONG)
DECAYED = chain(decoupled_weight_decay(0.1), adamw(RATE, (on_global_step(RATE), 0.9)))
OTHERS: dict[str, Optimizer] = {
    "schedules": DECAYED,
    "an lr of its own": chain(DECOUPLED_WEIGHT_DECAY(weight_decay=0.1, lr=0.5), sgd(0.1)),
    "executor": adam(0.1).using(executor="auto"),
    "namespace": adam(0.1).using(executor="blocked", namespace="n"),
    "overrides": adamw(0.1)
    .override(("b", 0), lr=0.2, betas=(0.5, 0.6))
    .override(is_bias, weight_decay=0.0)
    .override(if_any(("c",)), lr=RATE),
    "a stage twice": chain(
        weight_decay(0.1), weight_decay(0.2), clip_by_global_norm(1.0), sgd(0.1)
    ).override(("b",), **{"weight_decay_2.weight_decay": 0.3}, momentum=0.5),
    "stored": stored(adamw(RATE, weight_decay=0.2), state="bfloat16"),
    "stored behind a total": chain(
        stored(
            chain(clip_by_global_norm(1.0), adamw(0.1)),
            param="bfloat16+stochastic",
            state={"exp_avg": "int8+stochastic"},
            seed=3,
            state_device="cpu",
        ).override(is_bias, lr=0.2),
        ema(0.9),
    ),
}


NAMES = labels({"matrices": matching("*weight") & with_shape(ndim=2)}, default="rest")
NESTED = partition({"matrices": sgd(0.1), "rest": chain(maximized(), sgd(0.2).links[-1])}, NAMES)
BOTH = partition({"matrices": sgd(0.1), "rest": adam()}, label_of)
COMPOSED: dict[str, Optimizer] = {
    "parts": partition({"matrices": muon(), "rest": adamw()}, label_of),
    "parts with overrides": partition({"matrices": freeze(), "rest": lion(0.1)}, NAMES).override(
        if_any(("x",)), **{"rest.lr": 0.5}
    ),
    "parts in parts": chain(
        clip_by_global_norm(1.0),
        partition(
            {"matrices": masked(NESTED, matching("a*")), "rest": chain(adam(), ema(0.9))}, NAMES
        ),
        lookahead(3),
    ),
    "parts behind ascent": chain(maximized(), NESTED),
    "ascent behind parts": chain(NESTED, maximized()),
    "two partitions": chain(BOTH, clip_by_value(1.0), BOTH),
    "a partition twice": chain(BOTH, BOTH),
    "masks": chain(
        masked(weight_decay(0.1), ("a",)),
        masked(chain(clip_by_value(1.0), adamw()), ~matching("*bias") | is_bias),
        freeze(("b", 0)),
        sgd(0.5),
    ),
    "all masked": chain(masked(adamw(), is_bias), freeze(~(matching("x") | is_bias))),
    "wrappers": chain(
        accumulate(2), apply_if_finite(3), sam(0.1), cautious(rescale=False), adam(maximize=True)
    ),
    "bare rules": chain(sgd(0.1, momentum=0.9).links[-1], trace(), adamw(0.1).links[-1]),
    "parts of adamw": chain(adamw(0.1).links[1], sgd(0.2)),
    "decays directly": qhm(weight_decay=0.1, weight_decay_type="direct"),
    "stored in a mask": chain(masked(stored(adamw(), state="bfloat16"), is_bias), sgd(0.1)),
    "a chain twice": chain(adamw(0.1), adamw(0.1), adamw(0.2)),
}


def test_what_is_printed_makes_an_equal_optimizer() -> None:
    """Fault 26: the text has public names and every option, for all algorithms and chains."""
    own = {name: one for name, one in INPUT_CASES.items() if name in algorithms.__all__}
    tables = {**CASES, **CHAINS, **own}
    defaults = {f"{name} by default": one.factory() for name, one in tables.items()}
    known = {**defaults, **EVERY, **OTHERS, **COMPOSED}
    for name, optimizer in known.items():
        with case(name=name):
            KNOWN.setdefault("label_by_name", label_by_name)
            text = repr(optimizer)  # repr tries constructors, which takes a while
            made = read_text(text)
            assert made == optimizer
            assert str(optimizer) == text
            assert ("\n" in text) == ("partition(" in text)
            assert pickle.loads(pickle.dumps(made)) == optimizer


@given(st.data())
@examples(30)
def test_options_that_are_drawn_are_printed(data: st.DataObject) -> None:
    """Fault 26: the printed text makes an equal optimizer for any options."""
    tables = {**CASES, **CHAINS}
    name = data.draw(st.sampled_from(sorted(tables)))
    KNOWN.setdefault("label_by_name", label_by_name)
    optimizer = tables[name].factory(**data.draw(tables[name].options))
    assert read(optimizer) == optimizer


def test_a_link_prints_what_makes_it() -> None:
    """Fault 26: links alone, links of optimizers, and custom stages print an expression."""
    made = [maximized(), cautious(rescale=False), ema(0.5), decoupled_weight_decay(0.1)]
    for link in (*made, *adamw().links, *sgd(momentum=0.9).links, *muon().links):
        with case(link=link):
            assert read(link) == link
    assert repr(decoupled_weight_decay(0.1)) == "decoupled_weight_decay(weight_decay=0.1)"
    assert repr(STILL(rate=0.5)) == "still(rate=0.5)"
    assert repr(chain(STILL(rate=0.5))) == "chain(still(rate=0.5))"


class StillHyper(NamedTuple):
    rate: float


def still_rule(
    param: Tensor, grad: Tensor, state: NoState, c: StillHyper
) -> tuple[Tensor, NoState]:
    return param, state


STILL = Rule(name="still", hyper=StillHyper, rule=still_rule)


def test_the_text_is_this() -> None:
    """Fault 26: the text has public names, the signature's order, and one line for each part."""
    assert repr(adamw()) == (
        "adamw(lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, amsgrad=False, "
        "maximize=False)"
    )
    assert repr(chain(clip_by_value(1.0), decoupled_weight_decay(0.5), rprop(0.1))) == (
        "chain(clip_by_value(clip_value=1.0), decoupled_weight_decay(weight_decay=0.5), "
        "rprop(lr=0.1, etas=(0.5, 1.2), step_sizes=(1e-06, 50.0), maximize=False))"
    )
    assert repr(chain(clip_by_value(1.0), COMPOSED["parts"])) == TEXT_OF_PARTS
    assert repr(OTHERS["overrides"]).partition(").override")[2] == (
        "(('b', 0), lr=0.2, betas=(0.5, 0.6)).override(is_bias, weight_decay=0.0)"
        ".override(if_any(('c',)), lr=warmup(5, then=joined([cosine(0.5, to=0.1, steps=9), "
        "cosine(0.16666666666666666, to=0.03333333333333333, steps=9), "
        "cosine(0.07142857142857142, to=0.014285714285714287, steps=9)], [9, 18]), start=0.0))"
    )
    assert repr(OTHERS["a stage twice"]).endswith(
        ".override(('b',), **{'weight_decay_2.weight_decay': 0.3}, momentum=0.5)"
    )
    assert repr(OTHERS["namespace"]).endswith(".using(executor='blocked', namespace='n')")


TEXT_OF_PARTS = """\
chain(
    clip_by_value(clip_value=1.0),
    partition(
        {
            'matrices': muon(lr=0.001, weight_decay=0.1, momentum=0.95, nesterov=True, \
ns_coefficients=(3.4445, -4.775, 2.0315), eps=1e-07, ns_steps=5, adjust_lr_fn=None),
            'rest': adamw(lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, \
amsgrad=False, maximize=False),
        },
        label_of,
    ),
)"""


class Table:
    """Schedule that holds many numbers."""

    def __init__(self) -> None:
        self.numbers = noise(0, 5000)

    def __call__(self, made: float) -> float:
        return 0.1

    def __repr__(self) -> str:
        return f"Table({self.numbers.tolist()})"


def test_tensors_and_functions_stay_short() -> None:
    """A number has as few digits as it needs, and a function is printed by its name."""
    numbers = noise(0, 5000)
    said = [
        (torch.tensor(0.1), "tensor(0.1)"),
        (torch.tensor([0.1]).reshape(()), "tensor(0.1)"),
        (torch.tensor(1 / 3), "tensor(0.33333334)"),
        (torch.tensor(0.1, dtype=torch.float64), "tensor(0.1, dtype=torch.float64)"),
        (
            torch.tensor(1 / 3, dtype=torch.float64),
            "tensor(0.3333333333333333, dtype=torch.float64)",
        ),
        (torch.tensor(0.1, dtype=torch.bfloat16), "tensor(0.1, dtype=torch.bfloat16)"),
        (torch.tensor(3), "tensor(3, dtype=torch.int64)"),
        (torch.tensor(1e-8, requires_grad=True), "tensor(1e-08, requires_grad=True)"),
        (torch.empty((), device="meta"), "a tensor that hides its number"),
        (lambda made: numbers[int(made)], "<lambda>"),
        (partial(is_bias, ("x",)), "functools.partial(<function is_bias"),
        ((is_bias, 0.9), "(is_bias, 0.9)"),
        ((0.5,), "(0.5,)"),
        (Table(), "Table([-"),
        (warmup(5, then=Table()), "warmup(5, then=Table([-"),
    ]
    for value, text in said:
        with case(text=text):
            assert format_hyper(value).startswith(text)
            assert format_hyper(value) == text or len(format_hyper(value)) <= 200
    every = adam(Table(), (torch.tensor(0.5), Table()), Table(), Table())
    assert len(repr(every)) <= 900
    assert "betas=(tensor(0.5), Table([-" in repr(every)


def test_a_number_that_torch_func_hides_is_said_to_be_hidden() -> None:
    seen: list[str] = []

    def loss(lr: torch.Tensor) -> torch.Tensor:
        seen.append(repr(sgd(lr)))
        return lr

    torch.func.vmap(loss)(torch.rand(1000))
    assert "sgd(lr=a tensor that hides its number, momentum=0.0" in seen[0]


def test_a_link_that_inherits_is_written_as_its_own_call_wherever_it_is() -> None:
    for optimizer, told in [
        (chain(sgd(lr=0.5), decoupled_weight_decay(0.1)), "decoupled_weight_decay("),
        (
            chain(sgd(lr=0.5), masked(decoupled_weight_decay(0.1), with_shape(ndim=2))),
            "masked(decoupled_weight_decay(",
        ),
    ]:
        with case(optimizer=optimizer):
            assert told in repr(optimizer) and ".links[" not in repr(optimizer)
            assert read(optimizer) == optimizer
