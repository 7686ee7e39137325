"""Options of workers, which are sent only to a worker that does not have them."""

from typing import Any

import pytest
import torch

from functional_optim import DistributedOptimizer, adamw, chain, clip_by_global_norm, sgd
from functional_optim.remote import ThreadTransport
from functional_optim.remote.options import VersionedOptions
from tests.choices import case

from .support import assert_same, gradients, locally, parameters, placement


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that records for each call if its options were sent in full."""
    found: list[Any] = []
    call = ThreadTransport.call

    def noted(self: ThreadTransport, handle: Any, method: str, *args: Any) -> Any:
        if method in ("step", "measure"):
            found.append(isinstance(args[1], VersionedOptions))
        return call(self, handle, method, *args)

    monkeypatch.setattr(ThreadTransport, "call", noted)
    return found


def taken(sent: list[Any]) -> list[bool]:
    """Return the noted entries, and clear them."""
    found = list(sent)
    sent.clear()
    return found


def test_options_are_sent_when_they_have_changed(sent: list[Any]) -> None:
    params = parameters()
    optimizer = DistributedOptimizer.over_threads(sgd, params, placement(2), lr=0.1, momentum=0.9)
    group, twin = optimizer.param_groups[0], sgd(lr=0.1, momentum=0.9)
    want = list(parameters().values())
    state = twin.init(want)

    def step(number: int, lr: float) -> list[bool]:
        given = gradients(number)
        optimizer.step(given)
        twin.update_(want, list(given.values()), state, lr=lr)
        assert_same(params, dict(zip(params, want, strict=True)))
        return taken(sent)

    assert step(0, 0.1) == [True, True]
    assert step(1, 0.1) == [False, False]
    group["lr"] = 0.5
    assert step(2, 0.5) == [True, True]
    assert step(3, 0.5) == [False, False]
    optimizer.load_state_dict(optimizer.state_dict())
    assert step(4, 0.5) == [True, True]
    assert step(5, 0.5) == [False, False]
    # Options that can change in place are sent and applied in each step.
    group["lr"] = torch.tensor(0.25)
    assert step(6, 0.25) == [True, True]
    group["lr"].fill_(0.125)
    assert step(7, 0.125) == [True, True]
    group["lr"] = 0.5
    assert step(8, 0.5) == [True, True]
    optimizer.close()


class Choosy(torch.optim.SGD):
    """Optimizer class without functional equivalent whose step refuses a learning rate."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.param_groups[0]["lr"] < 0:
            raise ValueError("lr must be something else")
        super().step()


@pytest.mark.filterwarnings("ignore:.*no functional equivalent")
def test_options_that_were_refused_are_not_taken_for_acknowledged(sent: list[Any]) -> None:
    params = parameters()
    optimizer = DistributedOptimizer.over_threads(Choosy, params, placement(2), lr=0.1)
    optimizer.param_groups[0]["lr"] = -1.0
    for _ in range(2):
        with pytest.raises(ValueError, match=r"step failed on 2 of 2 workers:\n.*lr must be"):
            optimizer.step(gradients(0))
        assert taken(sent) == [True, True]
    assert_same(params, parameters())
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step(gradients(0))
    optimizer.close()
    assert_same(params, locally(sgd(lr=0.1), [gradients(0)]))


def test_options_that_one_worker_would_refuse_reach_none(sent: list[Any]) -> None:
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
            assert taken(sent) == []
            assert_same(params, parameters())
            second["lr"] = 0.1
            optimizer.step(gradients(0))
            made = adamw if cls is torch.optim.AdamW else sgd
            assert_same(params, locally(made(lr=0.1), [gradients(0)]))
            optimizer.close()
            taken(sent)


def test_a_worker_that_does_not_have_the_options_is_sent_them(sent: list[Any]) -> None:
    """A worker that got other options meanwhile gets the options of the step, and steps once."""
    own = chain(clip_by_global_norm(0.1), sgd(lr=0.1))
    params = parameters()
    optimizer = DistributedOptimizer.over_threads(own, params, placement(2))
    optimizer.step(gradients(0))
    assert taken(sent) == [True, True, False, False]
    lost = optimizer._workers.handles["ps1"].target
    lost.load_state_dict(lost.state_dict(VersionedOptions(7, [{"lr": 9.0}])))
    optimizer.step(gradients(1))
    assert taken(sent) == [False, False, True, False, False]
    optimizer.close()
    assert_same(params, locally(own, [gradients(0), gradients(1)]))
    assert lost.counters().steps == 2


def test_a_step_that_lacks_options_changes_nothing(sent: list[Any]) -> None:
    params = parameters()
    optimizer = DistributedOptimizer.over_threads(sgd, params, placement(2), lr=0.1)
    optimizer.step(gradients(0))
    optimizer._workers.handles["ps1"].target._version = 0
    taken(sent)
    optimizer.step(gradients(1), optimizer.snapshot())
    assert taken(sent) == [False, False, True]
    assert [(one.steps, one.staleness) for one in optimizer.counters().values()] == [
        (2, {0: 1}),
        (2, {0: 1}),
    ]
    optimizer.close()
    assert_same(params, locally(sgd(lr=0.1), [gradients(0), gradients(1)]))


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
