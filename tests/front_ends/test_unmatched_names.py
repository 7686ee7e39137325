"""Names that select no parameter: every front-end over parameters refuses them."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    DistributedOptimizer,
    Optimizer,
    TorchOptimizer,
    accumulate,
    adamw,
    chain,
    freeze,
    if_any,
    labels,
    masked,
    matching,
    partition,
    sgd,
    weight_decay,
    with_shape,
)
from functional_optim.frontends.local_optimizer import local_optimizer, resolve_recipe
from functional_optim.optimizer.pointwise_check import require_pointwise
from functional_optim.remote.chain_groups import ChainGroups
from functional_optim.remote.placement import PlacedGroup, PlacedParam
from hooks.named_groups import NamedGroups
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from tests.choices import case
from tests.composition.trees import params_of

CHAINS: dict[str, Callable[[Any], Optimizer]] = {
    "of one": lambda where: adamw(0.1).override(where, weight_decay=0.0),
    "of several": lambda where: chain(accumulate(2), adamw(0.1)).override(where, weight_decay=0.0),
}


def _over_threads(params: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    placement = {name: f"worker{place % 2}" for place, name in enumerate(params)}
    DistributedOptimizer.over_threads(optimizer, list(params.items()), placement).close()


def _sharded(params: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    def made(group: Any) -> None:
        ZeroRedundancyOptimizer(list(params.items()), optimizer, process_group=group)

    LocalWorld(2).run(made)


OVER_PARAMS: dict[str, Callable[[Mapping[str, Tensor], Optimizer], object]] = {
    "TorchOptimizer": lambda params, one: TorchOptimizer(list(params.items()), one),
    "local_optimizer": lambda params, one: local_optimizer(one, list(params.items())),
    "the groups of step_hook": NamedGroups,
    "DistributedOptimizer": _over_threads,
    "ZeroRedundancyOptimizer": _sharded,
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("way", OVER_PARAMS)
def test_a_misspelt_name_is_said(way: str, name: str) -> None:
    params = {key: one.requires_grad_() for key, one in params_of().items()}
    first = next(iter(params))
    with pytest.raises(ValueError, match=rf"matches no parameter; the parameters are '{first}'"):
        OVER_PARAMS[way](params, CHAINS[name](("heda",)))
    for where in ((first,), if_any(("heda",))):
        with case(where=where):
            OVER_PARAMS[way](params, CHAINS[name](where))


def test_of_parameters_without_names_the_numbers_are_named() -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    with pytest.raises(ValueError, match="none but numbers .'0', '1', '2'"):
        TorchOptimizer(params, CHAINS["of one"](("weight",)))
    grouped = [{"params": params[:1]}, {"params": params[1:]}]
    TorchOptimizer(grouped, CHAINS["of one"]((2,)))


BY_NAME: dict[str, Optimizer] = {
    "freeze": chain(freeze(("head",)), adamw(0.1)),
    "mask": chain(masked(weight_decay(0.1), with_shape(bool) & ~matching("*bias")), adamw(0.1)),
    "label": partition(
        {"head": sgd(0.1), "rest": adamw(0.1)}, labels({"head": matching("head*")}, default="rest")
    ),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_what_selects_by_name_is_refused_where_parameters_have_none(name: str) -> None:
    """The selector would match nothing, and parameters meant to be frozen would be trained."""
    params = list(params_of().values())
    ways: dict[str, Callable[[], object]] = {
        "TorchOptimizer": lambda: TorchOptimizer(
            [one.clone().requires_grad_() for one in params], BY_NAME[name]
        ),
        "ZeroRedundancyOptimizer": lambda: LocalWorld(2).run(
            lambda group: ZeroRedundancyOptimizer(
                [one.clone().requires_grad_() for one in params],
                BY_NAME[name],
                process_group=group,  # type: ignore[arg-type]
            )
        ),
    }
    for way, make in ways.items():
        with case(way=way), pytest.raises(ValueError, match="by their names.*named_parameters"):
            make()


MAY_BE_NONE: dict[str, Callable[[Any], Optimizer]] = {
    "freeze": lambda where: chain(freeze(where), adamw(0.1)),
    "mask": lambda where: chain(masked(weight_decay(0.1), where), adamw(0.1)),
    "mask, the others": lambda where: chain(
        masked(weight_decay(0.1), with_shape(bool) & ~where), adamw(0.1)
    ),
    "label": lambda where: partition(
        {"head": sgd(0.1), "rest": adamw(0.1)}, labels({"head": where}, default="rest")
    ),
}


@pytest.mark.parametrize("name", MAY_BE_NONE)
@pytest.mark.parametrize("way", [*OVER_PARAMS, "init"])
def test_a_misspelt_name_is_said_wherever_it_selects(way: str, name: str) -> None:
    """The selector would match nothing, and parameters meant to be frozen would be trained."""
    params = {key: one.requires_grad_() for key, one in params_of().items()}
    ways = {**OVER_PARAMS, "init": lambda params, one: one.init(params)}
    make = MAY_BE_NONE[name]
    with pytest.raises(
        ValueError, match=r"matching\('heda\*'\) matches no parameter; the parameters are 'body"
    ):
        ways[way](params, make(matching("heda*")))
    for where in (matching("head*"), if_any(matching("heda*"))):
        with case(where=where):
            ways[way](params, make(where))


def test_predicates_and_beginnings_of_paths_are_names_too() -> None:
    params = params_of()

    def is_gain(path: tuple[Any, ...]) -> bool:
        return bool(path[-1] == "gain")

    for where, shown in (
        (("heda",), r"\('heda',\)"),
        (is_gain, "is_gain at .*test_unmatched_names.py"),
    ):
        with case(where=where), pytest.raises(ValueError, match=rf"{shown}.*\.if_any\(where\)"):
            chain(freeze(where), sgd(0.1)).init(params)
    none_such = with_shape(lambda shape: len(shape) == 7)
    chain(freeze(none_such), sgd(0.1)).init(params)  # a model may have no such shape


def test_a_rule_is_tried_on_a_tensor_that_has_no_name() -> None:
    require_pointwise(BY_NAME["freeze"])


def test_numbers_predicates_and_shapes_select_what_has_no_name() -> None:
    params = [one.requires_grad_() for one in params_of().values()]
    for where in (
        (0,),
        matching("0"),
        with_shape(lambda shape: len(shape) == 2),
        lambda path: path[0] == 0,
    ):
        with case(where=where):
            TorchOptimizer(params, chain(freeze(where), adamw(0.1)))


def test_workers_are_told_whether_the_caller_gave_names() -> None:
    """Workers refuse to select by names that were only generated for unnamed RRefs."""
    found = resolve_recipe(BY_NAME["freeze"], (), {})
    params = [PlacedParam("head", "worker", None, torch.ones(2))]
    ChainGroups([PlacedGroup(params, {}, named=True)], found)
    numbered = [PlacedParam("0.0", "worker", None, torch.ones(2))]
    with pytest.raises(ValueError, match="by their names"):
        ChainGroups([PlacedGroup(numbered, {}, named=False)], found)
