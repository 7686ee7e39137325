"""Tests that the program has the bits of the reference executor in torch's interpreter."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_optim import Optimizer, adam, adamw, chain, clip_by_global_norm, sgd
from functional_optim.export import export_step
from functional_optim.storage import stored
from tests.cases import ONE_CHAIN
from tests.choices import each, examples, one_in

from .stages import OWN, ROW, SIGNED
from .support import assert_same, copied, grads_of, run_in_place, stepped, tree

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def assert_alike(
    optimizer: Optimizer,
    params: Any,
    *,
    ulps: float = 0.0,
) -> None:
    """Check that an exported step equals the reference."""
    state = optimizer.init(params)
    exported = export_step(optimizer, params)
    found = run_in_place(exported, exported.program.module(), params, state)
    assert_same(found, stepped(optimizer, params, state), ulps)


def small(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return parameters of two dimensions and of none."""
    params = tree(dtype)
    return {"weight": params["weight"], "frozen": None, "scale": params["scale"]}


LAST_PLACE = ("asgd", "adafactor")
"""Algorithms whose scalars of a whole parameter are tensors, which a program rounds once more."""


@pytest.mark.parametrize("name", one_in(3, ONE_CHAIN))
@examples(1)
@given(data=st.data())
def test_algorithms_with_any_options(name: str, data: st.DataObject) -> None:
    """Every third algorithm is exported; a law traces each of them inside torch.compile."""
    made = ONE_CHAIN[name]
    dtype = data.draw(st.sampled_from(DTYPES))
    ulps = 1.0 if name in LAST_PLACE else 0.0
    assert_alike(made.factory(**data.draw(made.options)), small(dtype), ulps=ulps)


@each(
    optimizer=[
        chain(clip_by_global_norm(1.0), SIGNED(lr=0.1, beta=0.9)),
        chain(OWN(lr=0.1, beta=0.5)),
        chain(OWN(lr=0.1, beta=0.5)).override(("weight",), lr=0.5),
    ]
)
def test_rules_of_a_user(optimizer: Optimizer) -> None:
    """Rules of users may use functions of torch, scalars of a leaf, and overrides."""
    assert_alike(optimizer, tree())


def test_a_rule_for_whole_tensors() -> None:
    params = {name: leaf for name, leaf in tree().items() if leaf is None or leaf.dim()}
    assert_alike(chain(ROW(lr=0.1, beta=0.5)), params)


def test_complex_parameters_are_stepped_through_their_real_views() -> None:
    params = tree(torch.complex64)
    exported = export_step(adam(), params)
    assert_alike(adam(lr=0.1, amsgrad=True), params)
    kinds = {
        (entry["dtype"], entry.get("complex"))
        for entry in exported.manifest["inputs"]
        if entry["list"] in ("params", "grads", "states")
    }
    assert kinds == {("float32", True)}


def test_parameters_in_another_layout() -> None:
    assert_alike(
        adamw(lr=0.1),
        {
            "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "sliced": torch.randn(6, 8)[:, ::2],
            "empty": torch.ones(0, 3),
        },
    )


def test_state_in_fewer_bytes() -> None:
    optimizer = stored(adamw(lr=0.1), param="bfloat16+stochastic", state="int8")
    assert_alike(optimizer, {"w": tree(torch.bfloat16)["weight"]})


def test_a_new_tree_instead_of_writing_in_place() -> None:
    optimizer, params = sgd(lr=0.1, momentum=0.9, dampening=0.2), tree()
    state = optimizer.init(params)
    exported = export_step(optimizer, params, in_place=False)
    arguments = exported.arguments(params, grads_of(params, 0), state)
    before = copied(arguments)
    made = exported.program.module()(*arguments)
    assert_same(list(arguments), list(before))
    new_params, new_state = optimizer.update(params, grads_of(params, 0), state)
    wanted = exported.arguments(new_params, grads_of(params, 0), new_state)
    assert_same(list(made), [wanted[0], wanted[2], wanted[3]])


def test_a_new_tree_has_the_layout_of_the_old_one() -> None:
    params = {"channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    params["sliced"] = torch.randn(6, 8)[:, ::2]
    optimizer = adamw(lr=0.1)
    state = optimizer.init(params)
    exported = export_step(optimizer, params, in_place=False)
    run = exported.program.module()
    new, states, steps = exported.arguments(params, params, state)[0], [], []
    for step in range(3):
        arguments = exported.arguments(params, grads_of(params, step), state)
        new, states, steps = run(
            *(new, arguments[1]), *((states, steps) if step else arguments[2:4]), arguments[4]
        )
    wanted_params, wanted_state = stepped(optimizer, params, state, [{}] * 3)
    wanted = exported.arguments(wanted_params, params, wanted_state)
    assert_same([new, states, steps], [wanted[0], *wanted[2:4]])
    assert [one.stride() for one in new] == [one.stride() for one in wanted[0]]


def test_leaves_at_different_steps_have_coefficients_of_their_own() -> None:
    optimizer, params = adamw(lr=0.1), tree()
    grads = {**grads_of(params, 7), "bias": None}
    params, state = optimizer.update(params, grads, optimizer.init(params))
    exported = export_step(optimizer, params)
    found = run_in_place(exported, exported.program.module(), params, state)
    assert_same(found, stepped(optimizer, params, state))
    assert [int(found[1].leaves[name].step) for name in ("weight", "bias")] == [5, 4]


def test_free_lengths() -> None:
    optimizer = chain(clip_by_global_norm(1.0), adamw(lr=0.1))
    exported = export_step(optimizer, {"a": torch.ones(8), "b": torch.ones(8)}, dynamic=True)
    run = exported.program.module()
    for lengths in ((8, 8), (2, 100), (33, 5)):
        params = dict(zip("ab", map(torch.randn, lengths), strict=True))
        state = optimizer.init(params)
        assert_same(run_in_place(exported, run, params, state), stepped(optimizer, params, state))


def test_parameters_that_require_gradients_are_not_differentiated() -> None:
    optimizer = sgd(lr=0.1, momentum=0.9)
    params = dict(torch.nn.Linear(3, 2).named_parameters())
    state = optimizer.init(params)
    exported = export_step(optimizer, params)
    wanted, _ = optimizer.update(params, grads_of(params, 0), state)
    _, grads, states, steps, hyper = exported.arguments(params, grads_of(params, 0), state)
    with torch.no_grad():
        exported.program.module()([params["bias"], params["weight"]], grads, states, steps, hyper)
    assert_same(params, wanted)
    assert all(param.requires_grad and param.is_leaf for param in params.values())
