"""TorchOptimizer.explain() describes each parameter group; so do sharded optimizers."""

import re
from typing import Any

import pytest
import torch

from functional_optim import (
    TorchOptimizer,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    ema,
    freeze,
    labels,
    matching,
    muon,
    partition,
    prodigy,
    sgd,
)
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from tests.choices import each

from ..composition.trees import COMPOSED, params_of


@each(name=COMPOSED)
def test_every_composed_optimizer_is_explained(name: str) -> None:
    """Fault 29: ``explain`` has a line for each kind of parameters, and makes no step."""
    params = {name: one.requires_grad_() for name, one in params_of().items()}
    optimizer = TorchOptimizer(params.items(), COMPOSED[name]())
    said = [one for one in optimizer.explain().splitlines() if not one.startswith("a step waits")]
    assert len(said) >= len(optimizer.param_groups)
    elements = sum(int(line.split(" elements")[0].split()[-1].replace(",", "")) for line in said)
    assert elements == sum(param.numel() for param in params.values())
    assert all(int(one.get("step", 0)) == 0 for one in optimizer.state.values())


def test_each_part_of_a_partition_has_its_lines() -> None:
    """Fault 29: each part has a line, and the frozen part too."""
    parts = {"matrices": muon(lr=0.1), "rest": adamw(lr=0.1), "frozen": freeze()}
    chosen = partition(
        parts, labels({"frozen": ("body.bias",), "matrices": matching("*.weight")}, default="rest")
    )
    params = {name: one.requires_grad_() for name, one in params_of().items()}
    said = TorchOptimizer(params.items(), chosen).explain()
    *lines, last = said.splitlines()
    assert lines == [
        (
            "param_groups[0]: 2 parameters, 46 elements of torch.float32 on cpu: one by one; muon "
            "needs its whole tensor; those of one shape in stacks"
        ),
        "param_groups[1]: 1 parameters, 6 elements of torch.float32 on cpu: frozen",
    ]
    # Another step of this process may have compiled the loop already.
    start = "param_groups[2]: 1 parameters, 1 elements of torch.float32 on cpu, together: "
    assert last.removeprefix(start) in {
        "blocked; no loop is compiled for so few elements",
        "exact; compiled, with fused multiplications and additions as torch has them",
    }


def test_one_group_is_explained_as_it_is() -> None:
    weight = torch.ones(3, requires_grad=True)
    for optimizer in (sgd(lr=0.1), chain(accumulate(2), sgd(lr=0.1))):
        said = TorchOptimizer([weight], optimizer).explain()
        assert said.startswith("1 parameters, 3 elements of torch.float32 on cpu, together")


def test_what_a_step_waits_for_is_named() -> None:
    """Both ``explain`` methods name the stages at which a step waits.

    A chain without gates and shared scalars waits at no stage.
    """
    weight = torch.ones(3, requires_grad=True)
    whole = chain(accumulate(2), prodigy(), ema(0.9))
    for text in (TorchOptimizer([weight], whole).explain(), whole.explain([weight])):
        gate, scalars = text.splitlines()[-2:]
        assert gate.startswith("a step waits at accumulate: it is a gate")
        assert scalars.startswith("a step waits at prodigy: it computes scalars that all")
        assert text.count("waits") == 2
    alone = chain(clip_by_global_norm(1.0), adamw(lr=0.1))
    assert "waits" not in TorchOptimizer([weight], alone).explain() + alone.explain([weight])


@each(name=COMPOSED)
def test_zero_on_one_rank_is_explained_as_a_local_optimizer(name: str) -> None:
    """Its lines are those of TorchOptimizer, except for frozen parameters, which it never steps."""

    def of_rank(group: Any) -> None:
        params, twins = ({k: p.requires_grad_() for k, p in params_of().items()} for _ in range(2))
        zero = ZeroRedundancyOptimizer(params.items(), COMPOSED[name](), process_group=group)
        wanted = TorchOptimizer(twins.items(), COMPOSED[name]()).explain().splitlines()
        assert zero.explain().splitlines() == [one for one in wanted if "frozen" not in one]
        assert all(int(one.get("step", 0)) == 0 for one in zero.state.values())

    LocalWorld(1).run(of_rank)


def test_each_rank_explains_the_elements_that_it_owns() -> None:
    told: list[str] = []

    def of_rank(group: Any) -> None:
        params = [torch.zeros(30, requires_grad=True), torch.zeros(6, requires_grad=True)]
        zero = ZeroRedundancyOptimizer(params, torch.optim.AdamW, group, policy="elements", lr=0.1)
        told.append(zero.explain())

    LocalWorld(4).run(of_rank)
    found = [re.findall(r"(\d+) elements", one) for one in told]
    assert sorted(sum(map(int, own)) for own in found) == [9, 9, 9, 9]


def test_zero_cannot_explain_the_code_of_a_class() -> None:
    class Unregistered(torch.optim.SGD):
        pass

    def of_rank(group: Any) -> None:
        weight = torch.zeros(3, requires_grad=True)
        zero = ZeroRedundancyOptimizer([weight], Unregistered, group, lr=0.1)
        with pytest.raises(RuntimeError, match="Unregistered has no functional equivalent"):
            zero.explain()

    LocalWorld(1).run(of_rank)
