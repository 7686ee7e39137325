"""PostLocalSGDOptimizer and its hook, on ranks that are threads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from functional_optim import TorchOptimizer, adahessian, adamw, sgd
from hooks import (
    AveragingSchedule,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    ScheduledModelAverager,
    post_localSGD_hook,
)
from hooks.averaging import ModelAverager, OuterModelAverager
from hooks.averaging.compression import Blocks
from hooks.averaging.contrib import GossipModelAverager
from sharding.transport.local import LocalWorld
from tests.choices import case

from .training import backward, mean_of, model, same, saved_and_loaded, train, values, wrapped

SCHEDULE = AveragingSchedule((2, 6), (2, None), warmup=3)
STEPS = 11


class Run:
    """A rank's model under DDP, with hook and optimizer from one schedule."""

    def __init__(self, group: Any, *, delay: int = 0, **options: Any) -> None:
        self.rank = group.rank()
        self.module = model()
        self.averager = ScheduledModelAverager(SCHEDULE, group, delay=delay)
        subgroup = self.averager.period_process_group_dict[2]
        self.hook = PostLocalSGDState.from_schedule(SCHEDULE, group, subgroup)
        self.ddp = wrapped(self.module, group, post_localSGD_hook, self.hook)
        inner = TorchOptimizer(self.module.parameters(), adamw(lr=0.05))
        self.optimizer = PostLocalSGDOptimizer(inner, self.averager, **options)

    def steps(self, which: range) -> list[Tensor]:
        train(self.ddp, self.optimizer, self.rank, which)
        return values(self.module)


@torch.no_grad()
def write(module: nn.Module, given: list[Tensor]) -> None:
    for param, one in zip(module.parameters(), given, strict=True):
        param.copy_(one)


def test_stopped_in_mid_period_and_loaded_is_never_stopped() -> None:
    for delay, cut in [(0, 2), (0, 5), (1, 4), (1, 6)]:

        def whole(group: Any, delay: int = delay) -> list[Tensor]:
            return Run(group, delay=delay).steps(range(STEPS))

        def stopped(group: Any, delay: int = delay, cut: int = cut) -> list[Tensor]:
            first = Run(group, delay=delay)
            first.steps(range(cut))
            saved = saved_and_loaded((first.module.state_dict(), first.optimizer.state_dict()))
            second = Run(group, delay=delay)
            second.module.load_state_dict(saved[0])
            second.optimizer.load_state_dict(saved[1])
            found = second.steps(range(cut, STEPS))
            assert second.hook.iter == second.averager.step == STEPS
            return found

        want, found = LocalWorld(4).run(whole), LocalWorld(4).run(stopped)
        with case(delay=delay, cut=cut):
            assert all(same(one, other) for one, other in zip(want, found, strict=True))


def test_the_hook_averages_gradients_over_all_and_then_over_few() -> None:
    def gradients(group: Any) -> list[list[Tensor]]:
        run = Run(group)
        seen = []
        for step in range(5):
            backward(run.ddp, run.rank, step)
            seen.append([param.grad.clone() for param in run.module.parameters()])
        return seen

    def alone(rank: int, step: int) -> list[Tensor]:
        module = model()
        backward(module, rank, step)
        return [param.grad for param in module.parameters()]

    found = LocalWorld(4).run(gradients)
    for step in range(5):
        for rank in range(4):
            together = range(4) if step < 3 else range(rank // 2 * 2, rank // 2 * 2 + 2)
            want = mean_of([alone(other, step) for other in together])
            for one, other in zip(found[rank][step], want, strict=True):
                with case(step=step, rank=rank):
                    torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


def test_gradients_may_be_left_alone_after_the_warm_up() -> None:
    def gradients(group: Any) -> bool:
        module, other = model(), model()
        state = PostLocalSGDState(group, None, 0, post_local_gradient_allreduce=False)
        backward(wrapped(module, group, post_localSGD_hook, state), group.rank(), 0)
        backward(other, group.rank(), 0)
        pairs = zip(module.parameters(), other.parameters(), strict=True)
        return all(torch.equal(one.grad, two.grad) for one, two in pairs)

    assert LocalWorld(2).run(gradients) == [True, True]


def test_hook_and_averager_that_disagree_are_refused_at_the_first_step() -> None:
    def step(group: Any) -> str:
        module = model()
        ddp = wrapped(module, group, post_localSGD_hook, PostLocalSGDState(group, group, 5))
        inner = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(4, 6, group))
        backward(ddp, group.rank(), 0)
        before = values(module)
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        assert same(before, values(module))
        return str(caught.value)

    for message in LocalWorld(2).run(step):
        assert "in the first 5 iterations" in message and "only after 6" in message


def test_state_and_buffers_are_averaged_on_request() -> None:
    def run(group: Any, average: bool) -> list[Tensor]:
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        with torch.no_grad():
            [param.fill_(0.5) for param in module.parameters()]
            module[0].weight.copy_(torch.eye(3))
        inner = torch.optim.AdamW(module.parameters(), lr=0.1)
        optimizer = PostLocalSGDOptimizer(
            inner,
            PeriodicModelAverager(2, 0, group),
            average_state=average,
            buffers=list(module.buffers()) if average else [],
        )
        train(module, optimizer, group.rank(), [0])
        state = [inner.state[param]["exp_avg_sq"] for param in module.parameters()]
        assert module[1].num_batches_tracked == 1
        return [*state, module[1].running_mean, module[1].running_var]

    for average in (True, False):
        one, other = LocalWorld(2).run(lambda group, average=average: run(group, average))
        with case(average=average):
            assert same(one, other) == average


def test_a_scaler_that_finds_infinities_leaves_out_the_step_and_not_the_mean() -> None:
    """A rank that skipped the mean too would leave the other ranks waiting for ever."""

    def step(group: Any) -> tuple[list[Tensor], int]:
        module = model()
        inner = torch.optim.SGD(module.parameters(), lr=0.1)
        averager = PeriodicModelAverager(2, 0, group)
        optimizer = PostLocalSGDOptimizer(inner, averager)
        scaler = GradScaler("cpu", init_scale=8.0)
        loss = scaler.scale(module(torch.ones(1, 3)).sum())
        (loss * (float("inf") if group.rank() == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        return values(module), averager.step

    stepped = model()
    inner = torch.optim.SGD(stepped.parameters(), lr=0.1)
    stepped(torch.ones(1, 3)).sum().backward()
    inner.step()
    want = mean_of([values(stepped), values(model())])
    for found, count in LocalWorld(2).run(step):
        assert count == 1
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-7)


def test_it_is_the_optimizer_within_to_all_who_ask(world_of_one: None) -> None:
    module = model()
    inner = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(4))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state and optimizer.defaults is inner.defaults
    assert repr(optimizer) == repr(inner)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    optimizer.register_state_dict_post_hook(lambda *_: called.append("saved"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = module(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    assert isinstance(optimizer.step(closure), Tensor)
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.05
    assert optimizer.state_dict()["step"] == 1
    assert called == ["pre", "post", "saved"]
    optimizer.zero_grad()
    assert all(param.grad is None for param in module.parameters())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2


def test_checkpoints_of_the_optimizer_within_load_with_a_warning(world_of_one: None) -> None:
    module = model()
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(4))
    optimizer.averager.step = 3
    with pytest.warns(UserWarning, match="does not contain a step counter"):
        optimizer.load_state_dict(inner.state_dict())
    assert optimizer.averager.step == 0


def test_torchs_checkpoint_helpers_create_state_without_a_step(world_of_one: None) -> None:
    """They step an optimizer that has no state."""
    for kind, has_state in ((torch.optim.AdamW, True), (torch.optim.SGD, False)):
        with case(optimizer=kind):
            module = model()
            before, averager = values(module), PeriodicModelAverager(4)
            optimizer = PostLocalSGDOptimizer(kind(module.parameters(), lr=0.1), averager)
            for _ in range(2):
                found = get_optimizer_state_dict(module, optimizer)
                assert bool(found["state"]) == has_state
                assert averager.step == 0
            assert same(values(module), before)
            train(module, optimizer, 0, range(1))
            assert averager.step == 1


def test_counts_of_steps_are_not_averaged_with_the_state() -> None:
    """In torch, the count of a parameter without dimensions has the shape of the parameter."""

    def run(group: Any) -> tuple[float, float]:
        param = nn.Parameter(torch.tensor(1.0))
        inner = torch.optim.Adam([param], lr=0.1, foreach=False)
        averager = PeriodicModelAverager(2, 1, group)
        optimizer = PostLocalSGDOptimizer(inner, averager, average_state=True)
        for step in range(2):
            missing = step == 1 and group.rank() == 1
            param.grad = None if missing else torch.tensor(1.0 + group.rank())
            optimizer.step()
        state = inner.state[param]
        return float(state["step"]), float(state["exp_avg"])

    (first, average), (second, other) = LocalWorld(2).run(run)
    assert (first, second) == (2.0, 1.0) and average == other


AVERAGERS: dict[str, Callable[[list[Tensor]], ModelAverager]] = {
    "periodic": lambda params: PeriodicModelAverager(6, delay=4),
    "outer": lambda params: OuterModelAverager(params, sgd(lr=0.7), 6, delay=4),
    "fragments": lambda params: OuterModelAverager(params, sgd(lr=0.7), 6, fragments=2, delay=4),
    "compressed": lambda params: OuterModelAverager(
        params, sgd(lr=0.7), 6, delay=4, compression=Blocks(8)
    ),
    "momentum": lambda params: OuterModelAverager(params, adamw(lr=0.7), 6, delay=4),
    "gossip": lambda params: GossipModelAverager(params, 6),
}
OF_ANOTHER = {
    ("within", "outer"): "lacks outer and anchors and in_flight, which OuterModelAverager needs",
    ("within", "gossip"): "lacks anchors and deltas",
    ("periodic", "outer"): "lacks outer and anchors",
    ("periodic", "gossip"): "lacks anchors and deltas",
    ("outer", "periodic"): "lacks due and sent and mean",
    ("outer", "fragments"): "means in flight of fragment 0 have shapes",
    ("fragments", "outer"): "means in flight of fragment 0 have shapes",
    ("compressed", "outer"): "residuals have shapes",
    ("outer", "momentum"): "a parameter group has no betas, eps: it is of another optimizer",
}


@pytest.mark.parametrize(("saved", "here"), OF_ANOTHER)
@pytest.mark.filterwarnings("ignore:Loaded state dict does not contain a step counter")
def test_a_checkpoint_of_another_averager_is_refused_and_changes_nothing(
    world_of_one: None, saved: str, here: str
) -> None:
    """A refused checkpoint changes nothing, although averaging has begun on both sides."""

    def made(kind: str, lr: float, steps: int) -> tuple[nn.Module, PostLocalSGDOptimizer]:
        module = model()
        inner = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.5)
        averager = AVERAGERS[kind](list(module.parameters()))
        optimizer = PostLocalSGDOptimizer(inner, averager)
        train(module, optimizer, 0, range(steps))
        return module, optimizer

    given = made("periodic" if saved == "within" else saved, 0.1, 6)[1]
    checkpoint = given.optim.state_dict() if saved == "within" else given.state_dict()
    module, optimizer = made(here, 0.2, 1)
    twin, other = made(here, 0.2, 1)
    with pytest.raises(ValueError, match=OF_ANOTHER[saved, here]):
        optimizer.load_state_dict(checkpoint)
    train(module, optimizer, 0, range(1, 12))
    train(twin, other, 0, range(1, 12))
    assert optimizer.averager.step == 12
    assert all(torch.equal(*both) for both in zip(values(module), values(twin), strict=True))


@pytest.mark.parametrize("name", AVERAGERS)
def test_parameters_may_be_loaded_until_the_first_step(world_of_one: None, name: str) -> None:
    """Outer rules begin from the parameters of the first step, which can be loaded before."""
    found = []
    for is_loaded_first in (True, False):
        module, other = model(), [0.5 * one for one in values(model())]
        if is_loaded_first:
            write(module, other)
        averager = AVERAGERS[name](list(module.parameters()))
        inner = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer = PostLocalSGDOptimizer(inner, averager)
        if not is_loaded_first:
            write(module, other)
        train(module, optimizer, 0, range(12))
        found.append(values(module))
    assert same(*found)


def test_what_it_cannot_wrap_is_refused(world_of_one: None) -> None:
    inner = torch.optim.SGD(model().parameters(), lr=0.1)
    averager = PeriodicModelAverager(4)

    class Other:
        step = 0

        def average_parameters(self, params: Any) -> None:
            self.step += 1

    for arguments, options, message in [
        ((averager, averager), {}, r"optim must be a torch.optim.Optimizer, got"),
        ((inner, inner), {}, "averager must have average_parameters"),
        ((inner, Other()), {"average_state": True}, "got Other"),
    ]:
        with case(message=message), pytest.raises(TypeError, match=message):
            PostLocalSGDOptimizer(*arguments, **options)
    optimizer = PostLocalSGDOptimizer(inner, Other())  # any averager, as in torch
    optimizer.step()
    assert optimizer.state_dict()["step"] == 1


def test_what_the_optimizer_within_is_given_beside_gradients_is_handed_on() -> None:
    def given(group: Any) -> list[Tensor]:
        module = nn.Linear(1, 1, bias=False)
        param = module.weight
        nn.init.ones_(param)
        inner = TorchOptimizer([param], adahessian(0.5, (0.0, 0.0), eps=0.0))
        optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(2, 0, group))
        param.grad = torch.full_like(param, 1.0 + group.rank())
        with pytest.raises(TypeError, match="needs 'hessian' of each parameter"):
            optimizer.step()
        optimizer.step(extra={"hessian": {param: torch.full_like(param, 2.0)}})
        return values(module)

    for found in LocalWorld(2).run(given):
        assert found[0].item() == 0.625  # the mean of 1 - 0.5 * 1/2 and 1 - 0.5 * 2/2
