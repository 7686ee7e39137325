"""Groups of a class whose options give them other stages, at construction and between steps."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import chain, clip_by_global_norm, register_functional_optim, sgd
from functional_optim.frontends.local_optimizer import local_optimizer
from functional_optim.frontends.registry import _REGISTERED
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from tests.choices import each_value

from .support import noise

Groups = list[dict[str, Any]]

# A class, the options of two groups, and options that change in the second group after two steps.
CASES: dict[str, tuple[Any, Groups, dict[str, Any]]] = {
    "amsgrad": (torch.optim.Adam, [{"amsgrad": True}, {}], {"maximize": True}),
    "decay": (torch.optim.Adam, [{}, {}], {"decoupled_weight_decay": True}),
    "momentum": (torch.optim.SGD, [{}, {"momentum": 0.9}], {"nesterov": True}),
    "centered": (torch.optim.RMSprop, [{"centered": True}, {"momentum": 0.5}], {"lr": 0.01}),
    "maximize": (torch.optim.AdamW, [{"maximize": True}, {}], {"maximize": True}),
}


class Local:
    """A local optimizer that reads ``.grad``."""

    def __init__(self, groups: Groups, cls: Any, **options: Any) -> None:
        self.inner = local_optimizer(cls, groups, **options)
        self.param_groups, self.state_dict = self.inner.param_groups, self.inner.state_dict

    def step(self) -> None:
        self.inner.step_by([one.grad for one in self.inner.params])


DOORS: dict[str, Callable[..., Any]] = {
    "local": Local,
    "sharded": lambda groups, cls, **options: ZeroRedundancyOptimizer(
        groups, cls, LocalWorld(1).groups[0], **options
    ),
}


def groups_of(options: Groups) -> tuple[list[Tensor], Groups]:
    params = [torch.nn.Parameter(noise(k, 5)) for k in range(4)]
    return params, [{"params": params[2 * k : 2 * k + 2], **one} for k, one in enumerate(options)]


@each_value(door=list(DOORS), name=list(CASES))
def test_groups_with_other_stages_have_torchs_bits(door: str, name: str) -> None:
    cls, options, changes = CASES[name]
    (params, groups), (twins, twin_groups) = groups_of(options), groups_of(options)
    ours = DOORS[door](groups, cls, lr=0.1, weight_decay=0.01)
    theirs = cls(twin_groups, lr=0.1, weight_decay=0.01, foreach=False)
    before = {key: theirs.param_groups[1][key] for key in changes}
    for step in range(5):
        for k, (param, twin) in enumerate(zip(params, twins, strict=True)):
            param.grad, twin.grad = noise(10 * step + k, 5), noise(10 * step + k, 5)
        if step == 2:
            ours.param_groups[1].update(changes)
            theirs.param_groups[1].update(changes)
        if step == 4:
            ours.param_groups[1].update(before)
            theirs.param_groups[1].update(before)
        ours.step()
        theirs.step()
        assert all(map(torch.equal, params, twins)), step
    if door == "local":  # ZeRO collects its state first
        saved = ours.state_dict()
        fresh = cls(groups_of(options)[1], foreach=False)
        fresh.load_state_dict(saved)
        assert fresh.param_groups[1]["lr"] == ours.param_groups[1]["lr"]


@each_value(door=list(DOORS))
def test_a_checkpoint_may_need_other_stages(door: str) -> None:
    """``amsgrad`` of a checkpoint has a state that the optimizer did not have."""
    (params, groups), (twins, twin_groups) = groups_of([{}, {}]), groups_of([{}, {}])
    theirs = torch.optim.Adam(twin_groups, lr=0.1, amsgrad=True, foreach=False)
    ours = DOORS[door](groups, torch.optim.Adam, lr=1.0)
    for step in range(4):
        for k, twin in enumerate(twins):
            twin.grad = noise(10 * step + k, 5)
        theirs.step()
        if step == 1:
            for param, twin in zip(params, twins, strict=True):
                param.data.copy_(twin.data)
            getattr(ours, "inner", ours).load_state_dict(theirs.state_dict())
        if step > 1:
            for param, twin in zip(params, twins, strict=True):
                param.grad = twin.grad
            ours.step()
    assert all(map(torch.equal, params, twins))


@each_value(copied=[copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_local_optimizer_steps_alone(copied: Callable[[Any], Any]) -> None:
    params, groups = groups_of([{}, {"amsgrad": True}])
    local = local_optimizer(torch.optim.Adam, groups, lr=0.1)
    grads = [noise(k, 5) for k in range(4)]
    local.step_by(grads)
    other = copied(local)
    local.step_by(grads)
    assert not any(map(torch.equal, params, other.params))
    other.step_by(grads)
    assert all(map(torch.equal, params, other.params))
    other.param_groups[0]["decoupled_weight_decay"] = True
    other.step_by(grads)


@pytest.fixture(name="clipped")
def _clipped() -> Any:
    class Clipped(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.0) -> None:
            super().__init__(params, lr=lr, momentum=momentum)

    def equivalent(lr: float = 0.1, momentum: float = 0.0) -> Any:
        own = sgd(lr=lr, momentum=momentum)
        return chain(clip_by_global_norm(1.0), own) if momentum == 0.0 else own

    register_functional_optim(Clipped, equivalent)
    yield Clipped
    _REGISTERED.pop(Clipped)


def test_a_total_of_some_groups_is_refused(clipped: Any) -> None:
    """A norm over the gradients of one group would be no norm over all gradients."""
    params, groups = groups_of([{}, {}])
    local = local_optimizer(clipped, groups)
    before = [one.detach().clone() for one in params]
    local.param_groups[1]["momentum"] = 0.9
    with pytest.raises(ValueError, match="a stage needs a total over the gradients of all groups"):
        local.step_by([torch.ones(5)] * 4)
    assert all(map(torch.equal, params, before))
    local.param_groups[0]["momentum"] = 0.9
    local.step_by([torch.ones(5)] * 4)
    for one, old in zip(params, before, strict=True):
        assert torch.equal(one, old - 0.1)


@each_value(door=list(DOORS), late=[False, True])
def test_a_total_of_an_option_of_all_groups_is_over_all_gradients(
    clipped: Any, door: str, late: bool
) -> None:
    """With this option, and not with the defaults of the class, stages need a total."""
    option: dict[str, Any] = {"momentum": 0.0}
    params, groups = groups_of([{}, {}] if late else [option, option])

    def run(group: Any) -> list[Tensor]:
        """Step by gradients with the norm 2."""
        if door == "local":
            one: Any = local_optimizer(clipped, groups, momentum=0.9)
        else:
            one = ZeroRedundancyOptimizer(groups, clipped, group, momentum=0.9)
        for own in one.param_groups if late else ():
            own.update(option)
        assert one.measured_stages == 1
        for param in params:
            param.grad = torch.full((5,), 0.2**0.5)
        if door == "local":
            grads = [param.grad for param in params]
            (total,) = one.measure(grads).sum(0, keepdim=True)
            one.step_by(grads, measured=[total])
        else:
            one.step()
        return [param.detach().clone() for param in params]

    before = [param.detach().clone() for param in params]
    for param, old in zip(LocalWorld(1).run(run)[0], before, strict=True):
        torch.testing.assert_close(param, old - 0.1 * 0.2**0.5 / 2)


def test_a_group_that_was_refused_leaves_no_stages_behind() -> None:
    param, twin = (torch.nn.Parameter(noise(0, 5)) for _ in range(2))
    options: dict[str, Any] = {"weight_decay": 0.5, "decoupled_weight_decay": True}
    local: Any = local_optimizer(torch.optim.Adam, [noise(1, 5)], lr=0.1)
    local.state[param] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3)}
    with pytest.raises(ValueError, match="does not fit this optimizer"):
        local.add_param_group({"params": [param], **options})
    local.add_param_group({"params": [param], **options})
    theirs = torch.optim.Adam([twin], lr=0.1, foreach=False, **options)
    for step in range(3):
        twin.grad = noise(step, 5)
        local.step_by([None, twin.grad])
        theirs.step()
    assert torch.equal(param, twin)
