"""Several totals, and several gates, in one chain: numbers by hand."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    accumulate,
    adam,
    apply_if_finite,
    cautious,
    chain,
    clip_by_global_norm,
    dadapt_adam,
    dadapt_sgd,
    descend,
    dog,
    labels,
    masked,
    matching,
    partition,
    prodigy,
    sam,
    scale_by_adam,
    sgd,
    weight_decay,
)

from ..choices import case
from ..tensors import assert_same

AFTER_CLIPS: dict[str, Any] = {
    "sam": lambda: chain(sam(0.05), sgd(lr=0.1)),
    "prodigy": prodigy,
    "dadapt_adam": dadapt_adam,
    "dadapt_sgd": dadapt_sgd,
    "dog": dog,
}

DOORS = ("update", "update_", "TorchOptimizer")


def stepped(
    optimizer: Optimizer, door: str, params: dict[str, Tensor], calls: list[dict[str, Any]]
) -> list[dict[str, Tensor]]:
    """Return the parameters after each call."""
    found = []
    if door == "TorchOptimizer":
        own = {name: torch.nn.Parameter(one.clone()) for name, one in params.items()}
        front = TorchOptimizer(own.items(), optimizer)
        for grads in calls:
            for name, param in own.items():
                param.grad = grads[name]
            front.step()
            found.append({name: one.detach().clone() for name, one in own.items()})
        return found
    now = {name: one.clone() for name, one in params.items()}
    state = optimizer.init(now)
    for grads in calls:
        if door == "update":
            now, state = optimizer.update(now, grads, state)
        else:
            optimizer.update_(now, grads, state)
        found.append(copy.deepcopy(now))
    return found


def of(value: float | None) -> Tensor | None:
    return None if value is None else torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize("door", DOORS)
def test_a_wider_clip_after_a_clip_changes_nothing(door: str) -> None:
    """Each clip gets its own total, also before a stage that reduces leaves to several totals."""
    params = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    calls = [{"w": torch.tensor([3.0 + k, 4.0], dtype=torch.float64)} for k in range(5)]
    for name, make in AFTER_CLIPS.items():
        want = stepped(chain(clip_by_global_norm(1.0), make()), door, params, calls)
        both = clip_by_global_norm(1.0), clip_by_global_norm(9.0)
        with case(name=name):
            torch.testing.assert_close(
                stepped(chain(*both, make()), door, params, calls), want, rtol=1e-9, atol=0.0
            )


@pytest.mark.parametrize("door", DOORS)
def test_behind_a_closed_gate_a_missing_gradient_is_zero(door: str) -> None:
    """Stages behind a closed gate of a leaf do not run, although another gate opens for others."""
    params = {"a": torch.zeros(1).double(), "b": torch.zeros(1).double()}
    optimizer = chain(masked(accumulate(3), matching("a")), accumulate(2), sgd(lr=1.0))
    found = []
    for last in (0.0, None):
        calls = [{"a": of(one), "b": of(1.0)} for one in (3.0, 3.0, 3.0, last)]
        found.append(stepped(optimizer, door, params, calls))
    assert_same(found[0], found[1])
    assert float(found[0][-1]["a"]) == 0.0


@pytest.mark.parametrize("door", DOORS)
def test_a_stage_before_a_gate_counts_the_calls_in_which_it_runs(door: str) -> None:
    """The updates of Adam for a constant gradient are 1, after any missing gradient."""
    params = {"a": torch.zeros(1).double(), "b": torch.zeros(1).double()}
    optimizer = chain(scale_by_adam(), accumulate(2), descend(1.0))
    calls = [{"a": of(one), "b": of(1.0)} for one in (1.0, None, 1.0, 1.0)]
    found = [float(one["a"]) for one in stepped(optimizer, door, params, calls)]
    assert found == pytest.approx([0.0, -0.5, -0.5, -1.5], rel=1e-6)


@pytest.mark.parametrize("gate", [apply_if_finite(3), sam(0.0)], ids=str)
def test_gates_that_keep_no_gradient_leave_the_raw_gradient(gate: Any) -> None:
    """``cautious`` compares with the gradient before all stages: here both signs differ."""
    rest = cautious(rescale=False), descend(1.0)
    params, grads = {"a": torch.tensor([-5.0])}, {"a": torch.tensor([1.0])}
    calls = [grads] * (2 if gate.stage.name == "sam" else 1)
    want = stepped(chain(weight_decay(1.0), *rest), "update", params, [grads])[-1]
    assert float(want["a"]) == -5.0
    assert_same(stepped(chain(weight_decay(1.0), gate, *rest), "update", params, calls)[-1], want)


def test_a_checkpoint_with_nan_in_a_shared_scalar_is_loaded() -> None:
    split = labels({"a": matching("a")}, default="b")
    optimizer = chain(sam(0.1), partition({"a": sgd(lr=0.1), "b": sgd(lr=0.2)}, split))
    params = {name: torch.nn.Parameter(torch.zeros(1)) for name in "ab"}
    front = TorchOptimizer(params.items(), optimizer)
    for grad in (float("nan"), 1.0):
        for param in params.values():
            param.grad = torch.full((1,), grad)
        front.step()
    saved = pickle.loads(pickle.dumps(front.state_dict()))
    again = TorchOptimizer(params.items(), optimizer)
    again.load_state_dict(saved)
    assert again.shared["sam"].norm != again.shared["sam"].norm


def test_a_parameter_that_becomes_a_lazy_conjugate_is_refused() -> None:
    """A step would write to a copy, and count."""
    param = torch.nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]))
    front = TorchOptimizer([param], adam(lr=0.1))
    param.grad = torch.ones(2, dtype=torch.complex64)
    front.step()
    param.data = torch.conj(param.data.conj().resolve_conj())
    assert param.is_conj()
    before, count = param.detach().clone(), int(front.state[param]["step"])
    with pytest.raises(ValueError, match="lazy conjugate"):
        front.step()
    assert torch.equal(param.detach(), before) and int(front.state[param]["step"]) == count
