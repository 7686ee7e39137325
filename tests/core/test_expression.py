"""What is printed of an optimizer is the expression that makes it."""

from functools import partial
from typing import Any

import torch

from functional_optim import (
    Optimizer,
    adam,
    adamw,
    algorithms,
    chain,
    clip_by_global_norm,
    cosine,
    decoupled_weight_decay,
    ema,
    if_any,
    joined,
    on_global_step,
    schedules,
    sgd,
    stored,
    warmup,
    weight_decay,
)
from functional_optim.core.hyper import shown
from functional_optim.testing import CASES, INPUT_CASES
from functional_optim.transforms.decoupled_weight_decay import DECOUPLED_WEIGHT_DECAY
from tests.choices import case

from .support import EVERY, noise


def read(optimizer: Optimizer) -> Any:
    """What the text makes, where stages go by their names."""
    known = {name: getattr(schedules, name) for name in schedules.__all__}
    made = [one.stage.made_of(one.hyper) or ("", (one,), {}) for one in optimizer.links]
    known |= {link.stage.name: link.stage for _, links, _ in made for link in links}
    known |= {
        "chain": chain,
        "stored": stored,
        "if_any": if_any,
        "tensor": torch.tensor,
        "is_bias": is_bias,
    }
    return eval(repr(optimizer), known)


def is_bias(path: tuple[Any, ...]) -> bool:
    return path[-1] == "bias"


LONG = joined([cosine(0.5 / k, to=0.1 / k, steps=9) for k in (1, 3, 7)], [9, 18])
RATE = warmup(5, then=LONG)
DECAYED = chain(decoupled_weight_decay(0.1), adamw(RATE, (on_global_step(RATE), 0.9)))
OTHERS: dict[str, Optimizer] = {
    "schedules": DECAYED,
    "an lr of its own": chain(DECOUPLED_WEIGHT_DECAY(weight_decay=0.1, lr=0.5), sgd(0.1)),
    "executor": adam(0.1).using(executor="auto"),
    "namespace": adam(0.1).using(executor="script", namespace="n"),
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


def test_what_is_printed_makes_an_equal_optimizer() -> None:
    """Every algorithm, with every value that it has; the stages by their names."""
    own = {name: one for name, one in INPUT_CASES.items() if name in algorithms.__all__}
    defaults = {f"{name} by default": one.factory() for name, one in {**CASES, **own}.items()}
    for name, optimizer in {**defaults, **EVERY, **OTHERS}.items():
        with case(name=name):
            assert read(optimizer) == optimizer
            assert str(optimizer) == repr(optimizer)
            assert "\n" not in repr(optimizer)


def test_the_text_is_this() -> None:
    assert repr(OTHERS["an lr of its own"]) == (
        "chain(maximize(maximize=False), decoupled_weight_decay(lr=0.5, weight_decay=0.1), "
        "weight_decay(weight_decay=0.0), "
        "sgd(lr=0.1, momentum=0.0, dampening=0.0, nesterov=False))"
    )
    assert repr(OTHERS["overrides"]).partition(").override")[2] == (
        "(('b', 0), lr=0.2, betas=(0.5, 0.6)).override(is_bias, weight_decay=0.0)"
        ".override(if_any(('c',)), lr=warmup(5, then=joined([cosine(0.5, to=0.1, steps=9), "
        "cosine(0.16666666666666666, to=0.03333333333333333, steps=9), "
        "cosine(0.07142857142857142, to=0.014285714285714287, steps=9)], [9, 18]), start=0.0))"
    )
    assert repr(OTHERS["a stage twice"]).endswith(
        ".override(('b',), **{'weight_decay_2.weight_decay': 0.3}, momentum=0.5)"
    )
    assert repr(OTHERS["namespace"]).endswith(".using(executor='script', namespace='n')")


class Table:
    """A schedule that holds many numbers."""

    def __init__(self) -> None:
        self.numbers = noise(0, 5000)

    def __call__(self, made: float) -> float:
        return 0.1

    def __repr__(self) -> str:
        return f"Table({self.numbers.tolist()})"


def test_tensors_and_functions_stay_short() -> None:
    """A number in as many digits as it takes, and a function by its name."""
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
            assert shown(value).startswith(text)
            assert shown(value) == text or len(shown(value)) <= 200
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
