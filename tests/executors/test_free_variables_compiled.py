"""Free variables of rules: constants are part of a kernel's key, and others prevent a kernel."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from functional_optim import NoState, Optimizer, Rule, Transform, chain, muon, sgd, stored
from functional_optim.kernels.free_variables import free_variables

from ..choices import case
from .rules import stateless
from .support import chunk_executor, why_not

ASKED = ("auto", "blocked", "compiled")
BOX = {"k": 1.0}
LIST = [1.0]
TENSOR = torch.tensor(1.0)
K = 1.0
PAIR = (1.0, 2.0)
SETTINGS = ModuleType("settings_of_mine")
SETTINGS.k = 1.0  # type: ignore[attr-defined]


class Config:
    k = 1.0


@dataclass
class Changing:
    k: float = 1.0


@dataclass(frozen=True)
class Frozen:
    k: float = 1.0


class Kind(Enum):
    ONE = 1.0


OBJECT, FROZEN = Changing(), Frozen()


def double(g: Tensor) -> Tensor:
    return g * 2.0


def by_box(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * g * BOX["k"], s


def by_list(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * g * LIST[0], s


def by_tensor(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * g * TENSOR.item(), s


def by_object(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * g * OBJECT.k, s


def by_default(p: Tensor, g: Tensor, s: NoState, c: Any, box: dict[str, float] = BOX) -> Any:
    return p - c.lr * g * box["k"], s


def by_closure() -> Callable[..., Any]:
    box = BOX

    def rule(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
        return p - c.lr * g * box["k"], s

    return rule


def scaled_by_box(g: Tensor) -> Tensor:
    return g * BOX["k"]


def by_helper(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * scaled_by_box(g), s


@torch.no_grad()
def decorated(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * g * BOX["k"], s


class Scale:
    """Class whose methods read values that can change."""

    k = 1.0

    def __call__(self, g: Tensor) -> Tensor:
        return g * BOX["k"]

    @classmethod
    def scaled(cls, g: Tensor) -> Tensor:
        return g * cls.k


def by_method(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * Scale()(g), s


def by_class_method(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * Scale.scaled(g), s


def by_name_of_global(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * g * globals()["BOX"]["k"], s


def by_name_of_attribute(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * g * getattr(Scale, "k"), s  # noqa: B009  the name may be a variable


def change_box(value: float) -> None:
    BOX["k"] = LIST[0] = Scale.k = OBJECT.k = value
    TENSOR.fill_(value)


MUTABLE: dict[str, Any] = {
    "a dict": by_box,
    "a list": by_list,
    "a tensor": by_tensor,
    "an object": by_object,
    "a default": by_default,
    "a closure": by_closure(),
    "a helper": by_helper,
    "a partial": functools.partial(by_default, box=BOX),
    "a decorated rule": decorated,
    "a method": by_method,
    "a class method": by_class_method,
    "a global by its name": by_name_of_global,
    "an attribute by its name": by_name_of_attribute,
}


def by_constant(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * g * K, s


def by_pair(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * g * PAIR[0], s


def by_module(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * g * SETTINGS.k, s


def by_class(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * g * Config.k, s


def by_frozen(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * g * FROZEN.k, s


def by_double(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - c.lr * double(g), s


def by_inner(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    return p - sum(c.lr * g * K for _ in range(1)), s


def one(g: Tensor) -> Tensor:
    return g * 1.0


def three(g: Tensor) -> Tensor:
    return g * 3.0


def change_constants(value: float) -> None:
    global K, PAIR, FROZEN, double  # noqa: PLW0603  a notebook does so
    K, PAIR, FROZEN = value, (value, 2.0), Frozen(value)
    SETTINGS.k = Config.k = value  # type: ignore[attr-defined]
    double = one if value == 1.0 else three


CONSTANT = (by_constant, by_pair, by_module, by_class, by_frozen, by_double, by_inner)
RULES: dict[str, tuple[Any, Callable[[float], None]]] = {
    **{name: (rule, change_box) for name, rule in MUTABLE.items()},
    **{rule.__name__: (rule, change_constants) for rule in CONSTANT},
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    change_box(1.0)
    change_constants(1.0)


def values(optimizer: Optimizer, change: Callable[[float], None]) -> list[list[float]]:
    """Return parameters after each step with a new value: pure, in place, and bound."""
    found = []
    for elements in (3, 5_000):
        change(1.0)
        param, grad = torch.ones(elements), torch.ones(elements)
        pure, state, written = param, optimizer.init(param), param.clone()
        own = optimizer.init(written)
        bound = optimizer.bind(param.clone())
        for value in (1.0, 3.0, 3.0, 1.0):
            change(value)
            pure, state = optimizer.update(pure, grad, state)
            optimizer.update_(written, grad, own)
            bound.step(grad)
            found.append([round(t[0].item(), 6) for t in (pure, written, bound.params)])
    return found


WANTED = [[value] * 3 for value in (0.7, -0.2, -1.1, -1.4)] * 2


def test_every_executor_follows_a_value_that_changes() -> None:
    """Fault 5: kernels kept the first value of a variable for the whole process."""
    for name, (rule, change) in RULES.items():
        for executor in ("reference", *ASKED):
            with case(name=name, executor=executor):
                assert values(stateless(rule).using(executor=executor), change) == WANTED


def test_what_may_change_is_not_compiled_and_the_reason_says_how_to_go_on() -> None:
    """Fault 5: a rule that reads a mutable variable runs by the reference."""
    for name, rule in MUTABLE.items():
        for executor in ("auto", "blocked", "compiled"):
            with case(name=name, executor=executor):
                said = why_not(executor, stateless(rule), torch.ones(5_000))
                assert said.startswith("reference")
                assert "mine reads" in said and "make it a hyper-parameter" in said


def test_a_replaced_function_of_the_same_name_is_another() -> None:
    """Fault 5: a notebook cell that runs again, changed or not, replaces its functions."""
    text = (
        "def helper(g):\n    return g * {0}\n"
        "def rule(p, g, s, c):\n    return p - c.lr * helper(g), s"
    )
    cell: dict[str, Any] = {"__name__": "__main__"}
    found = []
    exec(text.format(1.0), cell)
    first = stateless(cell["rule"]).using(executor="auto")
    for value in (1.0, 3.0, 1.0):
        exec(text.format(value), cell)
        for optimizer in (first, stateless(cell["rule"]).using(executor="auto")):
            param = torch.ones(5_000)
            made = optimizer.update(param, param, optimizer.init(param))[0]
            found.append(round(made[0].item(), 6))
    assert found == [0.7, 0.7, 0.1, 0.1, 0.7, 0.7]


class NoHyper(NamedTuple):
    pass


def scaled(g: Tensor, p: Tensor, s: NoState, c: NoHyper) -> tuple[Tensor, NoState]:
    return g * K, s


class OwnHyper(NamedTuple):
    lr: float

    @property
    def scaled(self) -> float:
        return self.lr * K


class OwnState(NamedTuple):
    last: Tensor

    def scaled(self) -> Tensor:
        return self.last * K


def by_property(p: Tensor, g: Tensor, s: OwnState, c: OwnHyper) -> tuple[Tensor, OwnState]:
    return p - c.scaled * g, s


def by_state(p: Tensor, g: Tensor, s: OwnState, c: OwnHyper) -> tuple[Tensor, OwnState]:
    return p - c.lr * s._replace(last=g).scaled(), s


def own_init(param: Tensor, hyper: OwnHyper) -> OwnState:
    return OwnState(torch.zeros_like(param))


def test_methods_of_what_a_rule_is_given_are_part_of_it() -> None:
    """Fault 5: kernels follow values that methods of hyper-parameters and of state read."""
    for rule in (by_property, by_state):
        stage = Rule(name="mine", hyper=OwnHyper, state=OwnState, init=own_init, rule=rule)
        for executor in ("reference", *ASKED):
            with case(rule=rule.__name__, executor=executor):
                optimizer = chain(stage(lr=0.3)).using(executor=executor)
                assert values(optimizer, change_constants) == WANTED


SCALED = Transform(name="scaled", hyper=NoHyper, transform=scaled)


def test_transforms_stored_stages_and_matrices_follow_it_too() -> None:
    """Fault 5: kernels of these stages follow a constant that changes."""
    chains = {
        "a transform": lambda: chain(SCALED(), sgd(lr=0.3)),
        "a stored one": lambda: stored(stateless(by_constant), param="bfloat16+master"),
        "of matrices": lambda: chain(SCALED(), muon(lr=0.3, weight_decay=0.0, momentum=0.0)),
    }
    for name, build in chains.items():
        with case(name=name):
            dtype = torch.bfloat16 if name == "a stored one" else torch.float32
            param = torch.eye(16, dtype=dtype) * 2.0
            grads = [torch.ones_like(param), *[torch.eye(16, dtype=dtype)] * 2]
            made = {}
            for executor in ("reference", "auto"):
                optimizer = build().using(executor=executor)
                params = [param.clone() for _ in range(3)]
                state = optimizer.init(params)
                for value in (1.0, 3.0):
                    change_constants(value)
                    params, state = optimizer.update(params, grads, state)
                made[executor] = params
            assert all(map(torch.equal, made["auto"], made["reference"]))


@functools.lru_cache
def kept(k: int) -> float:
    return math.sqrt(k) * K


def ordinary(p: Tensor, g: Tensor, s: NoState, c: Any, *, power: float = 2.0) -> Any:
    kinds = {Kind.ONE: torch.float32}
    high: Tensor | None = functional.relu(g).to(kinds[Kind.ONE]) * math.pi

    def inner(x: Tensor) -> Tensor:
        return x * power if high is not None else x

    return p - c.lr * inner(torch.clamp(high, max=math.inf)) * kept(4), NoState() if s else s


def test_functions_modules_classes_and_constants_are_compiled() -> None:
    for name in ("auto", "blocked"):
        assert "reads" not in why_not(name, stateless(ordinary), torch.ones(5_000))
        assert not why_not(name, stateless(ordinary), torch.ones(5_000)).startswith("reference")


def test_numbers_that_are_equal_are_told_apart() -> None:
    keys = []
    for value in (0.0, -0.0, 0, False, math.nan, math.nan):
        change_constants(value)
        keys.append(free_variables(stateless(by_constant).stages).key)
    assert len(set(keys)) == 5
    assert keys[-1] == keys[-2]


def writes_a_global(p: Tensor, g: Tensor, s: NoState, c: Any) -> Any:
    global K  # noqa: PLW0603  what is refused
    K = 1.0
    return p - c.lr * g, s


def test_a_rule_that_writes_a_global_is_not_compiled() -> None:
    assert "writes 'K'" in why_not("auto", stateless(writes_a_global), torch.ones(5_000))


def test_no_rule_of_this_package_reads_anything_that_changes() -> None:
    assert not free_variables(muon().stages).reads
    assert chunk_executor("auto").exact
