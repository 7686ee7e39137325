"""Parameters that cannot move unnoticed stay in place; those that cannot be trained are refused."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from functional_optim.plan.flat.layout import FlatLayout

from ..choices import case


class Named(Parameter):
    """Subclass that overrides nothing."""


class Overriding(Tensor):
    """Subclass with its own torch functions."""


def shared() -> Tensor:
    return torch.ones(3).share_memory_()


def shrunk() -> Tensor:
    return torch.ones(6).resize_(2)


def freed() -> Tensor:
    param = torch.ones(3)
    param.untyped_storage().resize_(0)
    return param


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls nested tensors a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


ALONE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "a view": (lambda: torch.ones(4).view(2, 2), "a view of another tensor"),
    "a part": (lambda: Parameter(torch.ones(4)[1:3]), "larger than it is, 16 bytes for 8"),
    "shrunk": (shrunk, "larger than it is, 24 bytes for 8"),
    "freed": (freed, "smaller than it is, 0 bytes for 12"),
    "gaps": (lambda: Parameter(torch.ones(6)[::2]), "do not fill its memory"),
    "expanded": (lambda: Parameter(torch.ones(1).expand(3)), "do not fill its memory"),
    "overlapping": (
        lambda: Parameter(torch.ones(4).as_strided((2, 3), (1, 1))),
        "do not fill its memory",
    ),
    "as long as it should be": (
        lambda: Parameter(torch.ones(8).as_strided((2, 2, 2), (1, 1, 5))),
        "do not fill its memory",
    ),
    "meta": (lambda: Parameter(torch.ones(3, device="meta")), "meta device"),
    "integers": (lambda: torch.ones(3, dtype=torch.int64), "dtype is torch.int64"),
    "sparse": (lambda: Parameter(torch.eye(2).to_sparse()), "layout is torch.sparse_coo"),
    "nested": (nested, "layout is nested"),
    "a result": (lambda: torch.ones(2, requires_grad=True) * 2, "not a leaf"),
    "conjugate": (lambda: torch.ones(2, dtype=torch.complex64).conj().detach(), "conjugate"),
    "subclass": (lambda: torch.ones(2).as_subclass(Overriding), "class Overriding"),
    "lazy": (torch.nn.UninitializedParameter, "class UninitializedParameter"),
    "shared": (shared, "shared with other processes"),
}


def where(param: Tensor) -> object:
    """Return the address, strides and shape, or None for tensors without ordinary memory."""
    odd = param.layout != torch.strided or param.is_nested or hasattr(param, "materialize")
    return None if odd else (param.data_ptr(), param.stride(), param.shape)


def test_stays_with_a_reason() -> None:
    for name, (make, why) in ALONE.items():
        with case(name=name):
            param, other = make(), torch.ones(2)
            before = where(param)
            layout = FlatLayout([param, other], ["odd", "even"])
            assert layout.apart == (0,)
            assert why in layout.reasons[0]
            assert [segment.index for segment in layout.buffers[0].segments] == [1]
            assert where(param) == before
            layout.check()
            layout.attach_gradients()
            layout.gather([None, torch.ones(2)])
            layout.undo()
            assert where(param) == before


def test_a_subclass_that_overrides_nothing_moves_and_keeps_its_class() -> None:
    param = Named(torch.ones(2))
    param.note = "kept"
    layout = FlatLayout([param], ["named"])
    assert layout.apart == () and type(param) is Named and param.note == "kept"


def test_inside_a_transform_of_torch_func() -> None:
    seen = []

    def inside(param: Tensor) -> Tensor:
        seen.append(FlatLayout([param], ["wrapped"]).reasons)
        return param.sum()

    torch.func.grad(inside)(torch.ones(3))
    assert seen == [{0: "it is inside a transform of torch.func"}]


def test_two_parameters_on_the_same_memory_both_stay() -> None:
    one = Parameter(torch.ones(4))
    layout = FlatLayout([one, Parameter(torch.ones(1)), Parameter(one.data)], ["a", "b", "c"])
    assert layout.reasons == {
        0: "it shares its memory with 'c'",
        2: "it shares its memory with 'a'",
    }


def test_parameters_that_share_memory_in_part_stay() -> None:
    room = torch.ones(6)
    layout = FlatLayout([Parameter(room[:4]), Parameter(room[2:]), Parameter(room)], list("abc"))
    assert layout.apart == (0, 1, 2) and layout.buffers == ()
    assert layout.reasons[2] == "it shares its memory with 'a'"


def test_parameters_of_another_layout_stay_in_it() -> None:
    params = [Parameter(torch.ones(2)), Parameter(torch.ones(3))]
    first = FlatLayout(params, ["a", "b"])
    second = FlatLayout(params, ["a", "b"])
    assert second.apart == (0, 1)
    first.check()
    first.undo()
    assert FlatLayout(params, ["a", "b"]).apart == ()


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"params": [torch.ones(1), 3.0]}, TypeError, "at 'b' must be a tensor, got float"),
    ({"names": ["a"]}, ValueError, "got 2, 1 and 2"),
    ({"keys": [1]}, ValueError, "got 2, 2 and 1"),
    ({"keys": [1, []]}, TypeError, r"key of 'b' must be hashable, got \[\]"),
    ({"keys": [1, ([],)]}, TypeError, "key of 'b' must be hashable"),
    ({"align": 0}, ValueError, "at least 1, got 0"),
    ({"align": 2.0}, TypeError, "whole number of elements, got 2.0"),
    ({"align": True}, TypeError, "whole number of elements, got True"),
]


def test_refused_before_anything_moves() -> None:
    params = [torch.ones(1), torch.ones(2)]
    places = [param.data_ptr() for param in params]
    for change, kind, text in REFUSED:
        given: dict[str, Any] = {"params": params, "names": ["a", "b"], **change}
        with pytest.raises(kind, match=text):
            FlatLayout(**given)
        assert [param.data_ptr() for param in params] == places, change


def test_a_parameter_twice_is_refused() -> None:
    param = torch.ones(1)
    with pytest.raises(ValueError, match="at 'b' is also at 'a'"):
        FlatLayout([param, param], ["a", "b"])


def test_a_tensor_of_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        param = torch.ones(2)
    fine = torch.ones(2)
    place = fine.data_ptr()
    with pytest.raises(ValueError, match="at 'b' was made in inference mode.*clone"):
        FlatLayout([fine, param], ["a", "b"])
    assert fine.data_ptr() == place


def test_a_default_device_is_no_reason() -> None:
    with torch.device("cpu"):
        assert FlatLayout([torch.ones(2), Parameter(torch.ones(1))], ["a", "b"]).apart == ()
