"""QHM against its paper's formula, its identities, and the faults of torch's published recipe."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import Optimizer, adamw, qhm, sgd

from .support import Frozen, assert_same, noise, steps

GRADS = [noise(index + 1, 6) for index in range(6)]


def _formula(
    lr: float, beta: float, nu: float, decay: float, kind: str, sign: float
) -> tuple[Tensor, Tensor]:
    """Ma & Yarats, eq. 3 and 4, in Python numbers, element by element."""
    ends, buffers = [], []
    for index, start in enumerate(noise(0, 6).tolist()):
        p, b = start, 0.0
        for grad in GRADS:
            g = sign * grad[index].item()
            if kind == "grad":
                g += decay * p
            else:
                p -= lr * decay * p
            b = beta * b + (1 - beta) * g
            p -= lr * ((1 - nu) * g + nu * b)
        ends.append(p)
        buffers.append(b)
    return torch.tensor(ends).double(), torch.tensor(buffers).double()


def _run(optimizer: Optimizer) -> Any:
    return steps(optimizer, noise(0, 6), lambda index: GRADS[index], len(GRADS))


@pytest.mark.parametrize("kind", ["grad", "direct"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("nu", [0.0, 0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("maximize", [False, True])
def test_it_is_the_formula(beta: float, nu: float, decay: float, kind: Any, maximize: bool) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        wanted, buffer = _formula(0.1, beta, nu, decay, kind, -1.0 if maximize else 1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    end, state = _run(qhm(0.1, beta, nu, decay, weight_decay_type=kind, maximize=maximize))
    start = noise(0, 6)
    torch.testing.assert_close(end - start, wanted - start, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        state.leaves.stages[-1].momentum_buffer, buffer, rtol=1e-12, atol=1e-15
    )


def test_kinds_of_weight_decay_differ_with_momentum() -> None:
    ends = [_run(qhm(0.1, weight_decay=0.3, weight_decay_type=k))[0] for k in ("grad", "direct")]
    assert (ends[0] - ends[1]).abs().min() > 1e-3


def test_direct_decay_is_the_decay_of_adamw() -> None:
    zero = torch.zeros(6).double()
    optimizers = (
        qhm(0.1, weight_decay=0.3, weight_decay_type="direct"),
        adamw(0.1, weight_decay=0.3),
    )
    ends = [steps(one, noise(0, 6), lambda index: zero)[0] for one in optimizers]
    assert_same(ends[0], ends[1])
    assert not torch.equal(ends[0], noise(0, 6))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_nu_0_is_sgd(momentum: float) -> None:
    for decay in (0.0, 0.1):
        end, _ = _run(qhm(0.1, momentum, 0.0, decay))
        assert_same(end, _run(sgd(0.1, weight_decay=decay))[0])


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_nu_1_is_momentum_sgd_with_dampening_from_a_buffer_of_zero(momentum: float) -> None:
    """torch does not damp the first gradient; a buffer that is there before makes it do so."""
    theirs = nn.Parameter(noise(0, 6))
    optimizer = torch.optim.SGD([theirs], 0.1, momentum, dampening=momentum, foreach=False)
    optimizer.state[theirs]["momentum_buffer"] = torch.zeros(6).double()
    for grad in GRADS:
        theirs.grad = grad
        optimizer.step()
    end, state = _run(qhm(0.1, momentum, 1.0))
    torch.testing.assert_close(end, theirs.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(
        state.leaves.stages[-1].momentum_buffer,
        optimizer.state[theirs]["momentum_buffer"],
        rtol=1e-13,
        atol=1e-15,
    )


def test_nu_1_differs_from_our_sgd_by_the_undamped_first_gradient_alone() -> None:
    """SGD's first gradient weighs 1 / (1 - momentum) times as much: shrink it, and they agree."""
    shrunk = [GRADS[0] * (1 - 0.9), *GRADS[1:]]
    end, _ = _run(qhm(0.1, 0.9, 1.0))
    wanted, _ = steps(
        sgd(0.1, momentum=0.9, dampening=0.9), noise(0, 6), lambda index: shrunk[index], len(GRADS)
    )
    torch.testing.assert_close(end, wanted, rtol=1e-13, atol=1e-14)
    plain, _ = _run(sgd(0.1, momentum=0.9, dampening=0.9))
    assert (end - plain).abs().min() > 1e-3


def test_momentum_0_is_sgd_for_any_nu() -> None:
    end, state = _run(qhm(0.1, 0.0, 0.7))
    torch.testing.assert_close(end, _run(sgd(0.1))[0], rtol=1e-14, atol=1e-15)
    assert_same(state.leaves.stages[-1].momentum_buffer, GRADS[-1])


class TestFaultsOfTheRecipe:
    def test_the_buffer_lives_on_from_step_to_step(self) -> None:
        param, optimizer = noise(0, 6), qhm(0.1, 0.9)
        state = optimizer.init(param)
        param, state = optimizer.update(param, GRADS[0], state)
        _, state = optimizer.update(param, torch.zeros_like(param), state)
        wanted = 0.9 * (0.1 * GRADS[0])
        torch.testing.assert_close(state.leaves.stages[-1].momentum_buffer, wanted)

    def test_state_is_there_before_the_first_step(self) -> None:
        state = qhm().init({"a": noise(0, 6), "b": noise(1, 2)})
        for key, size in (("a", 6), ("b", 2)):
            assert_same(state.leaves[key].stages[-1].momentum_buffer, torch.zeros(size).double())
            assert int(state.leaves[key].step) == 0

    def test_a_parameter_without_a_gradient_is_no_obstacle(self) -> None:
        params = {"a": noise(0, 6), "b": noise(1, 2)}
        state = qhm().init(params)
        frozen = Frozen(params["b"], state.leaves["b"])
        qhm().update_(params, {"a": GRADS[0], "b": None}, state)
        frozen.assert_untouched()
        assert not torch.equal(params["a"], noise(0, 6))

    def test_the_gradient_is_not_changed_by_the_decay(self) -> None:
        param, grad = noise(0, 6), noise(1, 6)
        frozen = Frozen(grad)
        qhm(weight_decay=0.5).update_(param, grad, qhm().init(param))
        frozen.assert_untouched()

    def test_its_defaults_are_those_of_the_paper(self) -> None:
        assert qhm().hyper["momentum"] == 0.999
        assert qhm().hyper["nu"] == 0.7
        assert qhm().hyper["lr"] == 1.0
