"""Functions that take one chain for all leaves refuse every other optimizer before they start."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    export_step,
    mapped_state,
    stored,
    to_torch_state_dict,
)
from hooks import apply_optimizer_in_backward

from ..choices import case
from .trees import COMPOSED, params_of

WAYS: dict[str, Callable[[Any, Any], object]] = {
    "bind": lambda optimizer, params: optimizer.bind(params),
    "capturable": lambda optimizer, params: optimizer.bind(params, capturable=True),
    "script": lambda optimizer, params: optimizer.script(params),
    "export_step": export_step,
    "stored": lambda optimizer, params: stored(optimizer, param="bfloat16"),
    "mapped_state": lambda optimizer, params: mapped_state(optimizer, params, "."),
    "torch": lambda optimizer, params: to_torch_state_dict(
        optimizer, params, optimizer.init(params)
    ),
}


def keeps(optimizer: Optimizer) -> bool:
    return bool(optimizer.init(params_of()).shared)


@pytest.mark.parametrize("name", WAYS)
def test_it_says_which_stage_stands_against_it(name: str) -> None:
    for chosen, make in COMPOSED.items():
        if chosen == "lookahead":  # one chain without shared scalars
            continue
        with case(optimizer=chosen), pytest.raises(TypeError, match="one chain for all leaves"):
            WAYS[name](make(), params_of())


def test_explain_takes_every_optimizer() -> None:
    for chosen, make in COMPOSED.items():
        said = [line.strip() for line in make().explain(params_of()).splitlines()]
        counts = [int(line.split()[0]) for line in said if line[0].isdigit()]
        with case(optimizer=chosen, said=said):
            assert sum(counts) == len(params_of())


@pytest.mark.parametrize("name", [one for one, make in COMPOSED.items() if keeps(make())])
def test_numbers_of_all_parameters_are_not_made_part_by_part(name: str) -> None:
    """apply_optimizer_in_backward refuses optimizers that need the gradients of all leaves."""
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="needs the gradients of all"):
        apply_optimizer_in_backward(COMPOSED[name](), [weight], {})
