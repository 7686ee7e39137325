"""What an error says of what it was given: short, what is wrong, and what to write instead."""

from typing import Any

import pytest
import torch

from functional_optim import (
    TorchOptimizer,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    sgd,
    stored,
)
from functional_optim.brief import MOST, brief
from functional_optim.transforms.clip_by_value import CLIP_BY_VALUE

LIMIT = 400
"""Characters of a message, what was given included."""

MISUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "an optimizer before a link": ((adamw(), clip_by_value(1.0)), "an optimizer stands last"),
    "two optimizers": ((chain(clip_by_value(1.0), adamw()), sgd()), "an optimizer stands last"),
    "a list": (([clip_by_value(1.0), sgd()],), r"chain\(\*parts\)"),
    "a function that is not called": ((clip_by_value(1.0), adamw), r"call it: adamw\(\.\.\.\)"),
    "a stage that is not called": ((CLIP_BY_VALUE, sgd()), "called with its hyper-parameters"),
    "a class of torch.optim": (
        (clip_by_value(1.0), torch.optim.AdamW),
        r"as_functional_optim\(AdamW, \.\.\.\)",
    ),
    "an instance of it": (
        (torch.optim.AdamW([torch.ones(1, requires_grad=True)]), sgd()),
        "from_torch",
    ),
    "a tensor": ((torch.ones(9, 9), sgd()), r"a tensor of shape \(9, 9\)"),
    "nothing": ((None, sgd()), "got None at place 0"),
}


@pytest.mark.parametrize("name", MISUSED)
def test_a_chain_of_wrong_parts_says_what_to_write(name: str) -> None:
    """The message is short and names the way out (fault 23)."""
    parts, way_out = MISUSED[name]
    with pytest.raises(TypeError, match=way_out) as caught:
        chain(*parts)
    assert len(str(caught.value)) <= LIMIT


def test_a_link_and_an_optimizer_are_written_in_a_line() -> None:
    """Their repr stands in many messages (fault 23)."""
    assert repr(clip_by_value(1.0)) == "clip_by_value(clip_value=1.0)"
    assert repr(clip_by_value(1.0).stage) == "Transform clip_by_value(clip_value)"
    assert repr(sgd(0.5)) == f"<Optimizer {sgd(0.5)}>"
    kept = stored(sgd(0.5), param="bfloat16+kahan")
    assert repr(kept.stages[-1]).startswith("StoredRule ")
    assert len(repr(kept)) <= LIMIT
    several = chain(clip_by_global_norm(1.0), clip_by_value(1.0), adamw())
    assert len(repr(several)) <= LIMIT
    assert "\n" not in repr(several)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda given: TorchOptimizer([torch.ones(1)], given),
        stored,
        lambda given: adamw(lr=given),
        lambda given: adamw().override(given, lr=0.1),
        lambda given: adamw(amsgrad=given),
    ],
    ids=["TorchOptimizer", "stored", "lr", "override", "a flag"],
)
@pytest.mark.parametrize(
    "given",
    [
        [adamw()] * 9,
        {f"layer.{i}": torch.ones(20, 20) for i in range(99)},
        torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(99)]),
    ],
    ids=["optimizers", "tensors", "module"],
)
def test_what_was_given_is_never_printed_at_length(misuse: Any, given: Any) -> None:
    """Whatever it is (fault 23)."""
    if callable(given):
        given = [given]  # a module is a function, and so may be a schedule
    with pytest.raises(TypeError) as caught:
        misuse(given)
    assert len(str(caught.value)) <= LIMIT


def test_brief_is_one_short_line() -> None:
    for value in (None, 1.5, "x" * 999, torch.ones(5, 5), torch.nn.Linear(2, 2), sgd, [sgd()] * 9):
        assert len(brief(value)) <= MOST
        assert "\n" not in brief(value)
    assert brief(0.5) == "0.5"
    assert brief(torch.tensor(2.0)) == "tensor(2.)"
    assert brief(sgd) == "the function sgd"
