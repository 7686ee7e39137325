"""State dicts between TorchOptimizer, ZeroRedundancyOptimizer and torch's class, in any storage."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import Optimizer, TorchOptimizer, adamw, chain, clip_by_value, sgd, stored
from functional_optim.storage import PARAM_STORAGES
from sharding import ZeroRedundancyOptimizer
from tests.choices import each

from .support import same_bits

pytestmark = pytest.mark.usefixtures("world_of_one")

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
SHAPES = [(3, 91), (5,), (0, 3), ()]
"""Shapes, of which one has more than a block of 256 elements, and a partial last block."""
BASE = adamw(lr=0.01, amsgrad=True)

Pairs = list[tuple[str, nn.Parameter]]


def keeps_digits(storage: str) -> bool:
    return bool(PARAM_STORAGES[STORAGES[storage].get("param", "float32")].extras)


def is_wide(storage: str) -> bool:
    return "param" not in STORAGES[storage]


STORED = [name for name in STORAGES if name != "float32"]
KINDS = ["float32", "state mixed", "master", "smallest"]
ALL = [(source, target) for source, target in itertools.product(KINDS, KINDS[1:])]
REFUSED = [(source, target) for source, target in ALL if keeps_digits(source) and is_wide(target)]
LOADS = [both for both in ALL if both not in REFUSED]


def parameters(storage: str, values: list[Tensor] | None = None) -> Pairs:
    """Return named parameters in the dtype of a storage, with random or given values."""
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
    """Make steps with gradients that depend only on the step numbers."""
    for number in numbers:
        chance = torch.Generator().manual_seed(50 + number)
        for _, param in pairs:
            grad = torch.randn(param.shape, generator=chance).to(torch.bfloat16)
            param.grad = grad.to(param.dtype)
        optimizer.step()


def values_of(pairs: Pairs) -> list[Tensor]:
    return [param.detach() for _, param in pairs]


def written(zero: Any) -> dict[str, Any]:
    """Return the state dict of ZeRO, which has plain values in any storage."""
    zero.consolidate_state_dict()
    found: dict[str, Any] = zero.state_dict()
    return found


def in_memory(optimizer: TorchOptimizer) -> dict[str, Any]:
    """Return a state dict as earlier releases wrote it: codes and scales, as in memory."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = {
        number: {**optimizer.state[param], "step": optimizer.state[param]["step"].float()}
        for number, param in enumerate(params)
    }
    return copy.deepcopy({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def assert_same_state(one: dict[Any, Any], two: dict[Any, Any], pairs: Pairs, twins: Pairs) -> None:
    for (name, param), (_, twin) in zip(pairs, twins, strict=True):
        assert one[param].keys() == two[twin].keys(), name
        for key, value in one[param].items():
            wanted = two[twin][key]
            assert int(value) == int(wanted) if key == "step" else same_bits(value, wanted), name


def assert_same_values(one: Pairs, two: Pairs) -> None:
    assert all(map(same_bits, values_of(one), values_of(two)))


@each(both=LOADS)
def test_either_front_end_reads_what_either_writes(both: tuple[str, str]) -> None:
    """Both write plain values. These, and the codes of earlier releases, load to the same state."""
    source, target = both
    pairs, same = parameters(source), parameters(source)
    one, zero = local(source, pairs), sharded(source, same)
    steps(one, pairs, 0, 1)
    steps(zero, same, 0, 1)
    saved, plain, codes = one.state_dict(), written(zero), in_memory(one)
    for number, entries in plain["state"].items():
        assert entries.keys() == saved["state"][number].keys()
        assert all(same_bits(saved["state"][number][key], value) for key, value in entries.items())
    before = copy.deepcopy(plain)
    wanted = parameters(target, values_of(pairs))
    right = sharded(target, wanted)
    right.load_state_dict(plain)
    readers: list[Any] = []
    for given in (saved, plain, codes):
        read = parameters(target, values_of(pairs))
        reader = local(target, read)
        reader.load_state_dict(given)
        assert_same_state(reader.state, right.optim.state, read, wanted)
        readers.append((reader, read))
    for given in (saved, codes):
        read = parameters(target, values_of(pairs))
        other = sharded(target, read)
        other.load_state_dict(given)
        assert_same_state(other.optim.state, right.optim.state, read, wanted)
        readers.append((other, read))
    assert repr(plain) == repr(before)
    steps(right, wanted, 3)
    for reader, stepped in readers:
        steps(reader, stepped, 3)
        assert_same_values(stepped, wanted)
    if source == target:  # the run equals one without a break
        steps(zero, same, 3)
        assert_same_values(wanted, same)


@each(both=REFUSED)
def test_digits_that_only_the_parameter_could_take(both: tuple[str, str]) -> None:
    source, target = both
    pairs = parameters(source)
    zero = sharded(source, pairs)
    steps(zero, pairs, 0)
    one = local(target, parameters(target, values_of(pairs)))
    before = repr(one.state_dict())
    with pytest.raises(ValueError, match=r"'params\[0\]' has (master|compensation): digits of"):
        one.load_state_dict(written(zero))
    assert repr(one.state_dict()) == before


@each(storage=STORED)
def test_a_checkpoint_of_torch_s_class(storage: str) -> None:
    pairs = parameters("float32")
    theirs = torch.optim.AdamW([param for _, param in pairs], lr=0.01, amsgrad=True)
    steps(theirs, pairs, 0, 1)
    ours, wanted = (parameters(storage, values_of(pairs)) for _ in range(2))
    one, zero = local(storage, ours), sharded(storage, wanted)
    one.load_state_dict(theirs.state_dict())
    zero.load_state_dict(theirs.state_dict())
    assert_same_state(one.state, zero.optim.state, ours, wanted)


def damped(momentum: float) -> Optimizer:
    return stored(chain(clip_by_value(0.5), sgd(lr=0.1, momentum=momentum)), state="int8")


def in_groups(pairs: Pairs) -> list[dict[str, Any]]:
    """Return two groups, of which only the second has the field ``max_exp_avg_sq``."""
    return [{"params": pairs[:2], "amsgrad": False}, {"params": pairs[2:], "lr": 0.1}]


@each(
    given=[(damped(0.0), list), (damped(0.9), list), (stored(BASE, state="int8"), in_groups)],
)
def test_a_state_that_an_option_makes(given: tuple[Optimizer, Any]) -> None:
    optimizer, groups = given
    pairs = parameters("float32")
    zero: Any = ZeroRedundancyOptimizer(groups(pairs), optimizer)
    steps(zero, pairs, 0, 1)
    ours = parameters("float32", values_of(pairs))
    one = TorchOptimizer(groups(ours), optimizer)
    one.load_state_dict(written(zero))
    assert_same_state(one.state, zero.optim.state, ours, pairs)
    if groups is in_groups:
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
    """A field of an option that was turned off is loaded with the rest of the stored state."""
    pairs = parameters("float32")
    one = local("state int8", pairs)
    steps(one, pairs, 0)
    one.param_groups[0]["amsgrad"] = False
    steps(one, pairs, 1)
    ours = parameters("float32", values_of(pairs))
    other = local("state int8", ours)
    saved = one.state_dict()
    assert {value.dtype for value in saved["state"][0].values()} == {torch.float32}
    other.load_state_dict(saved)
    again = parameters("float32", values_of(pairs))
    from_codes = local("state int8", again)
    from_codes.load_state_dict(in_memory(one))
    steps(one, pairs, 2)
    for reader, stepped in ((other, ours), (from_codes, again)):
        steps(reader, stepped, 2)
        assert_same_values(stepped, pairs)
