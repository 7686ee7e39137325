"""Error messages about arguments: short, with the mistake and its correction."""

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    lamb,
    sgd,
    stored,
)
from functional_optim.core.format import MAX_LENGTH, format_value
from functional_optim.transforms.clip_by_value import CLIP_BY_VALUE
from tests.choices import each_value

LIMIT = 400
"""Maximum number of characters of a message, including the given value."""

CLIP = clip_by_value(1.0)
OF_TORCH = torch.optim.AdamW([torch.ones(1, requires_grad=True)])

MISUSED: list[tuple[tuple[Any, ...], str]] = [
    (([CLIP, sgd()],), r"chain\(\*parts\)"),
    ((CLIP, adamw), r"call it: adamw\(\.\.\.\)"),
    ((clip_by_value, sgd()), r"call it: clip_by_value\(\.\.\.\)"),
    ((CLIP_BY_VALUE, sgd()), "called with its hyper-parameters"),
    ((CLIP, sgd().stages[-1]), "called with its hyper-parameters"),
    ((CLIP, torch.optim.AdamW), r"as_functional_optim\(AdamW, \.\.\.\)"),
    ((OF_TORCH, sgd()), "from_torch"),
    ((torch.ones(9, 9), sgd()), r"a tensor of shape \(9, 9\)"),
    ((None, sgd()), "got None at place 0"),
    ((CLIP, 1.0), "got 1.0 at place 1"),
    (("sgd",), "got 'sgd' at place 0"),
]


@each_value(misused=MISUSED)
def test_a_chain_of_wrong_parts_says_what_to_write(misused: tuple[tuple[Any, ...], str]) -> None:
    """The message is short and names the way out."""
    parts, way_out = misused
    with pytest.raises(TypeError, match=way_out) as caught:
        chain(*parts)
    assert str(caught.value).startswith("chain takes links")
    assert len(str(caught.value)) <= LIMIT


def test_a_stage_refuses_unknown_and_missing_names() -> None:
    stage = sgd().stages[-1]
    with pytest.raises(TypeError, match="sgd has no hyper-parameter 'beta'; it has lr, mom"):
        stage(lr=0.1, beta=0.9)
    with pytest.raises(TypeError, match="sgd needs a value for dampening, nesterov"):
        stage(lr=0.1, momentum=0.9)


def test_a_link_and_an_optimizer_are_written_in_a_line() -> None:
    """Many messages contain the repr of a link or an optimizer."""
    assert repr(CLIP) == "clip_by_value(clip_value=1.0)"
    assert repr(CLIP.stage) == "Transform clip_by_value(clip_value)"
    kept = stored(sgd(0.5), param="bfloat16+kahan")
    assert repr(kept.stages[-1]).startswith("StoredRule ")
    assert len(repr(kept)) <= LIMIT
    several = chain(clip_by_global_norm(1.0), CLIP, adamw())
    assert len(repr(several)) <= LIMIT
    assert "\n" not in repr(several)
    optimizer = chain(clip_by_value(2.0), sgd(0.1, momentum=0.5)).using(executor="blocked")
    assert str(optimizer) == (
        "chain(clip_by_value(clip_value=2.0), sgd(lr=0.1, momentum=0.5, dampening=0.0, "
        "weight_decay=0.0, nesterov=False, maximize=False)).using(executor='blocked')"
    )


MISUSES: list[Callable[[Any], Any]] = [
    lambda given: TorchOptimizer([torch.ones(1)], given),
    stored,
    lambda given: adamw(lr=given),
    lambda given: adamw().override(given, lr=0.1),
    lambda given: adamw(amsgrad=given),
]
LONG: list[Any] = [
    [adamw()] * 9,
    {f"layer.{i}": torch.ones(2) for i in range(99)},
    [torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(99)])],
]


@each_value(misuse=range(len(MISUSES)), given=range(len(LONG)))
def test_what_was_given_is_never_printed_at_length(misuse: int, given: int) -> None:
    with pytest.raises(TypeError) as caught:
        MISUSES[misuse](LONG[given])
    assert len(str(caught.value)) <= LIMIT


def test_brief_is_one_short_line() -> None:
    for value in (None, 1.5, "x" * 999, torch.ones(5, 5), torch.nn.Linear(2, 2), sgd, [sgd()] * 9):
        assert len(format_value(value)) <= MAX_LENGTH
        assert "\n" not in format_value(value)
    assert format_value(0.5) == "0.5"
    assert format_value(torch.tensor(2.0)) == "tensor(2.)"
    assert format_value(sgd) == "the function sgd"


def test_the_calls_of_torch_are_answered_with_the_right_ones() -> None:
    """Fault 33: a user of torch tries these calls first."""
    model = torch.nn.Linear(2, 1)
    named = dict(model.named_parameters())
    given: list[Callable[[], Any]] = [
        lambda: adamw(model.parameters(), lr=1e-3),  # type: ignore[misc, arg-type]
        lambda: adamw(model.parameters()),  # type: ignore[arg-type]
        lambda: adamw(model),  # type: ignore[arg-type]
        lambda: adamw(list(named.items()), lr=0.1),  # type: ignore[misc, arg-type]
        lambda: adamw([{"params": list(named.values())}]),  # type: ignore[arg-type]
        lambda: adamw(params=model.parameters(), lr=0.1),  # type: ignore[call-arg]
    ]
    for call in given:
        with pytest.raises(TypeError, match=r"write TorchOptimizer\(params, adamw\(lr=\.\.\.\)\)"):
            call()
    for name in ("step", "zero_grad", "state_dict", "param_groups"):
        assert not hasattr(adamw(), name)
        with pytest.raises(AttributeError, match=rf"TorchOptimizer\(params, optimizer\)\.{name}"):
            getattr(adamw(), name)
    with pytest.raises(AttributeError, match="has no attribute 'other'$"):
        _ = adamw().other
    with pytest.raises(TypeError, match=r"write as_functional_optim\(AdamW, "):
        TorchOptimizer(model.parameters(), torch.optim.AdamW)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"call it: adamw\(\.\.\.\)"):
        TorchOptimizer(model.parameters(), adamw)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="parameters are the first argument"):
        TorchOptimizer(adamw(), model.parameters())  # type: ignore[arg-type]


def one() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2))


def state_of(optimizer: Optimizer) -> tuple[Any, Any, Any]:
    params = torch.ones(2)
    return params, params, optimizer.init(params)


def changed_group(optimizer: Optimizer, **options: float) -> None:
    param = one()
    made = TorchOptimizer([param], optimizer)
    param.grad = torch.ones(2)
    made.step()
    made.param_groups[0].update(options)
    made.step()


def test_an_error_about_a_value_names_the_constructor() -> None:
    """Fault 33: the error names ``adamw``, and not its stage ``adam``."""
    for make, begins in [
        (lambda: adamw(lr=-1.0), "adamw: lr must"),
        (lambda: adamw(weight_decay=-1.0), "adamw: weight_decay must"),
        (lambda: adamw(eps_root=-1.0), "adamw: eps_root must"),
        (lambda: lamb(betas=(1.0, 0.5)), r"lamb: betas\[0\] must"),
        (lambda: sgd(nesterov=True), "sgd: nesterov needs"),
        (lambda: adamw().replace(lr=-1.0), "adamw: lr must"),
        (lambda: adamw().replace(betas=(2.0, 0.9)), r"adamw: betas\[0\] must"),
        (lambda: adamw().override(("a",), weight_decay=-1.0), "adamw: weight_decay must"),
        (lambda: adamw().update(*state_of(adamw()), lr=-1.0), "adamw: lr must"),
        (lambda: TorchOptimizer([{"params": [one()], "lr": -1.0}], adamw()), "adamw: lr must"),
        (lambda: changed_group(adamw(), eps=-1.0), "adamw: eps must"),
    ]:
        with pytest.raises(ValueError, match=f"^{begins}"):
            make()
    assert inspect.signature(adamw).parameters["weight_decay"].default == 1e-2
    assert pickle.loads(pickle.dumps(adamw)) is adamw
