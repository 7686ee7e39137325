"""State dicts between TorchOptimizer, ZeroRedundancyOptimizer and torch's class, in any storage."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from functional_optim import Optimizer, TorchOptimizer, adamw, chain, clip_by_value, sgd, stored
from functional_optim.storage import PARAM_STORAGES
from sharding import ZeroRedundancyOptimizer

from .support import same_bits

STORAGES: dict[str, dict[str, Any]] = {
    "float32": {},
    "state bfloat16": {"state": "bfloat16"},
    "state int8": {"state": "int8"},
    "state mixed": {"state": {"exp_avg": "int8+stochastic", "*": "bfloat16+stochastic"}},
    "master": {"param": "bfloat16+master"},
    "kahan": {"param": "bfloat16+kahan"},
    "stochastic": {"param": "bfloat16+stochastic"},
    "smallest": {"param": "bfloat16+kahan", "state": "int8", "seed": 3},
}
SHAPES = [(33, 17), (771,), (5,), (0, 3), (), (1,)]
BASE = adamw(lr=0.01, amsgrad=True)

Pairs = list[tuple[str, nn.Parameter]]


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def keeps_digits(storage: str) -> bool:
    return bool(PARAM_STORAGES[STORAGES[storage].get("param", "float32")].extras)


def is_wide(storage: str) -> bool:
    return "param" not in STORAGES[storage]


LOADS = [
    (source, storage)
    for source, storage in itertools.product(STORAGES, STORAGES)
    if storage != "float32" and not (keeps_digits(source) and is_wide(storage))
]
REFUSED = [
    (source, storage)
    for source, storage in itertools.product(STORAGES, STORAGES)
    if storage != "float32" and keeps_digits(source) and is_wide(storage)
]


def parameters(storage: str, values: list[Tensor] | None = None) -> Pairs:
    """Parameters as a storage has them, with values of their own or those given."""
    chance = torch.Generator().manual_seed(3)
    dtype = PARAM_STORAGES[STORAGES[storage].get("param", "float32")].dtype
    given = values or [torch.randn(shape, generator=chance) for shape in SHAPES]
    return [
        (f"p{n}", nn.Parameter(one.detach().to(dtype, copy=True))) for n, one in enumerate(given)
    ]


def sharded(storage: str, pairs: Pairs) -> Any:
    return ZeroRedundancyOptimizer(pairs, stored(BASE, **STORAGES[storage]))


def local(storage: str, pairs: Pairs) -> TorchOptimizer:
    return TorchOptimizer(pairs, stored(BASE, **STORAGES[storage]))


def steps(optimizer: Any, pairs: Pairs, *numbers: int) -> None:
    """Steps with gradients that depend on their numbers only."""
    for number in numbers:
        chance = torch.Generator().manual_seed(50 + number)
        for _, param in pairs:
            grad = torch.randn(param.shape, generator=chance).to(torch.bfloat16)
            param.grad = grad.to(param.dtype)
        optimizer.step()


def values_of(pairs: Pairs) -> list[Tensor]:
    return [param.detach() for _, param in pairs]


def written(zero: Any) -> dict[str, Any]:
    """The state dict that it writes: plain, whatever the storage."""
    zero.consolidate_state_dict()
    found: dict[str, Any] = zero.state_dict()
    return found


def assert_same_state(one: dict[Any, Any], two: dict[Any, Any], pairs: Pairs, twins: Pairs) -> None:
    for (name, param), (_, twin) in zip(pairs, twins, strict=True):
        assert one[param].keys() == two[twin].keys(), name
        for key, value in one[param].items():
            wanted = two[twin][key]
            assert int(value) == int(wanted) if key == "step" else same_bits(value, wanted), name


@pytest.mark.parametrize(("source", "storage"), LOADS)
def test_what_zero_writes(source: str, storage: str) -> None:
    """Loaded, it is the state that ZeRO itself makes of it, and goes on as that does."""
    pairs = parameters(source)
    zero = sharded(source, pairs)
    steps(zero, pairs, 0, 1, 2)
    saved = written(zero)
    before = copy.deepcopy(saved)
    ours, theirs = (parameters(storage, values_of(pairs)) for _ in range(2))
    one, two = local(storage, ours), sharded(storage, theirs)
    one.load_state_dict(saved)
    two.load_state_dict(saved)
    assert_same_state(one.state, two.optim.state, ours, theirs)
    steps(one, ours, 3, 4)
    steps(two, theirs, 3, 4)
    assert all(map(same_bits, values_of(ours), values_of(theirs)))
    assert_same_state(one.state, two.optim.state, ours, theirs)
    if source == storage:  # as if it had never stopped
        steps(zero, pairs, 3, 4)
        assert all(map(same_bits, values_of(ours), values_of(pairs)))
    for number, entries in before["state"].items():
        assert all(same_bits(value, saved["state"][number][key]) for key, value in entries.items())


@pytest.mark.parametrize(("source", "storage"), LOADS)
def test_what_torch_optimizer_writes(source: str, storage: str) -> None:
    """It is in its storage; either front-end reads it as it reads the plain values of it."""
    pairs, same = parameters(source), parameters(source)
    one, zero = local(source, pairs), sharded(source, same)
    steps(one, pairs, 0, 1, 2)
    steps(zero, same, 0, 1, 2)
    saved, plain = one.state_dict(), written(zero)
    ours, theirs, wanted = (parameters(storage, values_of(pairs)) for _ in range(3))
    loaded, other, right = (
        local(storage, ours),
        sharded(storage, theirs),
        sharded(storage, wanted),
    )
    loaded.load_state_dict(saved)
    other.load_state_dict(saved)
    right.load_state_dict(plain)
    assert_same_state(loaded.state, right.optim.state, ours, wanted)
    assert_same_state(other.optim.state, right.optim.state, theirs, wanted)
    steps(loaded, ours, 3)
    steps(other, theirs, 3)
    steps(right, wanted, 3)
    assert all(map(same_bits, values_of(ours), values_of(wanted)))
    assert all(map(same_bits, values_of(theirs), values_of(wanted)))


@pytest.mark.parametrize(("source", "storage"), REFUSED)
def test_digits_that_only_the_parameter_could_take(source: str, storage: str) -> None:
    pairs = parameters(source)
    zero = sharded(source, pairs)
    steps(zero, pairs, 0)
    ours = parameters(storage, values_of(pairs))
    one = local(storage, ours)
    before = copy.deepcopy(one.state_dict())
    with pytest.raises(ValueError, match=r"'params\[0\]' has (master|compensation): digits of"):
        one.load_state_dict(written(zero))
    assert repr(one.state_dict()) == repr(before)


@pytest.mark.parametrize("storage", [name for name in STORAGES if name != "float32"])
def test_a_checkpoint_of_torch_s_class(storage: str) -> None:
    pairs = parameters("float32")
    theirs = torch.optim.AdamW([param for _, param in pairs], lr=0.01, amsgrad=True)
    steps(theirs, pairs, 0, 1)
    ours, wanted = (parameters(storage, values_of(pairs)) for _ in range(2))
    one, zero = local(storage, ours), sharded(storage, wanted)
    one.load_state_dict(theirs.state_dict())
    zero.load_state_dict(theirs.state_dict())
    assert_same_state(one.state, zero.optim.state, ours, wanted)


def clipped(optimizer: Optimizer) -> Optimizer:
    return chain(clip_by_value(0.5), optimizer)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_chain_with_a_state_that_an_option_makes(momentum: float) -> None:
    optimizer = stored(clipped(sgd(lr=0.1, momentum=momentum)), state="int8")
    pairs = parameters("float32")
    zero = ZeroRedundancyOptimizer(pairs, optimizer)
    steps(zero, pairs, 0, 1)
    ours = parameters("float32", values_of(pairs))
    one = TorchOptimizer(ours, optimizer)
    one.load_state_dict(written(zero))
    assert_same_state(one.state, zero.optim.state, ours, pairs)


def test_groups_have_options_of_their_own() -> None:
    """One has a field of state that the other has not."""

    def groups(pairs: Pairs) -> list[dict[str, Any]]:
        return [{"params": pairs[:2], "amsgrad": False}, {"params": pairs[2:], "lr": 0.1}]

    optimizer = stored(BASE, state="int8")
    pairs = parameters("float32")
    zero = ZeroRedundancyOptimizer(groups(pairs), optimizer)
    steps(zero, pairs, 0, 1)
    ours = parameters("float32", values_of(pairs))
    one = TorchOptimizer(groups(ours), optimizer)
    one.load_state_dict(written(zero))
    assert_same_state(one.state, zero.optim.state, ours, pairs)
    assert "max_exp_avg_sq" not in one.state[ours[0][1]]


def test_a_state_of_another_optimizer_changes_nothing() -> None:
    pairs = parameters("float32")
    zero = ZeroRedundancyOptimizer(pairs, stored(sgd(lr=0.1, momentum=0.9), state="int8"))
    steps(zero, pairs, 0)
    saved = written(zero)
    ours = parameters("float32")
    one = local("state int8", ours)
    steps(one, ours, 0)
    before = copy.deepcopy(one.state_dict())
    saved["param_groups"] = before["param_groups"]
    with pytest.raises(ValueError, match=r"'params\[0\]' does not fit this optimizer"):
        one.load_state_dict(saved)
    assert repr(one.state_dict()) == repr(before)


def test_what_a_load_hook_puts_there_is_converted() -> None:
    pairs = parameters("float32")
    zero = sharded("float32", pairs)
    steps(zero, pairs, 0)
    ours = parameters("float32", values_of(pairs))
    one = local("state int8", ours)

    def halved(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(given)
        changed["state"][0]["exp_avg"] *= 0.5
        return changed

    saved = written(zero)
    handle = one.register_load_state_dict_pre_hook(halved)
    one.load_state_dict(saved)
    handle.remove()
    scale = one.state[ours[0][1]]["exp_avg_scale"].clone()
    one.load_state_dict(saved)
    assert torch.equal(scale, one.state[ours[0][1]]["exp_avg_scale"] * 0.5)


def test_a_field_that_an_option_has_left_behind() -> None:
    """The state as it is kept is taken as it is, with what else there is."""
    pairs = parameters("float32")
    one = local("state int8", pairs)
    steps(one, pairs, 0)
    one.param_groups[0]["amsgrad"] = False
    steps(one, pairs, 1)
    saved = one.state_dict()
    ours = parameters("float32", values_of(pairs))
    other = local("state int8", ours)
    other.load_state_dict(saved)
    steps(one, pairs, 2)
    steps(other, ours, 2)
    assert all(map(same_bits, values_of(ours), values_of(pairs)))
