"""Snapshots over threads: steps disturb no backward pass, no step is lost, little is copied."""

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from functional_optim import (
    DistributedOptimizer,
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    sgd,
)
from functional_optim.remote import Snapshot, StaleError
from functional_optim.remote.snapshot import call_with_parameters
from tests.choices import case, pairs

from .support import (
    SHAPES,
    WithoutEquivalent,
    assert_same,
    gradients,
    locally,
    noise,
    parameters,
    placement,
    run,
)

over_threads = DistributedOptimizer.over_threads
TRAINERS = 4
ROUNDS = 5
MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
DATA = noise(7, 5, 3)


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for seed, param in enumerate(made.parameters()):
            param.copy_(noise(seed, *param.shape))
    return made


def loss_of(params: Mapping[str, Tensor], trainer: int = 0) -> Tensor:
    found: Tensor = call_with_parameters(MODEL, params, (DATA + trainer,), {}).square().sum()
    return found


def all_read_then_step_in_turn(
    read: Callable[[], tuple[Mapping[str, Tensor], Any]],
    step: Callable[[Sequence[Tensor], Any], None],
) -> tuple[int, int]:
    """Train in rounds; return the number of failed backward passes, and of steps.

    In each round, all trainers read and run forward before the first one runs backward. Each
    trainer runs backward after the step of the trainer before it.
    """
    begun = threading.Barrier(TRAINERS)
    may_go = [[threading.Event() for _ in range(TRAINERS + 1)] for _ in range(ROUNDS)]
    failed, made, other = [], [], []

    def trainer(me: int) -> None:
        for events in may_go:
            params, token = read()
            loss = loss_of(params, me)
            begun.wait(60)
            if me:
                assert events[me].wait(60)
            own = {name: one.detach().clone().requires_grad_() for name, one in params.items()}
            try:
                grads = torch.autograd.grad(loss, list(params.values()))
            except RuntimeError as error:
                failed.append(str(error))
            else:
                wanted = torch.autograd.grad(loss_of(own, me), list(own.values()))
                other.extend([] if all(map(torch.equal, grads, wanted)) else [me])
                step(grads, token)
                made.append(me)
            events[me + 1].set()
            begun.wait(60)

    run([lambda me=me: trainer(me) for me in range(TRAINERS)])
    assert all("modified by an inplace operation" in one for one in failed)
    assert not other, "gradients are of another version than the forward pass"
    return len(failed), len(made)


def test_no_step_disturbs_a_backward_pass() -> None:
    """If torch's optimizer steps in place, only the first trainer of each round succeeds."""
    shared = model()
    plain = torch.optim.AdamW(shared.parameters(), lr=0.01, foreach=False)

    def step_in_place(grads: Sequence[Tensor], _: None) -> None:
        for param, grad in zip(shared.parameters(), grads, strict=True):
            param.grad = grad
        plain.step()

    failed, made = all_read_then_step_in_turn(
        lambda: (dict(shared.named_parameters()), None), step_in_place
    )
    assert (failed, made) == (ROUNDS * (TRAINERS - 1), ROUNDS)

    for options in pairs(optimizer=[torch.optim.AdamW, WithoutEquivalent], workers=[1, 3]):
        with case(**options):
            shared = model()
            names = [name for name, _ in shared.named_parameters()]
            where = {name: f"ps{k % options['workers']}" for k, name in enumerate(names)}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer = over_threads(options["optimizer"], shared, where, lr=0.01)
            found = all_read_then_step_in_turn(reader(optimizer), optimizer.step)
            assert found == (0, ROUNDS * TRAINERS)
            for one in optimizer.counters().values():
                assert one.steps == one.reads == ROUNDS * TRAINERS
                assert one.staleness == dict.fromkeys(range(TRAINERS), ROUNDS)
                assert (one.max_staleness, one.mean_staleness) == (3, 1.5)
            optimizer.close()


def reader(optimizer: DistributedOptimizer) -> Callable[[], tuple[Mapping[str, Tensor], Snapshot]]:
    def read() -> tuple[Mapping[str, Tensor], Snapshot]:
        snapshot = optimizer.snapshot()
        return snapshot.parameters, snapshot

    return read


def test_every_step_is_made_whole_and_none_is_lost() -> None:
    """Sums of whole numbers are exact in any order; a snapshot shows only whole steps."""
    params = {name: torch.zeros(shape, requires_grad=True) for name, shape in SHAPES.items()}
    optimizer = over_threads(sgd, params, placement(3), lr=0.5)
    torn: list[Any] = []

    def trainer(me: int) -> None:
        for _ in range(10):
            snapshot = optimizer.snapshot()
            values = {n for leaf in snapshot.parameters.values() for n in leaf.flatten().tolist()}
            torn.extend([values] if len(values) > 1 else [])
            grads = [torch.full(shape, float(me)) for shape in SHAPES.values()]
            optimizer.step(grads, snapshot)

    run([lambda me=me: trainer(me) for me in range(1, 9)])
    assert not torn
    assert {one.steps for one in optimizer.counters().values()} == {80}
    optimizer.close()
    total = -0.5 * 10 * sum(range(1, 9))
    assert_same(params, {name: torch.full(shape, total) for name, shape in SHAPES.items()})


def test_one_trainer_copies_nothing_and_gets_the_local_run() -> None:
    """The trainer holds its loss, and so the graph of autograd, during the step."""
    made = chain(clip_by_global_norm(0.1), adamw(lr=0.1))
    params = parameters()
    optimizer = over_threads(made, params, placement(2))
    steps, losses = [], []
    for step in range(4):
        snapshot = optimizer.snapshot()
        leaves = snapshot.parameters
        assert [one.data_ptr() for one in leaves.values()] == [
            one.data_ptr() for one in params.values()
        ]
        weights = gradients(step)
        losses.append(sum((leaves[name] * weights[name]).sum() for name in SHAPES))
        grads = torch.autograd.grad(losses[-1], list(leaves.values()))
        steps.append(dict(zip(SHAPES, grads, strict=True)))
        optimizer.step(grads, snapshot)
        assert not snapshot.parameters
    assert [one.copied_bytes for one in optimizer.counters().values()] == [0, 0]
    optimizer.close()
    assert_same(params, locally(made, steps))


def test_as_many_versions_as_readers_and_one() -> None:
    """Versions are freed with their readers; parameters and state do not depend on readers."""
    params = parameters()
    optimizer = over_threads(adamw, params, placement(2), lr=0.1)
    size = sum(4 * param.numel() for param in params.values())
    held = []
    for step in range(4):
        held.append(optimizer.snapshot())
        optimizer.step(gradients(step))
        assert sum(one.copied_bytes for one in optimizer.counters().values()) == size * (step + 1)
    for name, param in params.items():
        starts = {param.data_ptr(), *(one.parameters[name].data_ptr() for one in held)}
        assert len(starts) == 5
    for step, snapshot in enumerate(held):
        want = locally(adamw(lr=0.1), [gradients(k) for k in range(step)])
        assert_same(snapshot.parameters, want)
    watched = [
        StorageWeakRef(leaf.untyped_storage())
        for snapshot in held
        for leaf in snapshot.parameters.values()
    ]
    view = held[0].parameters["scale"].detach().view(1)
    del snapshot
    held.clear()
    assert [one.expired() for one in watched].count(False) == 1  # the view still holds its storage
    del view
    assert all(one.expired() for one in watched)
    optimizer.close()
    assert_same(params, locally(adamw(lr=0.1), [gradients(k) for k in range(4)]))


def test_only_what_is_stepped_makes_way() -> None:
    params = parameters()
    optimizer = over_threads(sgd, params, placement(1), lr=0.1)
    snapshot = optimizer.snapshot()
    others = [name for name in SHAPES if name != "hidden.bias"]
    optimizer.step(gradients(0, others))
    assert optimizer.counters()["ps0"].copied_bytes == 16
    optimizer.step(gradients(1, ["hidden.bias"]))
    assert optimizer.counters()["ps0"].copied_bytes == sum(
        4 * param.numel() for param in params.values()
    )
    assert_same(snapshot.parameters, parameters())
    snapshot.close()
    optimizer.close()


def test_a_trainer_that_dies_lets_go_of_its_version() -> None:
    """A dead trainer releases its version, also if it fails with an error that is kept."""
    params = model()
    where = dict.fromkeys(dict(params.named_parameters()), "ps")
    optimizer = over_threads(sgd, params, where, lr=0.1)

    def dies() -> None:
        loss_of(optimizer.snapshot().parameters)

    def fails() -> None:
        with optimizer.snapshot() as snapshot:
            loss_of(snapshot.parameters)
            raise LookupError

    run([dies])
    with pytest.raises(LookupError):
        run([fails])
    optimizer.step([torch.ones_like(one) for one in params.parameters()])
    assert optimizer.counters()["ps"].copied_bytes == 0
    optimizer.close()


def test_what_was_given_back_is_not_gone_backward_through() -> None:
    """Without the error, the pass would silently use the values after the step."""
    params = model()
    names = [name for name, _ in params.named_parameters()]
    optimizer = over_threads(sgd, params, dict.fromkeys(names, "ps"), lr=0.1)
    snapshot = optimizer.snapshot()
    leaves = list(snapshot.parameters.values())
    loss = loss_of(snapshot.parameters)
    grads = torch.autograd.grad(loss, leaves, retain_graph=True)
    optimizer.step(grads, snapshot)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaves)
    assert repr(snapshot) == "Snapshot(given back, at step 0)"
    optimizer.close()


def test_snapshots_of_any_memory() -> None:
    """Leaves of a snapshot are like the parameters, for any strides, dtypes, and slices."""
    base = noise(3, 6, 4)
    params = {
        "transposed": noise(0, 3, 2).t().requires_grad_(),
        "slice": base[1:4, ::2].requires_grad_(),
        "complex": torch.complex(noise(1, 3), noise(2, 3)).requires_grad_(),
        "half": noise(4, 3).bfloat16().requires_grad_(),
        "empty": torch.zeros(0, 2, requires_grad=True),
        "frozen": noise(5, 2),
    }
    before = {name: one.detach().clone() for name, one in params.items()}
    optimizer = over_threads(sgd, params, dict.fromkeys(params, "ps"), lr=0.5)
    for _ in range(2):  # first with shared memory, then with a copy
        held = optimizer.snapshot()
        assert_same(held.parameters, before)
        for name, leaf in held.parameters.items():
            assert leaf.is_leaf
            assert leaf.requires_grad == (name != "frozen")
            assert leaf.dtype == params[name].dtype
        optimizer.step({name: torch.ones_like(one) for name, one in params.items()})
        assert_same(held.parameters, before)
        before = {name: one.sub(0.5) for name, one in before.items()}
        assert_same(params, before)
    optimizer.close()


def test_what_has_memory_in_common_with_others_stays_there() -> None:
    """A step with a reader moves only parameters that share no memory with other tensors."""
    table = noise(0, 4, 3)
    params = {"rows": table[1:3].requires_grad_(), "alone": noise(2, 3).requires_grad_()}
    before = {name: one.detach().clone() for name, one in params.items()}
    optimizer = over_threads(sgd, params, dict.fromkeys(params, "ps"), lr=1.0)
    with optimizer.snapshot() as held:
        optimizer.step([torch.ones(2, 3), torch.ones(3)])
        assert_same(held.parameters, before)
    assert torch.equal(table[1:3], before["rows"] - 1.0)
    copied = optimizer.counters()["ps"].copied_bytes
    assert copied == 4 * 6 + 4 * 3  # the reader's copy, and the moved parameter
    optimizer.close()


class Odd(nn.Module):
    """Module that is used twice, with tied parameters, a buffer, an LSTM, and None entries."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.first.weight
        self.lstm = nn.LSTM(3, 3)
        self.nothing = None
        self.register_module("none", None)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, data: Tensor, *, scale: float) -> Tensor:
        self.steps += 1
        found: Tensor = self.lstm(self.tied(self.again(self.first(data))))[0]
        return found * scale


def test_a_module_runs_on_several_versions_at_once() -> None:
    torch.manual_seed(0)
    module = Odd()
    names = [name for name, _ in module.named_parameters()]
    before = {name: one.detach().clone() for name, one in module.state_dict().items()}
    optimizer = over_threads(sgd, module, dict.fromkeys(names, "ps"), lr=0.1)
    old = optimizer.snapshot()
    optimizer.step([torch.ones_like(one) for one in module.parameters()])
    inputs = noise(1, 2, 4, 3)
    want = [module(inputs, scale=2.0)]
    new = optimizer.snapshot()
    twin = Odd()
    twin.load_state_dict(before)
    want.append(twin(inputs, scale=2.0))
    assert not torch.equal(*want)
    together = threading.Barrier(8)

    def reads(snapshot: Snapshot, wanted: Tensor) -> None:
        together.wait(60)
        for _ in range(20):
            found = snapshot.run(module, inputs, scale=2.0)
            assert torch.equal(found, wanted)
            torch.autograd.grad(found.sum(), list(snapshot.parameters.values()))

    run([partial(reads, *pair) for pair in [(new, want[0]), (old, want[1])] * 4])
    assert dict(module.named_parameters()).keys() == old.parameters.keys()
    old.close()
    with pytest.raises(RuntimeError, match="given back: read a new one"):
        old.run(module, inputs, scale=2.0)
    optimizer.close()


def accumulating(params: Mapping[str, Tensor], **workers: str) -> DistributedOptimizer:
    return over_threads(chain(accumulate(2), sgd(lr=0.1)), dict(params), workers)


def test_a_parameter_that_a_gate_lets_through_late_makes_way_too() -> None:
    """An accumulated gradient steps the parameter, and a snapshot keeps the old values."""
    params = {name: nn.Parameter(torch.ones(3)) for name in ("p", "q")}
    optimizer = accumulating(params, p="w0", q="w0")
    optimizer.step({"p": torch.ones(3), "q": torch.ones(3)})
    held = list(optimizer.snapshot().parameters.values())
    loss = (held[0] * held[1]).sum()
    optimizer.step({"p": torch.ones(3), "q": None})
    assert params["q"].tolist() == [pytest.approx(0.95)] * 3
    assert [one.tolist() for one in held] == [[1.0] * 3] * 2
    assert [one.tolist() for one in torch.autograd.grad(loss, held)] == [[1.0] * 3] * 2
    optimizer.close()


def test_gradients_of_before_a_late_step_are_of_an_age() -> None:
    params = {name: nn.Parameter(torch.ones(1)) for name in ("p", "q")}
    optimizer, grads = (
        accumulating(params, p="w0", q="w1"),
        {"p": torch.ones(1), "q": torch.ones(1)},
    )
    optimizer.limit_staleness(0, "refuse")
    optimizer.step(grads)
    snapshot = optimizer.snapshot()
    optimizer.step({"p": None, "q": None})
    before = [one.item() for one in params.values()]
    with pytest.raises(StaleError):
        optimizer.step(grads, snapshot)
    assert [one.item() for one in params.values()] == before == [pytest.approx(0.95)] * 2
    optimizer.step(grads, optimizer.snapshot())
    optimizer.close()
