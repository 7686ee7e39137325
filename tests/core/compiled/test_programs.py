"""``optimizer.script(params)``, which has the interface of torch's functional optimizers."""

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Link,
    NoState,
    Optimizer,
    ScriptedOptimizer,
    State,
    Transform,
    adam,
    adamw,
    cautious,
    centralize,
    chain,
    clip_by_global_norm,
    sgd,
)
from functional_optim.optimizer.torchscript import script
from tests.choices import each_value

from ...choices import EVERYTHING, case
from ..raw import RAW, RawCase, expected, gradients, leaves
from ..scenarios import SCENARIOS, Scenario, mixed
from ..sharing_stages import SHARING
from ..sparse import SPARSE, sparse_rows
from ..stages import BALL, CUSTOM
from ..support import CHAINS, EVERY, REAL, Frozen, assert_same, noise, refused, step, steps
from ..ways import COMPILING, MEANT_FOR_SOME, NAMESPACE, WAYS_TO_BEGIN, Layer, body_and_head

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.(save|load)` is deprecated")


def tensors_of(step: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Return the parameters for step 0, and gradients for later steps."""
    return [noise(10 * step + i, *shape, dtype=dtype) for i, shape in enumerate([(3, 2), (4,), ()])]


def complex_too(step: int) -> list[Any]:
    return [*tensors_of(step), noise(step + 5, 2, dtype=torch.complex128)]


def reloaded(program: ScriptedOptimizer) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(program.module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def assert_program_alike(optimizer: Optimizer, scenario: Scenario) -> None:
    """Assert that a program steps as ``update_`` does.

    Chains without measured stages also step each parameter alone.
    """
    params, wanted = scenario(0), scenario(0)
    program, state = optimizer.script(params), optimizer.init(wanted)
    reference = optimizer.using(executor="reference")
    names = sorted(params)
    for number in range(1, 4):
        grads = scenario(number)
        frozen = Frozen(grads)
        if number == 3 and not any(getattr(one, "measure", None) for one in optimizer.stages):
            for name in names:
                program.step_param(params[name], grads[name])
        else:
            program.step([grads[name] for name in names])
        frozen.assert_untouched()
        reference.update_(wanted, grads, state)
        assert_same((params, program.state), (wanted, state))


PLAIN = {
    name: one
    for name, one in EVERY.items()
    if not one.is_composed and name.split(maxsplit=1)[0] not in REAL  # some leaves are complex
}


def test_a_program_is_update_in_place_in_every_scenario() -> None:
    """Every second chain has one of the scenarios, by turns; the laws script each chain.

    If everything is tested, each chain has both.
    """
    both = (mixed, SCENARIOS["extreme"])
    for place, (name, optimizer) in enumerate(PLAIN.items()):
        for scenario in both if EVERYTHING else both[place % 4 : place % 4 + 1]:
            with case(name=name, scenario=scenario):
                assert_program_alike(optimizer, scenario)


@each_value(optimizer={**CUSTOM, **{name: make() for name, make in SHARING.items()}})
def test_so_it_is_of_a_users_own_stages(optimizer: Optimizer) -> None:
    """A program also steps custom stages, including stages that return an input tensor."""
    assert_program_alike(optimizer, lambda step: {"a": noise(step, 3, 2)})


@each_value(one={name: one for name, one in RAW.items() if not one.gate})
def test_so_it_is_of_stages_that_take_the_raw_gradient(one: RawCase) -> None:
    params = leaves(0)
    program = one.optimizer.script(params)
    for grads in gradients():
        program.step([grads[name] for name in sorted(grads)])
    assert_same(params, expected(one))


@each_value(name=list(SPARSE))
def test_so_it_is_with_sparse_gradients(name: str) -> None:
    _, make, hyper = SPARSE[name]
    assert_program_alike(make(**hyper), sparse_rows)


def test_a_saved_program_goes_on_bit_for_bit() -> None:
    """A reloaded program keeps its hyper-parameters and shares no tensor with the saved one."""
    for name in ("adam amsgrad", "qhm direct", "rmsprop centered", "clipped twice"):
        params, start = complex_too(0), complex_too(0)
        program = EVERY[name].script(params)
        program.set_hyper(lr=0.3)
        module = reloaded(program)
        module.step(complex_too(1))
        assert_same(params, start)
        program.step(complex_too(1))
        for one in (module, program):
            one.step([None, *complex_too(2)[1:]])
            one.step_param(one.params[1], noise(3, 4)) if "clip" not in name else None
        with case(name=name):
            assert_same(list(module.params), params)
            assert_same(list(module.steps), [leaf.step for leaf in program.state.leaves])
    with pytest.raises(torch.jit.Error, match="got 1 gradients for 4 parameters"):
        module.step([None])


class Trainer(torch.nn.Module):
    """TorchScript module that owns a program and calls it."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.program = program

    def forward(self, gradients: list[Tensor], times: int) -> Tensor:
        optional: list[Tensor | None] = []
        for gradient in gradients:
            optional.append(gradient)  # noqa: PERF402  TorchScript's lists are of one type
        for _ in range(times):
            self.program.step(optional)
        return self.program.params[0]


def test_other_torchscript_calls_it() -> None:
    params, optimizer = tensors_of(0), CHAINS["clipped twice"]
    trainer = script(Trainer(optimizer.script(params).module))
    first = trainer(tensors_of(1), 3)
    wanted, _ = steps(optimizer, tensors_of(0), lambda _: tensors_of(1), 3)
    assert_same(params, wanted)
    assert_same(first, wanted[0])


def test_gradients_stand_in_the_order_of_the_leaves_without_none() -> None:
    params = {"b": torch.ones(2), "a": [None, torch.ones(3)], "c": {"x": None}}
    program = sgd(1.0).script(params)
    program.step([torch.full((3,), 2.0), torch.full((2,), 5.0)])
    wanted = {"b": torch.full((2,), -4.0), "a": [None, -torch.ones(3)], "c": {"x": None}}
    assert_same(params, wanted)
    frozen = Frozen(params, program.state)
    program.step_param(params["b"], None)
    program.step([None, None])
    frozen.assert_untouched()
    layer = Layer(torch.ones(2), torch.ones(3))
    sgd(1.0).using(namespace=NAMESPACE).script(layer).step([torch.ones(2), torch.ones(3) * 2])
    assert [layer.weight.tolist(), layer.bias.tolist()] == [[0.0] * 2, [-1.0] * 3]


def test_each_way_takes_what_may_be_meant_for_none() -> None:
    for name in COMPILING:
        with case(way=name):
            WAYS_TO_BEGIN[name](MEANT_FOR_SOME, body_and_head())


class TestRefused:
    """Calls that a program refuses, and that leave it unchanged."""

    def test_gradients_that_do_not_fit(self) -> None:
        params = [torch.ones(2), torch.ones(3)]
        program = adam().script(params)
        frozen = Frozen(params, program.state)
        for count in (0, 1, 3):
            message = f"got {count} gradients for 2 parameters"
            with pytest.raises(ValueError, match=message):
                program.step([torch.ones(2)] * count)
            with pytest.raises(torch.jit.Error, match=message):
                program.module.step([torch.ones(2)] * count)
        bad: list[tuple[Any, type[Exception], str]] = [
            (torch.ones(4), ValueError, "'1' has shape"),
            (torch.ones(3).double(), ValueError, "'1' has dtype torch.float64"),
            (torch.ones(3, device="meta"), ValueError, "'1' has device meta"),
            (1.5, TypeError, "'1' must be a tensor or None, got float"),
            (torch.ones(3).to_sparse(), RuntimeError, "'1' has layout torch.sparse_coo"),
        ]
        for grad, error, words in bad:
            with refused(error, words):
                program.step([torch.ones(2), grad])
            with refused(error, words):
                program.step_param(params[1], grad)
        frozen.assert_untouched()

    def test_a_parameter_that_is_not_ours(self) -> None:
        params = [torch.ones(2), torch.ones(3)]
        program = adam().script(params)
        with pytest.raises(ValueError, match=r"shape \(7,\).* none of the 2"):
            program.step_param(torch.ones(7), torch.ones(7))
        with pytest.raises(ValueError, match="none of the 2"):
            program.step_param(params[0].clone(), torch.ones(2))

    def test_a_single_parameter_of_a_measured_chain(self) -> None:
        params = tensors_of(0)
        for optimizer in CHAINS.values():
            program = optimizer.script(params)
            frozen = Frozen(params, program.state)
            with pytest.raises(ValueError, match="clip_by_global_norm needs the gradients of all"):
                program.step_param(params[0], params[0])
            with pytest.raises(torch.jit.Error, match="needs all gradients at once"):
                program.module.step_param(params[0], params[0])
            frozen.assert_untouched()

    def test_a_hyper_parameter_that_is_no_number(self) -> None:
        rates: list[Any] = [torch.tensor(0.1), lambda made: 0.1]
        for rate in rates:
            for optimizer in (adam(rate), adam().override((1,), lr=rate)):
                with pytest.raises(TypeError, match="adam has .* that is not a number"):
                    optimizer.script(tensors_of(0))

    def test_a_state_of_something_else(self) -> None:
        others: list[tuple[Callable[[], State], str]] = [
            (lambda: sgd().init(tensors_of(0)), "state at '0' is of another optimizer"),
            (lambda: adam().init(tensors_of(0)[:2]), "tree of state"),
            (
                lambda: adam().init([tensors_of(0)[0], noise(0, 9), noise(1)]),
                "'1' is of another tree",
            ),
        ]
        for state, message in others:
            with pytest.raises(ValueError, match=message):
                adam().script(tensors_of(0), state())


def test_set_hyper_holds_from_the_next_step_on() -> None:
    params, wanted = tensors_of(0), tensors_of(0)
    program, state = adamw(0.1).script(params), adamw(0.1).init(wanted)
    now: dict[str, Any] = {}
    changes: list[dict[str, Any]] = [{}, {"lr": 0.5}, {"betas": (0.5, 0.6), "eps": 0.1}]
    for number, hyper in enumerate(changes, start=1):
        now |= hyper
        program.set_hyper(**hyper)
        program.step(tensors_of(number))
        adamw(0.1).update_(wanted, tensors_of(number), state, **now)
    assert_same((params, program.state), (wanted, state))


def test_what_set_hyper_refuses_changes_nothing() -> None:
    params = tensors_of(0)
    program = adam(0.1).script(params)
    misused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"lr": -1.0}, ValueError, "lr"),
        ({"lr": float("nan")}, ValueError, "lr"),
        ({"rate": 0.1}, TypeError, "rate"),
        ({"lr": torch.tensor(0.1)}, TypeError, "lr"),
        ({"lr": lambda made: 0.1}, TypeError, "lr"),
        ({"amsgrad": True}, ValueError, "other options"),
    ]
    for hyper, error, message in misused:
        with refused(error, message, hyper=hyper):
            program.set_hyper(**hyper)
    program.step(tensors_of(1))
    assert_same(params, step(adam(0.1), tensors_of(0), tensors_of(1)))
    for optimizer, hyper in (
        (adam(amsgrad=True), {"amsgrad": False}),
        (sgd(), {"momentum": 0.9}),
    ):
        with pytest.raises(ValueError, match="other options"):
            optimizer.script(params).set_hyper(**hyper)


def test_overrides_are_groups() -> None:
    optimizer = adam(0.1).override(("t",), lr=0.3, amsgrad=True).override(("s",), betas=(0.1, 0.2))
    assert_program_alike(optimizer, SCENARIOS["float32, laid out"])


def test_set_hyper_keeps_overrides() -> None:
    """A changed default does not replace the value of an override, as in ``bind``."""
    optimizer = adamw(0.1).override(("t",), lr=0.3)
    params = {"s": noise(0, 3), "t": noise(1, 3)}
    program, bound_params = optimizer.script(params), {k: one.clone() for k, one in params.items()}
    bound = optimizer.bind(bound_params)
    wanted, state = {k: one.clone() for k, one in params.items()}, optimizer.init(params)
    for number, hyper in enumerate([{"lr": 0.5}, {"weight_decay": 0.25}, {"lr": 0.7}]):
        optimizer = optimizer.replace(**hyper)
        program.set_hyper(**hyper)
        bound.set_hyper(**hyper)
        grads = {"s": noise(10 * number, 3), "t": noise(10 * number + 1, 3)}
        program.step([grads["s"], grads["t"]])
        bound.step(grads)
        wanted, state = optimizer.update(wanted, grads, state)
        assert_same((params, program.state), (wanted, state))
        assert_same(bound_params, wanted)


class Nothing(NamedTuple):
    """Hyper-parameters of a stage that has none."""


def halve(grad: Tensor, param: Tensor, state: NoState, c: Nothing) -> tuple[Tensor, NoState]:
    return grad * 0.5, state


@each_value(
    stage={
        "centralize": centralize(),
        "cautious": cautious(),
        "a stage of a user": Transform(name="halve", hyper=Nothing, transform=halve)(),
    }
)
def test_a_saved_stage_without_hyper_parameters_is_loaded(stage: Link) -> None:
    """TorchScript saves a NamedTuple without fields in a form that it cannot load."""
    optimizer = chain(stage, adam(0.1))
    params, wanted = tensors_of(0), tensors_of(0)
    program = optimizer.script(params)
    loaded, state = reloaded(program), optimizer.init(wanted)
    for number in range(1, 3):
        loaded.step(tensors_of(number))
        program.step(tensors_of(number))
        optimizer.update_(wanted, tensors_of(number), state)
    assert_same((params, program.state), (wanted, state))
    assert_same(loaded.params, wanted)


def test_it_goes_on_from_a_state_and_hands_it_on() -> None:
    optimizer = chain(clip_by_global_norm(1.0), adamw(0.1))
    wanted = steps(optimizer, tensors_of(0), lambda index: tensors_of(index + 1), 3)
    first, begun = optimizer.update(tensors_of(0), tensors_of(1), optimizer.init(tensors_of(0)))
    program = optimizer.script(first, begun)
    assert program.state is begun
    program.step(tensors_of(2))
    assert isinstance(program.state, State)
    assert_same(optimizer.update(first, tensors_of(3), program.state), wanted)


def test_a_program_goes_on_from_a_state_that_autograd_followed() -> None:
    """Fault 31: ``script`` accepts a state that ``init`` made outside of ``no_grad``."""
    optimizer, ones = chain(BALL(lr=0.1, decay=0.9, slow=True)), torch.ones(3)
    param = torch.ones(3, requires_grad=True)
    program = optimizer.script(param, optimizer.init(param))
    program.step([ones])
    assert_same(param, optimizer.update(ones, ones, optimizer.init(ones))[0])


def test_a_program_reads_all_gradients_first() -> None:
    """Fault 45: the gradient of one parameter can be another parameter."""
    first, second = torch.ones(3), torch.full((3,), 2.0)
    program = sgd(0.5).script([first, second])
    program.step([second, first])
    assert (first.tolist(), second.tolist()) == ([0.0] * 3, [1.5] * 3)
