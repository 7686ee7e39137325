"""``check`` detects every way out of a buffer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from functional_optim.plan.flat.layout import FlatLayout

from ..choices import case, pairs


def to_new_memory(param: Tensor) -> None:
    param.data = param.data.clone()


def to_meta(param: Tensor) -> None:
    torch.utils.swap_tensors(param, torch.ones(2, 3, device="meta"))


def to_half(param: Tensor) -> None:
    param.data = param.data.half()


def to_integers_in_place(param: Tensor) -> None:
    param.data = param.data.view(torch.int32)


def reinterpret(param: Tensor) -> None:
    param.data = param.data.view(torch.int32).view(torch.float32).t()


def shrink(param: Tensor) -> None:
    param.data.resize_(1, 3)
    param.data = param.data[:1]


def spread(param: Tensor) -> None:
    param.data = param.data.new_zeros(2, 6)[:, ::2]


WAYS_OUT: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "new memory": (to_new_memory, "other memory"),
    "dtype": (to_half, "dtype is torch.float16, it was torch.float32"),
    "dtype in place": (to_integers_in_place, "dtype is torch.int32"),
    "strides in place": (lambda param: param.t_(), r"shape is \(3, 2\), it was \(2, 3\)"),
    "strides by data": (reinterpret, r"shape is \(3, 2\), it was \(2, 3\)"),
    "shape": (shrink, r"shape is \(1, 3\)"),
    "spread": (spread, r"strides are \(6, 2\)"),
    "shared": (Tensor.share_memory_, "other memory"),
    "device": (to_meta, "device is meta, it was cpu"),
    "set": (lambda param: param.set_(torch.ones(2, 3)), "other memory"),
}


def test_the_first_that_left_is_named() -> None:
    for chosen in pairs(way=list(WAYS_OUT), place=[0, 2]):
        leave, what = WAYS_OUT[chosen["way"]]
        params = [torch.arange(6.0).reshape(2, 3).clone() for _ in range(4)]
        layout = FlatLayout(params, ["a", "b", "c", "d"])
        layout.check()
        with torch.no_grad():
            leave(params[chosen["place"]])
        said = f"'{'abcd'[chosen['place']]}' has left its flat buffer.*{what}"
        with case(**chosen):
            for _ in range(2):
                with pytest.raises(RuntimeError, match=said):
                    layout.check()
                to_new_memory(params[3])
            with pytest.raises(RuntimeError, match="has left its flat buffer"):
                layout.attach_gradients()


def test_strides_alone() -> None:
    param = torch.arange(4.0).reshape(2, 2).clone()
    layout = FlatLayout([param], ["a"])
    param.t_()
    with pytest.raises(RuntimeError, match=r"strides are \(1, 2\), they were \(2, 1\)"):
        layout.check()


def test_a_conjugate_of_itself_is_something_else() -> None:
    param = torch.ones(2, dtype=torch.complex64)
    layout = FlatLayout([param], ["a"])
    param.data = param.data.conj()
    with pytest.raises(RuntimeError, match="other memory"):
        layout.check()


def test_an_empty_parameter_is_checked_too() -> None:
    params = [torch.ones(2), torch.ones(0, 3)]
    layout = FlatLayout(params, ["a", "b"])
    layout.check()
    params[1].data = torch.ones(2, 0)
    with pytest.raises(RuntimeError, match=r"'b' has left.*shape is \(2, 0\)"):
        layout.check()


def test_what_changes_values_is_no_way_out() -> None:
    model = torch.nn.Linear(3, 2)
    layout = FlatLayout(list(model.parameters()), ["weight", "bias"])
    with torch.no_grad():
        model.weight.mul_(2).zero_()
    model.weight.requires_grad_(False)
    model.to("cpu").float()
    layout.check()
    layout.buffers[0].data.fill_(3.0)
    assert model.weight.tolist() == [[3.0] * 3] * 2


def test_autograd_is_told_by_who_writes_and_not_by_who_looks() -> None:
    params = [Parameter(torch.ones(2)), Parameter(torch.ones(3))]
    layout = FlatLayout(params, ["a", "b"])
    for _ in range(3):  # the first check is a full one, and later checks use what it remembers
        versions = [param._version for param in params]
        layout.check()
        assert [param._version for param in params] == versions
        layout.mark_changed()
        assert [param._version for param in params] == [version + 1 for version in versions]
    to_new_memory(params[0])
    version = params[0]._version
    with pytest.raises(RuntimeError, match="'a' has left"):
        layout.check()
    assert params[0]._version == version
