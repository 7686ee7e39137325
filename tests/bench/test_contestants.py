"""All contestants of an optimizer make the same step, so that none is fast by doing less."""

import ctypes
import importlib.util
import re
from itertools import product

import pytest
import torch

from benchmarks import contestants as who
from benchmarks.cases import CASES
from benchmarks.contestants import Contestants
from benchmarks.errors import Absent
from benchmarks.peers import floor
from tests.choices import case

SHAPES = [(7, 5), (11,), (3, 2, 2)]
STEPS = 4
# These contestants need a compiler, so they are left out here.
COMPILERS = {"compiled", who.COMPILED}
TESTED = [name for name in who.NAMES if name not in {*COMPILERS, "fused"} and "auto" not in name]
if importlib.util.find_spec("torchopt") is None:  # `make bench` installs it, `make test` does not
    TESTED.remove(who.TORCHOPT)
OWN_CLASSES = {"Lion", "QHM", "clip + decay + QHM"}


def reference(name: str, group: Contestants) -> list[torch.Tensor]:
    optimizer = CASES[name].ours()
    params = [torch.full_like(grad, who.START) for grad in group.grads]
    state = optimizer.init(params)
    grads = [grad.clone() for grad in group.grads]
    for _ in range(STEPS):
        optimizer.update_(params, grads, state)
    return params


def missing(rule: str) -> set[str]:
    """Return the contestants that lack a rule: torch and TorchOpt have neither Lion nor QHM."""
    none = {who.FUSED, who.FUNCTIONAL, who.SCRIPTED, who.TORCHOPT}
    return none if rule in OWN_CLASSES else set()


def test_torchs_fused_kernels_are_contestants_on_cuda_only() -> None:
    for rule in ("AdamW", "QHM"):
        with pytest.raises(Absent, match="CUDA only|no fused"):
            Contestants(SHAPES, "tiny", CASES[rule]).build("fused")


@pytest.mark.parametrize("rule", CASES)
def test_every_contestant_makes_the_reference_step(rule: str) -> None:
    group = Contestants(SHAPES, "tiny", CASES[rule])
    for contestant in TESTED:
        with case(contestant=contestant):
            if contestant in missing(rule):
                with pytest.raises(Absent, match=f"^(torch|TorchOpt) has no .*{re.escape(rule)}"):
                    group.build(contestant)
            else:
                check_steps(rule, contestant, group)
                group.release(())


def test_gradients_reach_the_step_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    for contestant in [name for name in who.OURS if "auto" in name]:
        way = who.OURS[contestant]._replace(executor="blocked")
        monkeypatch.setitem(who.OURS, contestant, way)
        group = Contestants(SHAPES, "tiny", CASES["QHM"])
        with case(contestant=contestant):
            check_steps("QHM", contestant, group)
            stepped = group.stepped[contestant]
            assert {param.requires_grad for param in stepped} == {way.requires_grad}


def check_steps(rule: str, contestant: str, group: Contestants) -> None:
    want = reference(rule, group)
    step = group.build(contestant)
    made = 1 if contestant in who.TORCH_OPTIM else 0  # build() has made one step to create state
    for _ in range(STEPS - made):
        step()
    got = torch.cat([param.detach().reshape(-1) for param in group.stepped[contestant]])
    expected = torch.cat([param.reshape(-1) for param in want])
    moved = expected - who.START
    assert moved.abs().max() > 1e-5
    torch.testing.assert_close(got - who.START, moved, rtol=2e-3, atol=2e-7)


def test_every_peer_that_torch_has_takes_part() -> None:
    for name in ("SGD", "SGD + momentum", "AdamW", "Adagrad"):
        assert CASES[name].fused
        assert CASES[name].functional is not None
        assert CASES[name].torchopt is not None


def test_classes_of_torch_share_state_but_not_step_counts() -> None:
    group = Contestants(SHAPES, "tiny", CASES["AdamW"])
    steps = [group.build(name) for name in (who.LOOP, who.FOREACH)]
    first, second = (step.__self__ for step in steps)
    for param in group.stepped[who.LOOP]:
        mine, other = first.state[param], second.state[param]
        assert mine["exp_avg"] is other["exp_avg"]
        assert mine["step"] is not other["step"]


def test_released_contestants_are_let_go() -> None:
    group = Contestants(SHAPES, "tiny", CASES["SGD"])
    for name in (who.FLOOR, "blocked", who.LOOP):
        group.build(name)
    group.release((who.FLOOR,))
    assert set(group.stepped) == {who.FLOOR}


def test_torch_compile_is_not_given_thousands_of_tensors() -> None:
    group = Contestants([(1,)] * 501, "full", CASES["SGD"])
    with pytest.raises(Absent, match=r"torch.compile of a step over 501 tensors"):
        group.build(who.COMPILED)


def test_floor_steps_every_element() -> None:
    for numel, threads in product([5, 32_768, 100_003], [1, 2]):
        buffers = [torch.ones(numel), torch.full((numel,), 2.0)]
        step = floor.Floor("sgd", lambda _: (0.25,), buffers, threads, varying=False)
        step()
        step()
        with case(numel=numel, threads=threads):
            assert torch.equal(buffers[0], torch.zeros(numel))


def test_floor_is_absent_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    floor.library.cache_clear()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(floor.shutil, "which", lambda _: None)
    with pytest.raises(Absent, match="no C compiler: install gcc"):
        floor.library()


def test_floor_is_absent_with_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    floor.library.cache_clear()
    monkeypatch.setenv("CC", "false")
    with pytest.raises(Absent, match=r"false cannot compile floor\.c"):
        floor.library()


def test_floor_is_compiled_once() -> None:
    floor.library.cache_clear()
    assert isinstance(floor.library(), ctypes.CDLL)
    assert floor.library() is floor.library()
