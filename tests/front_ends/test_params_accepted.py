"""Parameters that TorchOptimizer accepts, and torch's types of errors for all others."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from functional_optim import TorchOptimizer, adam, adamw, lbfgs, sgd
from tests.choices import case, each

from .support import parameters, params_of, run, set_grads


def pair() -> list[torch.nn.Parameter]:
    return parameters()[:2]


def ours(params: Any) -> TorchOptimizer:
    return TorchOptimizer(params, adam(0.1))


def torchs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, 0.1)


TAKEN: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "iterator": iter,
    "generator": lambda params: (param for param in params),
    "dict values": lambda params: dict(enumerate(params)).values(),
    "names": lambda params: [("a", params[0]), ("b", params[1])],
    "names from an iterator": lambda params: zip("ab", params, strict=True),
    "group": lambda params: [{"params": params}],
    "group of a tuple": lambda params: [{"params": tuple(params)}],
    "group of an iterator": lambda params: [{"params": iter(params)}],
    "group of a generator": lambda params: [{"params": (param for param in params)}],
    "group of named ones": lambda params: [{"params": zip("ab", params, strict=True)}],
    "groups of a tensor": lambda params: [{"params": param} for param in params],
    "groups from a generator": lambda params: ({"params": [param]} for param in params),
    "an empty group too": lambda params: [{"params": []}, {"params": params}],
    "ParameterList": torch.nn.ParameterList,
}


@each(name=TAKEN)
def test_what_torch_takes_is_taken(name: str) -> None:
    mine, theirs = pair(), pair()
    got, want = ours(TAKEN[name](mine)), torchs(TAKEN[name](theirs))
    sizes = [[len(group["params"]) for group in one.param_groups] for one in (got, want)]
    assert sizes[0] == sizes[1]
    assert all(a is b for a, b in zip(params_of(got), mine, strict=True))
    names = [[group.get("param_names") for group in one.param_groups] for one in (got, want)]
    assert names[0] == names[1]
    set_grads(mine, 0)
    got.step()
    assert [int(got.state[param]["step"]) for param in mine] == [1, 1]


def test_the_parameters_of_a_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    for params in (
        model.parameters(),
        model.named_parameters(),
        [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.0}],
    ):
        optimizer = ours(params)
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert len(params_of(optimizer)) == 4


class Broken:
    def __iter__(self) -> Iterator[Any]:
        raise TypeError("cannot be iterated over")


REFUSED: dict[str, tuple[type[Exception], Callable[[list[Any]], Any]]] = {
    "a tensor": (TypeError, lambda params: params[0]),
    "None": (TypeError, lambda params: None),
    "a number": (TypeError, lambda params: 3),
    "a string": (TypeError, lambda params: "parameters"),
    "a dict": (TypeError, lambda params: {"params": params}),
    "numbers": (TypeError, lambda params: [1.0, 2.0]),
    "a tensor and a number": (TypeError, lambda params: [params[0], 1.0]),
    "a tensor and a group": (TypeError, lambda params: [params[0], {"params": params[1]}]),
    "a group and a tensor": (TypeError, lambda params: [{"params": params[0]}, params[1]]),
    "lists of tensors": (TypeError, lambda params: [params]),
    "broken": (TypeError, lambda params: Broken()),
    "group of None": (TypeError, lambda params: [{"params": None}]),
    "group of a number": (TypeError, lambda params: [{"params": 3}]),
    "group of a set": (TypeError, lambda params: [{"params": set(params)}]),
    "group of a dict": (TypeError, lambda params: [{"params": {"a": params[0]}}]),
    "group of numbers": (TypeError, lambda params: [{"params": [1]}]),
    "named numbers": (TypeError, lambda params: [("a", 1)]),
    "group without params": (KeyError, lambda params: [{"lr": 0.1}]),
    "nothing": (ValueError, lambda params: []),
    "an empty generator": (ValueError, lambda params: (param for param in ())),
    "some with names": (ValueError, lambda params: [("a", params[0]), params[1]]),
    "some without names": (ValueError, lambda params: [params[0], ("a", params[1])]),
    "groups some with names": (
        ValueError,
        lambda params: [{"params": [("a", params[0])]}, {"params": params[1]}],
    ),
    "groups some without names": (
        ValueError,
        lambda params: [{"params": params[1]}, {"params": [("a", params[0])]}],
    ),
    "one in two groups": (
        ValueError,
        lambda params: [{"params": params}, {"params": params[:1]}],
    ),
    "no leaf": (ValueError, lambda params: [params[0] * 2]),
}


@each(name=REFUSED, make=[torchs, ours])
def test_what_torch_refuses_is_refused_with_its_type(name: str, make: Any) -> None:
    error, given = REFUSED[name]
    with pytest.raises(error):
        make(given(pair()))


def test_a_module_or_a_dict_in_place_of_parameters_is_named() -> None:
    """The error says what to write. torch's is that a module is not iterable."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"the module Sequential: write module\.named_parameters"):
        ours(model)
    with pytest.raises(TypeError, match=r"got a dict: write params\.items\(\)"):
        ours(dict(model.named_parameters()))
    with pytest.raises(TypeError, match=r"got a dict: write \[group\]"):
        ours({"params": model.parameters()})
    for make in (adamw().init, adamw().bind):
        with pytest.raises(TypeError, match=r"got Sequential; .*dict\(module\.named_parameters"):
            make(model)
        with pytest.raises(TypeError, match="got generator; give a list of tensors or a dict"):
            make(model.parameters())


ADDED = [
    name for name in REFUSED if name.startswith("group ") or name in ("a tensor", "None", "numbers")
]


@each(name=ADDED)
def test_a_refused_group_leaves_the_optimizer_as_it_was(name: str) -> None:
    error, given = REFUSED[name]
    optimizer = ours(pair())
    groups, state = list(optimizer.param_groups), dict(optimizer.state)
    found = given(parameters(2)[:2])
    with pytest.raises(error):
        optimizer.add_param_group(found[0] if isinstance(found, list) else found)
    assert optimizer.param_groups == groups
    assert list(optimizer.state) == list(state)
    run(optimizer, 0)


def test_one_parameter_twice_in_a_group_is_a_user_warning() -> None:
    first = pair()[0]
    for make in (torchs, ours):
        with pytest.warns(UserWarning, match="duplicate parameters"):
            make([first, first])


@each(
    given=[
        (torch.zeros(2, dtype=torch.int64), "dtype"),
        (torch.zeros(2, dtype=torch.bool), "dtype"),
        (torch.eye(2).to_sparse(), "layout"),
        (torch.zeros(1).expand(3), "stride 0"),
    ]
)
def test_what_no_rule_can_step_is_refused(given: Any) -> None:
    tensor, told = given
    with pytest.raises(ValueError, match=told):
        ours([tensor])


@each(not_one=[None, adam, torch.optim.Adam, "adam", 0.1])
def test_the_second_argument_is_an_optimizer(not_one: Any) -> None:
    with pytest.raises(TypeError, match="functional_optim.Optimizer"):
        TorchOptimizer(pair(), not_one)


def test_the_argument_that_was_removed_is_refused() -> None:
    """The error says that ``flat`` was removed, for every kind of optimizer."""
    for optimizer in (adamw(), lbfgs()):
        for flat in (True, False):
            removed: dict[str, Any] = {"flat": flat}
            with (
                case(optimizer=optimizer, flat=flat),
                pytest.raises(TypeError, match="flat of TorchOptimizer was removed"),
            ):
                TorchOptimizer(pair(), optimizer, **removed)


def test_overrides_by_path_become_groups() -> None:
    first, second = pair()
    optimizer = TorchOptimizer(
        [("a", first), ("b", second)], sgd(0.1).override(("a",), lr=0.2, momentum=0.5)
    )
    groups = [(group["params"], group["lr"]) for group in optimizer.param_groups]
    assert groups == [([first], 0.2), ([second], 0.1)]
