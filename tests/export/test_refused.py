"""Tests of refused exports: the error comes before tracing, compilation and writing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from functional_optim import adamw, chain, sgd
from functional_optim.export import export_step
from functional_optim.export import step as exporting
from tests.choices import each

from .stages import BRANCHING, CHANGING_CHOICE, FIXED_LENGTH, LOOKING, ROOTED, ROW
from .support import tree


@pytest.fixture(autouse=True)
def nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object, **named: object) -> None:
        pytest.fail("it was written")

    monkeypatch.setattr(exporting, "write_package", never)


def halving(made: float) -> float:
    return 0.5**made


def test_a_schedule() -> None:
    with pytest.raises(ValueError, match=r"lr is the schedule halving.*replace\(lr=.*feed"):
        export_step(sgd(lr=halving), tree())
    with pytest.raises(ValueError, match=r"override_0.lr is the schedule halving"):
        export_step(sgd().override(("bias",), lr=halving), tree())


@each(
    refused=[
        (CHANGING_CHOICE, "coefficients of changing_choice .* step count .*slow is a choice"),
        (ROOTED, r"coefficients of rooted .* instead of math.sqrt"),
        (BRANCHING, "branching cannot be exported: .*nor on data"),
        (LOOKING, "looking cannot be exported: .*leave that name out of inputs"),
    ]
)
def test_rules_are_named(refused: Any) -> None:
    rule, said = refused
    with pytest.raises(TypeError, match=said):
        export_step(chain(rule(lr=0.1, beta=0.9)), {"w": torch.ones(2)})


def test_a_number_left_out_of_inputs_may_be_looked_at() -> None:
    made = export_step(chain(LOOKING(lr=0.1, beta=0.9)), tree(), inputs=["lr"])
    assert made.manifest["fixed"] == {"beta": 0.9}


def test_places_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object, **named: object) -> None:
        pytest.fail("it was traced")

    monkeypatch.setattr(exporting, "trace", never)
    with pytest.raises(FileNotFoundError, match="'.*missing', which is not a folder"):
        export_step(sgd(), tree(), tmp_path / "missing" / "step.pt2")
    with pytest.raises(ValueError, match=r"must end in .pt2, .* got '.*step.pt'"):
        export_step(sgd(), tree(), str(tmp_path / "step.pt"))
    (tmp_path / "folder.pt2").mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder"):
        export_step(sgd(), tree(), tmp_path / "folder.pt2")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.pt2"]


def test_parameters() -> None:
    with pytest.raises(ValueError, match="no tensor"):
        export_step(sgd(), {"w": None})
    with pytest.raises(ValueError, match="stride 0"):
        export_step(sgd(), {"w": torch.ones(1).expand(3)})
    with pytest.raises(ValueError, match="'w' is on the meta device"):
        export_step(sgd(), {"w": torch.ones(3, device="meta")})


@each(shape=[(), (1,), (2, 3)])
def test_free_lengths_of_what_has_none(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="dynamic=True is for parameters of one dimension"):
        export_step(adamw(), {"w": torch.ones(shape)}, dynamic=True)


def test_free_lengths_of_states_of_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"needs states of the parameter's shape .*row.norms"):
        export_step(chain(ROW(lr=0.1, beta=0.5)), {"w": torch.ones(4)}, dynamic=True)


def test_a_rule_that_wants_one_length() -> None:
    with pytest.raises(TypeError, match=r"torch.export refuses \(fixed_length\)"):
        export_step(chain(FIXED_LENGTH(lr=0.1, beta=0.5)), {"w": torch.ones(4)}, dynamic=True)
