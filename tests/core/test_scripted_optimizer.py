"""optimizer.script(params): the interface of torch's functional optimizers, on one program."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import (
    Optimizer,
    ScriptedOptimizer,
    State,
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    sgd,
)

from .support import CHAINS, VARIANTS, Frozen, assert_same, noise, tree

EVERY = {**VARIANTS, **CHAINS}


def _grads(step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [noise(10 * step + i, *shape, dtype=dtype) for i, shape in enumerate([(3, 2), (4,), ()])]


def _params(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return _grads(0, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("name", EVERY)
def test_step_is_update_in_place_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    optimizer = EVERY[name]
    params, wanted = _params(dtype), _params(dtype)
    program, state = optimizer.script(params), optimizer.init(wanted)
    for step in range(1, 5):
        grads: list[Any] = _grads(step, dtype)
        grads[1] = None if step == 2 else grads[1]
        frozen = Frozen(grads)
        program.step(grads)
        frozen.assert_untouched()
        optimizer.update_(wanted, grads, state)
        assert_same(params, wanted)
        assert_same(program.state, state)
    assert [int(leaf.step) for leaf in program.state.leaves] == [4, 3, 4]


@pytest.mark.parametrize("name", VARIANTS)
def test_step_param_steps_one_parameter(name: str) -> None:
    optimizer = VARIANTS[name]
    params, wanted = _params(), _params()
    program, state = optimizer.script(params), optimizer.init(wanted)
    for step in range(1, 4):
        grads: list[Any] = _grads(step)
        untouched = Frozen(params[0], params[2], program.state.leaves[0])
        program.step_param(params[1], grads[1])
        untouched.assert_untouched()
        program.step_param(params[0], grads[0])
        optimizer.update_(wanted, [grads[0], grads[1], None], state)
    assert_same((params, program.state), (wanted, state))


def test_none_is_no_step() -> None:
    params = _params()
    program = adam(0.1).script(params)
    frozen = Frozen(params, program.state)
    program.step_param(params[0], None)
    program.step([None, None, None])
    frozen.assert_untouched()


def test_gradients_stand_in_the_order_of_the_leaves_without_none() -> None:
    params = {"b": torch.ones(2), "a": [None, torch.ones(3)], "c": {"x": None}}
    program = sgd(1.0).script(params)
    program.step([torch.full((3,), 2.0), torch.full((2,), 5.0)])
    assert_same(
        params, {"b": torch.full((2,), -4.0), "a": [None, -torch.ones(3)], "c": {"x": None}}
    )


class TestRefused:
    PARAMS = (torch.ones(2), torch.ones(3))

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_another_number_of_gradients_names_both(self, count: int) -> None:
        program = adam().script(list(self.PARAMS))
        grads = [torch.ones(2)] * count
        frozen = Frozen(self.PARAMS, program.state)
        with pytest.raises(ValueError, match=f"got {count} gradients for 2 parameters"):
            program.step(grads)
        with pytest.raises(torch.jit.Error, match=f"got {count} gradients for 2 parameters"):
            program.module.step(grads)
        frozen.assert_untouched()

    @pytest.mark.parametrize(
        ("bad", "error", "words"),
        [
            (torch.ones(4), ValueError, "'1' has shape"),
            (torch.ones(3).double(), ValueError, "'1' has dtype torch.float64"),
            (torch.ones(3, device="meta"), ValueError, "'1' has device meta"),
            (1.5, TypeError, "'1' must be a tensor or None, got float"),
            (torch.ones(3).to_sparse(), RuntimeError, "'1' has layout torch.sparse_coo"),
        ],
    )
    def test_a_gradient_that_does_not_fit(self, bad: Any, error: Any, words: str) -> None:
        program = adam().script(list(self.PARAMS))
        frozen = Frozen(self.PARAMS, program.state)
        with pytest.raises(error, match=words):
            program.step([torch.ones(2), bad])
        with pytest.raises(error, match=words):
            program.step_param(self.PARAMS[1], bad)
        frozen.assert_untouched()

    def test_a_parameter_that_is_not_ours(self) -> None:
        program = adam().script(list(self.PARAMS))
        with pytest.raises(ValueError, match=r"shape \(7,\).* none of the 2"):
            program.step_param(torch.ones(7), torch.ones(7))
        with pytest.raises(ValueError, match="none of the 2"):
            program.step_param(self.PARAMS[0].clone(), torch.ones(2))

    @pytest.mark.parametrize("name", CHAINS)
    def test_a_measured_chain_has_no_step_param(self, name: str) -> None:
        params = list(self.PARAMS)
        program = CHAINS[name].script(params)
        frozen = Frozen(params, program.state)
        with pytest.raises(ValueError, match="clip_by_global_norm needs the gradients of all"):
            program.step_param(params[0], torch.ones(2))
        with pytest.raises(torch.jit.Error, match="needs all gradients at once"):
            program.module.step_param(params[0], torch.ones(2))
        frozen.assert_untouched()

    @pytest.mark.parametrize("rate", [torch.tensor(0.1), lambda made: 0.1])
    def test_a_hyper_parameter_that_is_no_number(self, rate: Any) -> None:
        with pytest.raises(TypeError, match="adam has a hyper-parameter that is no number"):
            adam(rate).script(_params())
        with pytest.raises(TypeError, match="no number"):
            adam().override((1,), lr=rate).script(_params())

    def test_a_state_of_something_else(self) -> None:
        with pytest.raises(ValueError, match="state at '0' is of another optimizer"):
            adam().script(_params(), sgd().init(_params()))
        with pytest.raises(ValueError, match="tree of state"):
            adam().script(_params(), adam().init(_params()[:2]))
        with pytest.raises(ValueError, match="'1' is of another tree"):
            adam().script(_params(), adam().init([*_params()[:1], noise(0, 9), noise(1)]))


class TestHyper:
    def test_set_hyper_holds_from_the_next_step_on(self) -> None:
        params, wanted = _params(), _params()
        program, state = adamw(0.1).script(params), adamw(0.1).init(wanted)
        for step, hyper in enumerate([{}, {"lr": 0.5}, {"betas": (0.5, 0.6), "eps": 0.1}]):
            program.set_hyper(**hyper)
            program.step(_grads(step + 1))
        for step, hyper in enumerate(
            [{}, {"lr": 0.5}, {"lr": 0.5, "betas": (0.5, 0.6), "eps": 0.1}]
        ):
            adamw(0.1).update_(wanted, _grads(step + 1), state, **hyper)
        assert_same((params, program.state), (wanted, state))

    @pytest.mark.parametrize(
        ("hyper", "error"),
        [
            ({"lr": -1.0}, ValueError),
            ({"lr": float("nan")}, ValueError),
            ({"rate": 0.1}, TypeError),
            ({"lr": torch.tensor(0.1)}, TypeError),
            ({"lr": lambda made: 0.1}, TypeError),
        ],
    )
    def test_what_set_hyper_refuses_changes_nothing(self, hyper: Any, error: Any) -> None:
        params, wanted = _params(), _params()
        program = adam(0.1).script(params)
        with pytest.raises(error, match=next(iter(hyper))):
            program.set_hyper(**hyper)
        program.step(_grads(1))
        adam(0.1).update_(wanted, _grads(1), adam().init(wanted))
        assert_same(params, wanted)

    def test_overrides_are_groups(self) -> None:
        optimizer = adam(0.1).override((1,), lr=0.3, amsgrad=True).override((2,), betas=(0.1, 0.2))
        params, wanted = _params(), _params()
        program, state = optimizer.script(params), optimizer.init(wanted)
        for step in range(1, 4):
            program.step(_grads(step))
            optimizer.update_(wanted, _grads(step), state)
        assert_same((params, program.state), (wanted, state))

    @pytest.mark.parametrize(
        ("optimizer", "hyper"),
        [
            (adam(), {"amsgrad": True}),
            (adam(amsgrad=True), {"amsgrad": False}),
            (sgd(), {"momentum": 0.9}),
        ],
    )
    def test_set_hyper_refuses_options_that_the_state_was_not_made_for(
        self, optimizer: Optimizer, hyper: dict[str, Any]
    ) -> None:
        program = optimizer.script(_params())
        with pytest.raises(ValueError, match="other options"):
            program.set_hyper(**hyper)


def test_it_goes_on_from_a_state_and_hands_it_on() -> None:
    optimizer = chain(clip_by_global_norm(1.0), adamw(0.1))
    params, wanted = _params(), _params()
    state = optimizer.init(wanted)
    for step in (1, 2, 3):
        wanted, state = optimizer.update(wanted, _grads(step), state)
    first, begun = optimizer.update(params, _grads(1), optimizer.init(params))
    program = optimizer.script(first, begun)
    assert program.state is begun
    program.step(_grads(2))
    assert isinstance(program.state, State)
    last, end = optimizer.update(first, _grads(3), program.state)
    assert_same((last, end), (wanted, state))


def test_module_parameters() -> None:
    model = nn.Linear(3, 2)
    wanted = {key: param.detach().clone() for key, param in model.named_parameters()}
    program: ScriptedOptimizer = adam(0.1).script(dict(model.named_parameters()))
    model(noise(0, 5, 3, dtype=torch.float32)).square().sum().backward()
    grads = {key: param.grad for key, param in model.named_parameters()}
    program.step([grads["bias"], grads["weight"]])
    adam(0.1).update_(wanted, grads, adam().init(wanted))
    assert_same({key: p.detach() for key, p in model.named_parameters()}, wanted)
    assert all(param.requires_grad for param in model.parameters())


def test_a_tree_with_a_0d_and_an_empty_leaf() -> None:
    params, wanted = tree(0), tree(0)
    adam(0.1).script(params).step([tree(1)[key] for key in sorted(params)])
    adam(0.1).update_(wanted, tree(1), adam().init(wanted))
    assert_same(params, wanted)
