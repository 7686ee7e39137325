"""DistributedOptimizer over torch's RPC: three processes, started once for all scenarios."""

from typing import Any

import pytest

from tests.ranks import Job, Outcomes, run_ranks

from ..laws import LAWS
from ..transports import WANTED
from . import jobs


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the trainer's results from new processes: RPC starts only once in a process."""
    meeting = tmp_path_factory.mktemp("rpc") / "meeting"
    job = Job(jobs.drive, {"meeting": str(meeting)})
    outcomes: Outcomes = run_ranks({"drive": job}, ranks=3, seconds=120, fresh=True)
    results = [outcome.result() for outcome in outcomes["drive"]]
    assert results[1:] == [{}, {}]
    return dict(results[0])


def of(found: dict[str, Any], name: str) -> dict[str, Any]:
    own: dict[str, Any] = found[name]
    assert "wrong" not in own, own["wrong"]
    return own


def test_the_transport(found: dict[str, Any]) -> None:
    own = of(found, "the_transport")
    assert "nobody" in own.pop("gone")
    assert own == WANTED


def test_laws_of_every_transport(found: dict[str, Any]) -> None:
    assert of(found, "the_laws") == dict.fromkeys(LAWS, "holds")


def test_a_class_that_only_the_trainer_registered(found: dict[str, Any]) -> None:
    """Parameters without gradients, and every ``.grad``, stay unchanged."""
    assert of(found, "equals_the_local_run") == {
        "same": True,
        "moved": True,
        "steps": [3, 3, 3, 0],
        "functional": True,
        "grads": [None] * 4,
        "workers": ["ps1", "ps2", "trainer"],
    }


def test_a_worker_without_a_part_in_the_pass_is_left_alone(found: dict[str, Any]) -> None:
    """torch's own optimizer raises an error on a worker without a context."""
    assert of(found, "no_part_in_the_context") == {"moved": [True, False, False, False]}


def test_optimizers_over_the_same_parameters_take_turns(found: dict[str, Any]) -> None:
    """A snapshot for one optimizer is older after a step of the other."""
    own = of(found, "two_trainers_optimizers")
    text = "step failed on 3 of 3 workers:\n  ps1: StaleError: these gradients are 1 steps old"
    assert text in own.pop("old")
    assert own == {"same": True}


def test_clipping_and_a_scaler_over_all_workers(found: dict[str, Any]) -> None:
    assert of(found, "clipping_and_scaling") == {
        "close": [True] * 4,
        "norm": True,
        "found": [False, True],
        "skipped": True,
        "scale": 2.0,
    }


def test_sparse_gradients_touch_their_rows(found: dict[str, Any]) -> None:
    assert of(found, "sparse_gradients") == {"rows": [0.0, -2.0, 0.0, -1.0]}


def test_no_step_disturbs_a_backward_pass(found: dict[str, Any]) -> None:
    """Through the plain module, only the first trainer of each round succeeds."""
    own = of(found, "backward_passes_are_undisturbed")
    assert own == {
        "plain": {"failed": 9, "inplace": True, "steps": 3},
        "ours": {"failed": 0, "inplace": True, "steps": 12},
        "same": [True] * 4,
        "staleness": [[0, 3], [1, 3], [2, 3], [3, 3]],
        "kept": 0,
    }


def test_one_trainer_copies_nothing(found: dict[str, Any]) -> None:
    assert of(found, "one_trainer") == {
        "norm": [True] * 3,
        "close": [True] * 8,
        "copied": [0, 0],
        "staleness": [[[0, 3]]] * 2,
    }


def test_a_parameter_read_in_two_ways_is_named(found: dict[str, Any]) -> None:
    own = of(found, "read_in_two_ways")
    assert "parameter 0 of this worker, of shape (4, 3), was read in context" in own.pop("text")
    assert own == {"same": [True, True], "wanted": False, "leaves": 8}


def test_composed_optimizers_step_by_contexts(found: dict[str, Any]) -> None:
    assert of(found, "composed_in_contexts") == {"same": [True] * 8, "steps": [4, 4]}


def test_each_call_carries_one_buffer_for_each_worker(found: dict[str, Any]) -> None:
    """Four gradients, and the state of four parameters, need one buffer for each worker."""
    assert of(found, "one_buffer_a_call") == {"step": [1, 1], "load": [1, 1]}


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("empty", "ValueError: there are no parameters"),
        ("no list", "TypeError: params_rref must be a list of RRefs"),
        ("no rref", "TypeError: '0.4' must be an RRef to a parameter, got a tensor"),
        ("no tensor", "WorkerTypeError: the constructor failed on 1 of 1 workers:\n  ps2: "),
        ("no tensor", "'0.1' must be an RRef to a parameter, got one to a dict"),
        ("twice", "ValueError: 'param_groups[0][1]' is the same parameter"),
        ("negative", "ValueError: Invalid learning rate: -1"),
        (
            "no time",
            "ValueError: start_timeout must be a finite number of seconds above 0, got 0.0",
        ),
        ("no context", "RuntimeError: there is no distributed autograd context 12345"),
        ("failing", "WorkerError: step failed on 2 of 3 workers:\n  ps1: LookupError: nothing"),
        ("failing", "\n  ps2: LookupError: nothing to be found"),
    ],
)
def test_bad_input_and_failures_are_named(found: dict[str, Any], what: str, text: str) -> None:
    assert text in of(found, "bad_input")[what]


def test_errors_keep_their_types_and_the_warning_comes_once(found: dict[str, Any]) -> None:
    own = of(found, "bad_input")
    assert own["errors"] == {"ps1": "LookupError", "ps2": "LookupError"}
    assert own["warned"] == ["<class 'tests.remote.rpc.small_model.Failing'>"]
