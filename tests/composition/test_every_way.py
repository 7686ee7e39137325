"""Composed optimizers go on after a load, and parts of a tree with summed totals are the whole."""

import io

import pytest
import torch

from ..tensors import assert_same
from .trees import COMPOSED, HOLES, STEPS, grads_at, params_of, run_of


@pytest.mark.parametrize("name", COMPOSED)
def test_a_saved_state_goes_on_in_the_middle(name: str) -> None:
    """Training continues after a save and a load at any step, also within an accumulated batch."""
    optimizer, params = COMPOSED[name](), params_of()
    state = optimizer.init(params)
    for step in range(STEPS):
        params, state = optimizer.update(params, grads_at(step, missing=HOLES), state)
        file = io.BytesIO()
        torch.save((params, state), file)
        file.seek(0)
        params, state = torch.load(file)
    assert_same((params, state), run_of(COMPOSED[name](), missing=HOLES))


@pytest.mark.parametrize(
    "name", ["clip over parts", "finite", "finite batches", "sam", "accumulate"]
)
def test_parts_of_a_tree_with_totals_are_the_whole(name: str) -> None:
    """Two parts of a tree, with summed totals, step like the whole tree, as shards on ranks do."""
    optimizer, whole = COMPOSED[name](), params_of()
    names = [["body.bias", "body.weight"], ["head.weight", "scale"]]
    parts = [{one: whole[one].clone() for one in own} for own in names]
    states = [optimizer.init(part) for part in parts]
    needed = sum(
        stage.reduce is not None or getattr(stage, "measure", None) is not None
        for stage in optimizer.stages
    )
    for step in range(STEPS):
        grads = grads_at(step, missing=HOLES)
        own = [{one: grads[one] for one in part} for part in names]
        totals: list[torch.Tensor] = []
        for _ in range(needed):
            addends = [
                optimizer.measure(part, given, state, measured=totals)
                for part, given, state in zip(parts, own, states, strict=True)
            ]
            totals.append(addends[0] + addends[1])
        for part, given, state in zip(parts, own, states, strict=True):
            optimizer.update_(part, given, state, measured=totals)
    want, state = run_of(optimizer, missing=HOLES)
    assert {**parts[0], **parts[1]}.keys() == want.keys()
    for part, own_state in zip(parts, states, strict=True):
        for one in part:
            # A sum in another order may differ in the last bit of a double.
            torch.testing.assert_close(part[one], want[one], rtol=1e-6, atol=1e-7)
            assert int(own_state.leaves[one].step) == int(state.leaves[one].step)
