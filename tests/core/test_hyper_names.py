"""Hyper-parameters by name in replace, update and override; shared names are qualified."""

from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    if_any,
    sgd,
    weight_decay,
)
from tests.choices import each_value

from .support import assert_same, noise, step

PARAM, GRAD = noise(0, 4), noise(1, 4)


def test_hyper_lists_every_name_lr_first() -> None:
    assert adamw(0.1, (0.8, 0.9), 1e-3, 0.2, True).hyper == {
        "lr": 0.1,
        "maximize": False,
        "weight_decay": 0.2,
        "betas": (0.8, 0.9),
        "eps": 1e-3,
        "amsgrad": True,
    }
    several = chain(clip_by_global_norm(1.0), clip_by_value(2.0), clip_by_value(1.0), adamw())
    assert next(iter(several.hyper)) == "lr"
    assert several.replace(**several.hyper) == several


def test_replace_gives_a_new_optimizer_and_leaves_the_old_one() -> None:
    optimizer = adamw(0.1)
    other = optimizer.replace(lr=0.2, betas=(0.5, 0.6), amsgrad=True)
    assert optimizer.hyper["lr"] == 0.1
    assert other == adamw(0.2, (0.5, 0.6), amsgrad=True)
    assert optimizer.replace() == optimizer
    assert [link.hyper.lr for link in other.links if hasattr(link.hyper, "lr")] == [0.2, 0.2]


@each_value(
    hyper=[
        {"lr": 0.3},
        {"weight_decay": 0.5},
        {"betas": (0.1, 0.2)},
        {"eps": 0.5, "maximize": True},
    ]
)
def test_a_step_takes_hyper_parameters_of_its_own(hyper: dict[str, Any]) -> None:
    optimizer, written = adamw(0.1), PARAM.clone()
    plain, wanted = (step(one, PARAM, GRAD) for one in (optimizer, optimizer.replace(**hyper)))
    optimizer.update_(written, GRAD, optimizer.init(written), **hyper)
    assert_same(step(optimizer, PARAM, GRAD, **hyper), wanted)
    assert_same(written, wanted)
    assert not torch.equal(wanted, plain)
    assert_same(step(optimizer, PARAM, GRAD), plain)


def test_unknown_names_are_refused_with_what_there_is() -> None:
    with pytest.raises(TypeError, match=r"no hyper-parameter 'rate'.*lr.*momentum"):
        sgd().replace(rate=1.0)
    with pytest.raises(TypeError, match="no hyper-parameter 'beta'"):
        step(sgd(), PARAM, GRAD, beta=1.0)
    with pytest.raises(TypeError, match="no hyper-parameter 'beta'"):
        sgd().override(("a",), beta=1.0)
    with pytest.raises(ValueError, match="momentum must be a number >= 0, got -1"):
        sgd().override(("a",), momentum=-1.0)


def test_a_name_in_several_stages_is_qualified_by_its_stage() -> None:
    """Stages of one kind are numbered from the second on; other stages go by their names."""
    optimizer = chain(clip_by_value(3.0), clip_by_value(2.0), clip_by_value(1.0), sgd())
    assert "clip_value" not in optimizer.hyper
    for name, value in (("", 3.0), ("_2", 2.0), ("_3", 1.0)):
        assert optimizer.hyper[f"clip_by_value{name}.clip_value"] == value
    changed = optimizer.replace(**{"clip_by_value_2.clip_value": 0.5})
    assert changed == chain(clip_by_value(3.0), clip_by_value(0.5), clip_by_value(1.0), sgd())
    with pytest.raises(TypeError, match=r"mean clip_by_value\.clip_value or clip_by_value_2\."):
        optimizer.replace(clip_value=1.0)
    optimizer = chain(weight_decay(0.1), adamw(weight_decay=0.2))
    assert optimizer.hyper["weight_decay.weight_decay"] == 0.1
    with pytest.raises(TypeError, match="did you mean"):
        optimizer.replace(weight_decay=0.3)
    both = optimizer.replace(**{"decoupled_weight_decay.weight_decay": 0.0})
    assert both == chain(weight_decay(0.1), adamw(weight_decay=0.0))


def _tree_step(optimizer: Optimizer, **hyper: Any) -> Any:
    params = {"a": {"w": noise(0, 4), "bias": noise(1, 4)}, "b": {"bias": noise(2, 4)}}
    grads = {"a": {"w": noise(3, 4), "bias": noise(4, 4)}, "b": {"bias": noise(5, 4)}}
    return step(optimizer, params, grads, **hyper)


def test_override_by_the_beginning_of_a_path() -> None:
    plain, other = _tree_step(adamw(0.1)), _tree_step(adamw(0.2))
    new = _tree_step(adamw(0.1).override(("a",), lr=0.2))
    assert_same(new, {"a": other["a"], "b": plain["b"]})
    leaf = _tree_step(adamw(0.1).override(("a", "w"), lr=0.2))
    assert_same(leaf["a"], {"w": other["a"]["w"], "bias": plain["a"]["bias"]})
    assert_same(_tree_step(adamw(0.1).override((), lr=0.2)), other)


def test_override_by_a_predicate_on_paths() -> None:
    new = _tree_step(adamw(0.1).override(lambda path: path[-1] == "bias", weight_decay=0.0))
    plain, without = _tree_step(adamw(0.1)), _tree_step(adamw(0.1, weight_decay=0.0))
    assert_same(new["a"], {"w": plain["a"]["w"], "bias": without["a"]["bias"]})
    assert_same(new["b"], without["b"])
    assert not torch.equal(plain["b"]["bias"], without["b"]["bias"])


def test_later_overrides_win_and_all_win_over_update() -> None:
    """An override of another name still follows the lr of ``update``."""
    optimizer = sgd(0.1).override(("a",), lr=0.2).override(("a", "w"), lr=0.3, maximize=True)
    new = _tree_step(optimizer, lr=0.9)
    assert_same(new["a"]["w"], _tree_step(sgd(0.3, maximize=True))["a"]["w"])
    assert_same(new["a"]["bias"], _tree_step(sgd(0.2))["a"]["bias"])
    assert_same(new["b"], _tree_step(sgd(0.9))["b"])
    assert optimizer.replace(lr=0.5).hypers_at(("a", "w"))[-1].lr == 0.3
    assert optimizer.replace(lr=0.5).hypers_at(("b", "bias"))[-1].lr == 0.5
    new = _tree_step(sgd(0.1).override(("a",), weight_decay=0.5), lr=0.9)
    assert_same(new["a"], _tree_step(sgd(0.9, weight_decay=0.5))["a"])


@each_value(where=[["a"], "a", 0, "a.w"])
def test_an_override_that_is_no_path_is_refused(where: Any) -> None:
    """Such a value never equals a tuple of keys, so the override would have no effect."""
    with pytest.raises(TypeError, match="tuple"):
        sgd().override(where, lr=0.2)
    with pytest.raises(TypeError, match="tuple"):
        if_any(where)


def test_a_chain_keeps_the_overrides_of_its_optimizer() -> None:
    """Overrides keep their stage when another stage precedes it, even one of the same kind."""
    base = sgd(0.1).override(("a",), lr=0.2).using(executor="blocked", namespace="n")
    joined = chain(clip_by_value(0.5), base)
    assert joined.hypers_at(("a",))[-1].lr == 0.2
    assert (joined.executor, joined.namespace) == ("blocked", "n")
    base = chain(clip_by_value(2.0), clip_by_value(3.0), sgd())
    base = base.override((), **{"clip_by_value.clip_value": 0.5})
    hypers = chain(clip_by_value(9.0), base).hypers_at(())
    assert [one.clip_value for one in hypers if hasattr(one, "clip_value")] == [9.0, 0.5, 3.0]
    hypers = chain(weight_decay(0.1), sgd().override(("a",), weight_decay=0.3)).hypers_at(("a",))
    assert [one.weight_decay for one in hypers if hasattr(one, "weight_decay")] == [0.1, 0.3]
