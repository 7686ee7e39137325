"""Hooks around state_dict and load_state_dict."""

import copy
from typing import Any

import torch

from .support import CASES, assert_same_entries, params_of, twins
from .test_failing_loads import started


def test_load_hooks_run_as_torch_s_do() -> None:
    def seen_by(one: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []

        def before(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
            seen.append(sorted(saved))
            changed = copy.deepcopy(saved)
            changed["param_groups"][0]["lr"] = 0.125
            return changed

        def after(optimizer: Any) -> None:
            seen.append(optimizer.param_groups[0]["lr"])

        handles = [
            one.register_load_state_dict_pre_hook(before),
            one.register_load_state_dict_post_hook(after),
            one.register_load_state_dict_post_hook(lambda _: seen.append("second")),
        ]
        saved = one.state_dict()
        one.load_state_dict(saved)
        assert saved["param_groups"][0]["lr"] == 0.1
        for handle in handles:
            handle.remove()
        one.load_state_dict(one.state_dict())
        return seen

    pair = twins(CASES["AdamW"])
    pair.step(0)
    assert seen_by(pair.ours) == seen_by(pair.theirs)
    assert pair.ours.param_groups[0]["lr"] == 0.125
    pair.step(1)
    pair.assert_same()


def test_a_load_pre_hook_that_writes_into_the_dict_does_not_reach_the_caller_s() -> None:
    ours = started()
    saved = copy.deepcopy(ours.state_dict())
    before = repr(saved)

    def hook(_: Any, given: dict[str, Any]) -> None:
        given["param_groups"][0]["lr"] = 0.125
        given["state"][0]["exp_avg"].zero_()

    ours.register_load_state_dict_pre_hook(hook)
    ours.load_state_dict(saved)
    assert repr(saved) == before
    assert ours.param_groups[0]["lr"] == 0.125


def test_a_load_post_hook_finds_a_complete_state() -> None:
    ours = started()
    found: list[Any] = []

    def hook(one: torch.optim.Optimizer) -> None:
        found.extend(one.state[param]["step"].dtype for param in params_of(one))

    ours.register_load_state_dict_post_hook(hook)
    saved = ours.state_dict()
    ours.load_state_dict({"state": {0: saved["state"][0]}, "param_groups": saved["param_groups"]})
    assert found == [torch.int64] * 4


def test_state_dict_hooks_run_as_torch_s_do() -> None:
    def written_by(one: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        one.register_state_dict_pre_hook(lambda _: seen.append("pre"))

        def add(_: Any, saved: dict[str, Any]) -> None:
            seen.append(sorted(saved))
            saved["extra"] = 1

        handle = one.register_state_dict_post_hook(add)
        seen.append(sorted(one.state_dict()))
        handle.remove()
        instead = {"instead": 2}
        one.register_state_dict_post_hook(lambda *_: instead)
        assert one.state_dict() is instead
        return seen

    pair = twins(CASES["AdamW"])
    pair.step(0)
    assert written_by(pair.theirs) == written_by(pair.ours)


def test_a_state_dict_post_hook_sees_what_is_written() -> None:
    pair = twins(CASES["AdamW"])
    pair.step(0)
    seen: list[dict[str, Any]] = []
    pair.each(lambda one: one.register_state_dict_post_hook(lambda _, saved: seen.append(saved)))
    pair.each(lambda one: one.state_dict())
    for number in range(4):
        theirs, ours = (saved["state"][number] for saved in seen)
        assert_same_entries(ours, theirs)
        assert ours["step"].dtype == theirs["step"].dtype == torch.float32
