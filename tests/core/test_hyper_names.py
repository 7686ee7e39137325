"""Hyper-parameters by name: replace, update(lr=...), override; qualified where two share one."""

from typing import Any

import pytest
import torch

from functional_optim import (
    Optimizer,
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    if_any,
    sgd,
    weight_decay,
)

from .support import assert_same, noise


def _step(optimizer: Optimizer, **hyper: Any) -> torch.Tensor:
    param, grad = noise(0, 4), noise(1, 4)
    new: torch.Tensor = optimizer.update(param, grad, optimizer.init(param), **hyper)[0]
    return new


def test_hyper_lists_every_name_lr_first() -> None:
    assert adamw(0.1, (0.8, 0.9), 1e-3, 0.2, True).hyper == {
        "lr": 0.1,
        "maximize": False,
        "weight_decay": 0.2,
        "betas": (0.8, 0.9),
        "eps": 1e-3,
        "amsgrad": True,
    }
    assert next(iter(chain(clip_by_value(1.0), adamw()).hyper)) == "lr"


def test_replace_gives_a_new_optimizer_and_leaves_the_old_one() -> None:
    optimizer = adamw(0.1)
    other = optimizer.replace(lr=0.2, betas=(0.5, 0.6), amsgrad=True)
    assert optimizer.hyper["lr"] == 0.1
    assert other == adamw(0.2, (0.5, 0.6), amsgrad=True)
    assert optimizer.replace() == optimizer


def test_one_lr_reaches_every_stage_that_has_one() -> None:
    changed = adamw(0.1).replace(lr=0.3)
    assert [link.hyper.lr for link in changed.links if hasattr(link.hyper, "lr")] == [0.3, 0.3]
    assert changed == adamw(0.3)


@pytest.mark.parametrize(
    "hyper",
    [{"lr": 0.3}, {"weight_decay": 0.5}, {"betas": (0.1, 0.2)}, {"eps": 0.5, "maximize": True}],
)
def test_update_takes_hyper_parameters_for_one_step(hyper: dict[str, Any]) -> None:
    optimizer = adamw(0.1)
    plain = _step(optimizer)
    changed = _step(optimizer, **hyper)
    assert_same(changed, _step(optimizer.replace(**hyper)))
    assert not torch.equal(changed, plain)
    assert_same(_step(optimizer), plain)


def test_update_in_place_takes_them_too() -> None:
    optimizer, param = adam(0.1), noise(0, 4)
    optimizer.update_(param, noise(1, 4), optimizer.init(param), lr=0.4)
    assert_same(param, _step(optimizer.replace(lr=0.4)))


def test_unknown_names_are_refused_with_what_there_is() -> None:
    optimizer, param = sgd(), torch.ones(1)
    with pytest.raises(TypeError, match=r"no hyper-parameter 'rate'.*lr.*momentum"):
        optimizer.replace(rate=1.0)
    with pytest.raises(TypeError, match="no hyper-parameter 'beta'"):
        optimizer.update(param, param, optimizer.init(param), beta=1.0)
    with pytest.raises(TypeError, match="no hyper-parameter 'beta'"):
        optimizer.override(("a",), beta=1.0)
    with pytest.raises(ValueError, match="momentum must be a number >= 0, got -1"):
        optimizer.override(("a",), momentum=-1.0)


def test_a_name_in_two_stages_is_qualified_by_its_stage() -> None:
    optimizer = chain(clip_by_value(3.0), clip_by_value(2.0), clip_by_value(1.0), sgd())
    assert "clip_value" not in optimizer.hyper
    assert optimizer.hyper["clip_by_value.clip_value"] == 3.0
    assert optimizer.hyper["clip_by_value_2.clip_value"] == 2.0
    assert optimizer.hyper["clip_by_value_3.clip_value"] == 1.0
    changed = optimizer.replace(**{"clip_by_value_2.clip_value": 0.5})
    assert changed == chain(clip_by_value(3.0), clip_by_value(0.5), clip_by_value(1.0), sgd())
    with pytest.raises(TypeError, match=r"mean clip_by_value\.clip_value or clip_by_value_2\."):
        optimizer.replace(clip_value=1.0)


def test_one_name_in_stages_of_two_kinds_is_qualified_too() -> None:
    optimizer = chain(weight_decay(0.1), adamw(weight_decay=0.2))
    assert optimizer.hyper["weight_decay.weight_decay"] == 0.1
    assert optimizer.hyper["decoupled_weight_decay.weight_decay"] == 0.2
    with pytest.raises(TypeError, match="did you mean"):
        optimizer.replace(weight_decay=0.3)
    both = optimizer.replace(**{"decoupled_weight_decay.weight_decay": 0.0})
    assert both == chain(weight_decay(0.1), adamw(weight_decay=0.0))


def test_every_listed_name_can_be_set_to_its_value() -> None:
    optimizer = chain(clip_by_global_norm(1.0), clip_by_value(2.0), clip_by_value(1.0), adamw())
    assert optimizer.replace(**optimizer.hyper) == optimizer


def _tree_step(optimizer: Optimizer, **hyper: Any) -> Any:
    params = {"a": {"w": noise(0, 4), "bias": noise(1, 4)}, "b": {"bias": noise(2, 4)}}
    grads = {"a": {"w": noise(3, 4), "bias": noise(4, 4)}, "b": {"bias": noise(5, 4)}}
    return optimizer.update(params, grads, optimizer.init(params), **hyper)[0]


def test_override_by_the_beginning_of_a_path() -> None:
    new = _tree_step(adamw(0.1).override(("a",), lr=0.2))
    assert_same(new["a"], _tree_step(adamw(0.2))["a"])
    assert_same(new["b"], _tree_step(adamw(0.1))["b"])
    leaf = _tree_step(adamw(0.1).override(("a", "w"), lr=0.2))
    assert_same(leaf["a"]["w"], _tree_step(adamw(0.2))["a"]["w"])
    assert_same(leaf["a"]["bias"], _tree_step(adamw(0.1))["a"]["bias"])
    assert_same(_tree_step(adamw(0.1).override((), lr=0.2)), _tree_step(adamw(0.2)))


def test_override_by_a_predicate_on_paths() -> None:
    new = _tree_step(adamw(0.1).override(lambda path: path[-1] == "bias", weight_decay=0.0))
    plain, without = _tree_step(adamw(0.1)), _tree_step(adamw(0.1, weight_decay=0.0))
    assert_same(new["a"], {"w": plain["a"]["w"], "bias": without["a"]["bias"]})
    assert_same(new["b"], without["b"])
    assert not torch.equal(plain["b"]["bias"], without["b"]["bias"])


def test_later_overrides_win_and_all_win_over_update() -> None:
    optimizer = sgd(0.1).override(("a",), lr=0.2).override(("a", "w"), lr=0.3, maximize=True)
    new = _tree_step(optimizer, lr=0.9)
    assert_same(new["a"]["w"], _tree_step(sgd(0.3, maximize=True))["a"]["w"])
    assert_same(new["a"]["bias"], _tree_step(sgd(0.2))["a"]["bias"])
    assert_same(new["b"], _tree_step(sgd(0.9))["b"])
    assert optimizer.replace(lr=0.5).hypers_at(("a", "w"))[-1].lr == 0.3
    assert optimizer.replace(lr=0.5).hypers_at(("b", "bias"))[-1].lr == 0.5


def test_an_override_of_other_names_keeps_following_update() -> None:
    new = _tree_step(sgd(0.1).override(("a",), weight_decay=0.5), lr=0.9)
    assert_same(new["a"], _tree_step(sgd(0.9, weight_decay=0.5))["a"])


def test_chain_keeps_the_overrides_of_its_optimizer() -> None:
    base = sgd(0.1).override(("a",), lr=0.2).using(executor="script", namespace="n")
    joined = chain(clip_by_value(0.5), base)
    assert joined.hypers_at(("a",))[-1].lr == 0.2
    assert (joined.executor, joined.namespace) == ("script", "n")


@pytest.mark.parametrize("where", [["a"], "a", 0, "a.w"])
def test_an_override_that_is_no_path_is_refused(where: Any) -> None:
    """Compared with a tuple of keys it never holds: the override would do nothing, silently."""
    for given in (lambda: where, lambda: if_any(where)):
        with pytest.raises(TypeError, match="tuple"):
            sgd().override(given(), lr=0.2)


def test_an_override_keeps_its_stage_when_another_is_put_before() -> None:
    base = chain(clip_by_value(2.0), clip_by_value(3.0), sgd())
    base = base.override((), **{"clip_by_value.clip_value": 0.5})
    joined = chain(clip_by_value(9.0), base)
    clips = [hyper.clip_value for hyper in joined.hypers_at(()) if hasattr(hyper, "clip_value")]
    assert clips == [9.0, 0.5, 3.0]


def test_an_override_does_not_become_ambiguous_in_a_chain() -> None:
    joined = chain(weight_decay(0.1), sgd().override(("a",), weight_decay=0.3))
    decays = [h.weight_decay for h in joined.hypers_at(("a",)) if hasattr(h, "weight_decay")]
    assert decays == [0.1, 0.3]
