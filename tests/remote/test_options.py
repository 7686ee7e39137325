"""Options of workers, which are sent with each call."""

from typing import Any

import pytest
import torch

from functional_optim import DistributedOptimizer, adamw, sgd
from functional_optim.remote import ThreadTransport
from tests.choices import case

from .support import assert_same, gradients, locally, parameters, placement


def test_options_hold_from_the_step_after_a_change_on() -> None:
    params = parameters()
    optimizer = DistributedOptimizer.over_threads(sgd, params, placement(2), lr=0.1, momentum=0.9)
    group, twin = optimizer.param_groups[0], sgd(lr=0.1, momentum=0.9)
    want = list(parameters().values())
    state = twin.init(want)

    def step(number: int, lr: float) -> None:
        given = gradients(number)
        optimizer.step(given)
        twin.update_(want, list(given.values()), state, lr=lr)
        assert_same(params, dict(zip(params, want, strict=True)))

    step(0, 0.1)
    step(1, 0.1)
    group["lr"] = 0.5
    step(2, 0.5)
    step(3, 0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    step(4, 0.5)
    step(5, 0.5)
    # Options that can change in place are applied in each step.
    group["lr"] = torch.tensor(0.25)
    step(6, 0.25)
    group["lr"].fill_(0.125)
    step(7, 0.125)
    group["lr"] = 0.5
    step(8, 0.5)
    optimizer.close()


def test_the_options_of_the_caller_replace_those_of_a_state_dict() -> None:
    """The options of a worker follow the caller, also if the caller's load has changed none."""
    params = parameters()
    optimizer = DistributedOptimizer.over_threads(sgd, params, placement(2), lr=0.1)
    optimizer.step(gradients(0))
    own = optimizer._workers.handles["ps1"].target
    saved = own.state_dict([{"lr": 0.1}])
    saved["param_groups"][0]["lr"] = 9.0
    own.load_state_dict(saved)
    own.finish_load(True)
    optimizer.step(gradients(1))
    optimizer.close()
    assert_same(params, locally(sgd(lr=0.1), [gradients(0), gradients(1)]))


class Counting(torch.optim.SGD):
    """Optimizer class without functional equivalent that counts its steps in its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["lr"] / group["k"])


@pytest.mark.filterwarnings("ignore:.*no functional equivalent")
def test_a_class_that_counts_in_its_groups_counts_on() -> None:
    """A changed learning rate and a state dict that is read leave the counts."""
    params, twins = parameters(), parameters()
    optimizer = DistributedOptimizer.over_threads(Counting, params, placement(2), lr=0.1)
    twin = Counting(twins.values(), lr=0.1)
    for number in range(6):
        if number == 2:
            optimizer.param_groups[0]["lr"] = twin.param_groups[0]["lr"] = 0.5
        if number == 4:
            optimizer.state_dict()
        given = gradients(number)
        optimizer.step(given)
        for name, grad in given.items():
            twins[name].grad = grad
        twin.step()
        assert_same(params, twins)
    optimizer.close()


class Choosy(torch.optim.SGD):
    """Optimizer class without functional equivalent whose step refuses a learning rate."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.param_groups[0]["lr"] < 0:
            raise ValueError("lr must be something else")
        super().step()


@pytest.mark.filterwarnings("ignore:.*no functional equivalent")
def test_options_that_were_refused_leave_the_parameters() -> None:
    params = parameters()
    optimizer = DistributedOptimizer.over_threads(Choosy, params, placement(2), lr=0.1)
    optimizer.param_groups[0]["lr"] = -1.0
    for _ in range(2):
        with pytest.raises(ValueError, match=r"step failed on 2 of 2 workers:\n.*lr must be"):
            optimizer.step(gradients(0))
    assert_same(params, parameters())
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step(gradients(0))
    optimizer.close()
    assert_same(params, locally(sgd(lr=0.1), [gradients(0)]))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records the method of each call of a step."""
    found: list[str] = []
    call = ThreadTransport.call

    def noted(self: ThreadTransport, handle: Any, method: str, *args: Any) -> Any:
        if method in ("step", "measure"):
            found.append(method)
        return call(self, handle, method, *args)

    monkeypatch.setattr(ThreadTransport, "call", noted)
    return found


def test_options_that_one_worker_would_refuse_reach_none(sent: list[str]) -> None:
    """All workers make a step or an optimizer, or none does."""

    def grouped(params: Any, **options: Any) -> list[dict[str, Any]]:
        pairs = list(params.items())
        return [{"params": pairs[:1]}, {"params": pairs[1:], **options}]

    where = dict.fromkeys(parameters(), "ps1") | {"embed.weight": "ps0"}
    for cls, text in ((torch.optim.AdamW, "lr must be"), (sgd, "lr must be")):
        with case(cls=cls):
            params = parameters()
            with pytest.raises(ValueError, match=r"^the constructor failed on 1 of 2 .*\n  ps1: "):
                DistributedOptimizer.over_threads(cls, grouped(params, lr=-1.0), where)
            optimizer = DistributedOptimizer.over_threads(cls, grouped(params), where, lr=0.1)
            second = optimizer.param_groups[1]
            second["lr"] = -1.0
            with pytest.raises(ValueError, match=rf"^step failed on 1 of 2 .*\n  ps1: .*{text}"):
                optimizer.step(gradients(0))
            del second["lr"]
            with pytest.raises(ValueError, match=r"\n  ps1: .*group 1 has no lr; .* put it back"):
                optimizer.step(gradients(0))
            assert sent == []
            assert_same(params, parameters())
            second["lr"] = 0.1
            optimizer.step(gradients(0))
            made = adamw if cls is torch.optim.AdamW else sgd
            assert_same(params, locally(made(lr=0.1), [gradients(0)]))
            optimizer.close()
            sent.clear()


def test_a_list_that_is_changed_inside_holds_from_the_next_step_on() -> None:
    params, twins = parameters(), parameters()
    optimizer = DistributedOptimizer.over_threads(torch.optim.AdamW, params, placement(2), lr=0.1)
    twin = torch.optim.AdamW(twins.values(), lr=0.1, foreach=False)
    lists = [[0.9, 0.999], [0.9, 0.999]]
    for one, betas in zip((optimizer, twin), lists, strict=True):
        one.param_groups[0]["betas"] = betas
    for step, beta in enumerate((0.9, 0.0)):
        for betas in lists:
            betas[0] = beta
        given = gradients(step)
        optimizer.step(given)
        for name, grad in given.items():
            twins[name].grad = grad
        twin.step()
    optimizer.close()
    assert_same(params, twins)
