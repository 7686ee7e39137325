"""Tests that sharded composed optimizers give the results of one TorchOptimizer."""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adamw,
    chain,
    clip_by_global_norm,
    ema,
    partition,
    schedule_free_adamw,
    sgd,
    sophia,
)
from hooks import hook_with_zero_step
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from sharding.zero.gather import gather_views
from tests import checkpoints
from tests.choices import EVERYTHING, case
from tests.composition.trees import COMPOSED, HOLES, SHAPES, grads_at, kind, params_of, two_parts
from tests.hooks_alone.test_composed import Model
from tests.hooks_alone.test_composed import losses as batch

from .compare import difference, differing
from .composed import (
    ALL_AT_ONCE,
    SHARDED,
    WHOLE,
    WITH_NORM,
    Hooked,
    Run,
    alone,
    grouped,
    named,
    sharded,
)
from .trainings import POLICIES


@pytest.mark.parametrize("name", SHARDED)
def test_any_number_of_ranks_is_one_process(name: str, tmp_path: Path) -> None:
    """Steps are those of one process, and checkpoints load in both directions.

    Each optimizer is run on 3 or 4 ranks, and every third also on one rank.
    """
    third, saved = alone(name, 3)
    last, _ = alone(name, 6)
    policies = (
        ["greedy", "largest_first"] if name in (*WITH_NORM, *WHOLE) else ["elements", "thin slices"]
    )
    turn = list(SHARDED).index(name)
    chosen = [(3 + turn % 2, policies[turn // 2 % 2]), (1, policies[(turn + 1) % 2])]
    if EVERYTHING:
        chosen = [(ranks, policy) for ranks in (1, 3, 4) for policy in policies]
    elif turn % 3:
        del chosen[1]
    for ranks, policy in chosen:

        def trains(group: Any, folder: Path, policy: Any) -> Any:
            run = sharded(name, policy, group, views=group.size() % 2 == 0)
            run.steps(range(3))
            assert differing(run.params, third) == []
            run.optimizer.consolidate_state_dict()
            found = run.optimizer.state_dict() if group.rank() == 0 else None
            checkpoints.save(run.optimizer, folder)
            for given in (saved, folder):
                other = sharded(name, policy, group)
                with torch.no_grad():
                    for path, param in other.params.items():
                        param.copy_(third[path])
                checkpoints.load(other.optimizer, given) if given is folder else (
                    other.optimizer.load_state_dict(given)
                )
                other.steps(range(3, 6))
                assert differing(other.params, last) == []
            return found

        with case(ranks=ranks, policy=policy):
            folder = tmp_path / f"{ranks}, {policy}"
            asked = POLICIES[policy] if policy == "thin slices" else policy
            tasks = partial(trains, folder=folder, policy=asked)
            found = LocalWorld(ranks).run(tasks)[0]
            assert difference(found["param_groups"], saved["param_groups"]) == []
            assert difference(found["state"], saved["state"]) == []
            run = Run(lambda params: TorchOptimizer(grouped(params), SHARDED[name]()))
            run.optimizer.load_state_dict(found)
            with torch.no_grad():
                for path, param in run.params.items():
                    param.copy_(third[path])
            run.steps(range(3, 6))
            assert differing(run.params, last) == []


@pytest.mark.parametrize("name", ["accumulate", "finite", "schedule-free", "prodigy"])
def test_a_rank_that_owns_nothing_keeps_the_numbers_too(name: str) -> None:
    last, _ = alone(name, 4)

    def trains(group: Any) -> tuple[int, Any]:
        run = sharded(name, "greedy", group)
        run.steps(range(4))
        assert differing(run.params, last) == []
        return len(run.optimizer.owned), run.optimizer.shared

    owned, shared = zip(*LocalWorld(6).run(trains), strict=True)
    assert min(owned) == 0
    assert all(one == shared[0] for one in shared)


def test_what_a_rank_has_of_each_part() -> None:
    """A matrix stays whole and other parameters are cut; a frozen parameter has an owner, but no
    state.
    """

    def looked_at(group: Any) -> list[Any]:
        zero = sharded("muon and adamw", POLICIES["thin slices"], group).optimizer
        for one in zero.owned:
            if one.path in ("body.weight", "head.weight"):
                assert one.whole
        run = sharded("frozen", "greedy", group)
        run.steps(range(1))
        frozen = run.optimizer
        assert set(frozen.optim.state) == {
            frozen.params[one.path] for one in frozen.owned if one.path != "head.weight"
        }
        return [(one.path, one.start, one.stop) for one in zero.owned]

    owned = [one for rank in LocalWorld(4).run(looked_at) for one in rank]
    assert sum(path == "body.bias" for path, _, _ in owned) > 1


def test_totals_are_summed_in_the_order_of_the_parameters() -> None:
    """Totals are summed in the order of the parameters, as in a TorchOptimizer."""
    pairs_ = [(name, torch.ones(1)) for name in "abc"]
    chosen = partition(
        {"first": sgd(), "rest": sgd()}, lambda path, shape: "first" if path == ("a",) else "rest"
    )
    addends = torch.tensor([1.0, 1e-16, 1e-16], dtype=torch.float64)
    for optimizer in (chosen, sgd()):
        zero = ZeroRedundancyOptimizer(pairs_, optimizer, LocalWorld(1).groups[0])
        assert float(zero.total(addends)) == 1.0


def test_what_cannot_be_sharded_is_refused() -> None:
    """Optimizers that cannot be sharded are refused, and a refused group changes nothing."""
    group = LocalWorld(1).groups[0]
    inside = partition({"matrices": chain(clip_by_global_norm(1.0), sgd()), "rest": adamw()}, kind)
    labels = partition({"matrices": sgd(), "rest": sgd()}, lambda path, shape: "others")
    with pytest.raises(TypeError, match="only gradients, but scale_by_sophia also needs"):
        ZeroRedundancyOptimizer(named().items(), sophia(), group)
    with pytest.raises(TypeError, match="clip_by_global_norm .* does not act on 'body.bias'"):
        ZeroRedundancyOptimizer(named().items(), inside, group)
    with pytest.raises(ValueError, match="no rule acts"):
        ZeroRedundancyOptimizer(named().items(), labels, group)
    pairs_ = list(named().items())
    zero = ZeroRedundancyOptimizer(pairs_[::2], inside, group)
    before = [list(one["params"]) for one in zero.param_groups]
    with pytest.raises(TypeError, match="does not act on 'body.bias'"):
        zero.add_param_group({"params": pairs_[1:2]})
    assert [list(one["params"]) for one in zero.param_groups] == before
    zero = ZeroRedundancyOptimizer(pairs_[:1], two_parts(), group)
    with pytest.raises(ValueError, match="lr must be"):
        zero.add_param_group({"params": pairs_[1:2], "lr": -1.0})
    zero.add_param_group({"params": pairs_[2:3], "lr": 1.0})
    assert [one["momentum"] for one in zero.param_groups] == [0.9, 0.9]
    zero.params["head.weight"].grad = torch.ones(4, 4)
    zero.step()
    torch.testing.assert_close(zero.params["head.weight"].detach(), params_of()["head.weight"] - 1)


VIEWED: dict[str, Callable[[], Optimizer]] = {
    "finite batches": COMPOSED["finite batches"],
    "batches of parts": COMPOSED["batches of parts"],
    "schedule-free parts": SHARDED["schedule-free parts"],
    "schedule-free": schedule_free_adamw,
    "average": lambda: chain(adamw(0.01), ema(0.9)),
    "lookahead": COMPOSED["lookahead"],
    "no view": lambda: sgd(0.1),
}


class Holder(torch.nn.Module):
    """Module over given tensors."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._own = params

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter(self._own.values())


@pytest.mark.parametrize("name", VIEWED)
def test_every_rank_sees_the_parameters_to_evaluate_with(name: str) -> None:
    """Every rank gets the whole view of one process, in separate memory.

    Afterwards, training goes on with the original parameters.
    """
    own = Run(lambda params: TorchOptimizer(grouped(params), VIEWED[name]()))
    wanted = []
    for step in range(4):
        own.steps(range(step, step + 1))
        views = {key: one.detach().clone() for key, one in own.optimizer.view().items()}
        wanted.append((views, own.detached(), own.optimizer.shared))

    def trains(group: Any, policy: Any) -> None:
        run = Run(
            lambda p: ZeroRedundancyOptimizer(grouped(p), VIEWED[name](), group, policy=policy)
        )
        for step, (views, params, shared) in enumerate(wanted):
            run.steps(range(step, step + 1))
            found = run.optimizer.view()
            assert found.keys() == views.keys()
            for key, one in found.items():
                assert torch.equal(one, views[key])
                assert one.data_ptr() != run.params[key].data_ptr()
            with run.optimizer.averaged(Holder(run.params)):
                assert differing(run.params, views) == []
            assert differing(run.params, params) == []
            assert run.optimizer.shared == shared

    norm = name in WITH_NORM
    for ranks, policy in ((1, "greedy"), (3, "largest_first" if norm else POLICIES["thin slices"])):
        LocalWorld(ranks).run(partial(trains, policy=policy))


def test_a_view_that_fails_leaves_parameters_as_they_are() -> None:
    group = LocalWorld(1).groups[0]
    run = Run(lambda params: ZeroRedundancyOptimizer(grouped(params), VIEWED["average"](), group))
    run.steps(range(2))
    before = run.detached()

    def gather() -> None:
        assert differing(run.params, before) != []
        raise KeyboardInterrupt

    zero = run.optimizer
    with pytest.raises(KeyboardInterrupt):
        gather_views(zero._own, zero.param_groups, run.params.values(), gather)
    assert differing(run.params, before) == []


def test_numbers_that_are_not_there_are_not_loaded() -> None:
    """A state dict without some shared scalars is refused, and changes nothing."""
    group = LocalWorld(1).groups[0]
    run = sharded("finite", "greedy", group)
    run.steps(range(3))
    zero = run.optimizer
    zero.consolidate_state_dict()
    saved = copy.deepcopy(zero.state_dict())
    before = zero.shared
    for one in saved["param_groups"]:
        one["lr"] = 5.0
    lacking = copy.deepcopy(saved)
    del lacking["param_groups"][1]["apply_if_finite.shared.skipped"]
    with pytest.raises(ValueError, match="its groups differ in that"):
        zero.load_state_dict(lacking)
    broken = copy.deepcopy(saved)
    for one in broken["param_groups"]:
        one["apply_if_finite.shared.skipped"] = 7.0
    broken["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match="exp_avg"):
        zero.load_state_dict(broken)
    assert zero.shared == before
    assert [one["lr"] for one in zero.param_groups] == [0.01, 0.01]


def test_of_unnamed_parameters_the_shape_tells_or_the_place() -> None:
    group = LocalWorld(1).groups[0]
    zero = ZeroRedundancyOptimizer(named().values(), SHARDED["parts"](), group)
    assert [len(one["params"]) for one in zero.param_groups] == [2, 2]
    assert zero.param_groups[0]["momentum"] == 0.9
    assert zero.param_groups[1]["betas"] == (0.9, 0.999)
    zero = ZeroRedundancyOptimizer(list(named().values())[:2], by_place(), group)
    zero.add_param_group({"params": list(named().values())[2:]})
    assert [len(one["params"]) for one in zero.param_groups] == [2, 1, 1]


def by_place() -> Optimizer:
    """Return a partition by the number of a parameter, which is the path of an unnamed one."""
    parts = {"first": sgd(), "last": adamw()}
    return partition(parts, lambda path, shape: "first" if path[0] < 3 else "last")


def test_what_was_kept_for_a_parameter_is_seen_to_step_it() -> None:
    """A step by a gradient that a gate kept increases the version counter of the parameter.

    So autograd notices the change, even without a new gradient.
    """

    def trains(group: Any) -> int:
        zero = sharded("accumulate", POLICIES["thin slices"], group).optimizer
        for paths in 8 * (SHAPES, SHAPES, {"body.bias"}):  # enough steps to build plans
            before = {path: (one.clone(), one._version) for path, one in zero.params.items()}
            given: dict[str, Any] = {}
            for one in zero.owned:
                if one.path in paths:
                    grad = grads_at(0)[one.path].flatten()[one.start : one.stop]
                    given.setdefault(one.path, []).append((one.start, one.stop, grad))
            totals: list[Tensor] = []
            for _ in range(zero.measured_stages):
                totals.append(zero.total(zero.measure(given, measured=totals)))
            zero.step_owned(given, measured=totals)
            moved = [k for k, one in zero.params.items() if not torch.equal(one, before[k][0])]
            assert all(zero.params[path]._version > before[path][1] for path in moved)
        assert set(moved) == {one.path for one in zero.owned}
        return sum(path != "body.bias" for path in moved)

    assert all(LocalWorld(3).run(trains))


@pytest.mark.parametrize("name", SHARDED)
def test_a_hook_steps_while_backward_goes_on(name: str, tmp_path: Path) -> None:
    """A hook steps as one process does, on 2 ranks, and every third optimizer also on 8 ranks.

    Two ranks have the same data, and the loss of the other ranks is 0. Some ranks own nothing.
    Afterwards, a checkpoint continues with another hook.
    """
    plain = Model()
    optimizer = TorchOptimizer(plain.named_parameters(), SHARDED[name]())
    wanted = []
    for step in range(6):
        optimizer.zero_grad()
        plain(batch(step)).backward()
        optimizer.step()
        wanted.append({one: p.detach().clone() for one, p in plain.named_parameters()})

    def trains(group: Any, folder: Path) -> Any:
        run = Hooked(name, group)
        for step in range(3):
            run.steps(range(step, step + 1))
            assert differing(run.params, wanted[step]) == []
        checkpoints.save(run.zero, folder)
        other = Hooked(name, group, partial(hook_with_zero_step, allreduce_hook))
        with torch.no_grad():
            for path, param in other.params.items():
                param.copy_(wanted[2][path])
        checkpoints.load(other.zero, folder)
        other.steps(range(3, 6))
        assert differing(other.params, wanted[-1]) == []
        return other.zero.shared

    has_turn = EVERYTHING or list(SHARDED).index(name) % 3 == 0
    for ranks in (2, 8) if has_turn else (2,):
        every = LocalWorld(ranks).run(partial(trains, folder=tmp_path / str(ranks)))
        assert all(difference(one, optimizer.shared) == [] for one in every)


@pytest.mark.parametrize("name", ALL_AT_ONCE)
def test_one_call_is_a_step_of_all(name: str) -> None:
    """One call of step_owned steps all parameters; those without a gradient are skipped."""

    def trains(group: Any) -> None:
        own, given = (sharded(name, "greedy", group) for _ in range(2))
        zero = given.optimizer
        assert zero.steps_at_once
        for step in range(6):
            own.steps(range(step, step + 1))
            grads = grads_at(step, missing=HOLES)
            mine: Any = {
                one.path: [(one.start, one.stop, grads[one.path])]
                for one in zero.owned
                if grads[one.path] is not None
            }
            totals: list[Tensor] = []
            for _ in range(zero.measured_stages):
                totals.append(zero.total(zero.measure(mine, measured=totals)))
            if mine and step == 1:
                with pytest.raises(ValueError, match=f"needs {len(totals)} totals"):
                    zero.step_owned(mine, measured=[*totals, torch.zeros(())])
            zero.step_owned(mine, measured=totals)
            zero.mark_stepped()
            zero.gather()
            assert differing(given.params, own.detached()) == []
        assert zero.shared == own.optimizer.shared

    for ranks in (1, 5):
        LocalWorld(ranks).run(trains)
