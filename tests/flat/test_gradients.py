"""Gradients that are accumulated in the flat buffers, recognized there, or gathered."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from functional_optim.plan.flat.layout import FlatLayout
from functional_optim.testing.runs import LAYOUTS

from ..choices import case, examples
from ..tensors import assert_same
from .support import Drawn, aligns, flatten, make_all, several


def gathered(layout: FlatLayout) -> dict[int, Tensor]:
    """Return the real views of the gradient buffers, by index of the parameter."""
    return {
        segment.index: view
        for buffer, flat in zip(layout.buffers, layout.gradient_buffers(), strict=True)
        for segment, view in zip(buffer.segments, buffer.views(flat), strict=True)
    }


def gaps(layout: FlatLayout) -> list[Tensor]:
    found = []
    for buffer, flat in zip(layout.buffers, layout.gradient_buffers(), strict=True):
        free = torch.ones(buffer.numel, dtype=torch.bool)
        for segment in buffer.segments:
            free[segment.offset : segment.offset + segment.numel] = False
        found.append(flat[free])
    return found


class Operations(TorchDispatchMode):
    """Recorder of the torch operations that are called, except views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not function.is_view:
            self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def operations(call: Callable[[], object]) -> list[str]:
    """Return the names of the torch operations that a call runs, except views."""
    with Operations() as seen:
        call()
    return seen.names


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


@examples(25)
@given(several, aligns, st.lists(st.sampled_from(LAYOUTS), min_size=6, max_size=6))
def test_gather_brings_every_gradient_to_its_place(
    ones: list[Drawn], align: int, layouts: list[str]
) -> None:
    params = make_all(ones)
    layout = flatten(params, ones, align)
    grads = [one.gradient(i, layouts[i]) for i, one in enumerate(ones)]
    first = layout.gradient_buffers()
    assert all(not flat.any() for flat in first)
    layout.gather(grads)
    assert all(a is b for a, b in zip(first, layout.gradient_buffers(), strict=True))
    found = gathered(layout)
    assert set(found) == set(range(len(ones))) - set(layout.apart)
    for i, view in found.items():
        assert_same(view, real(grads[i]))
    assert not any(gap.any() for gap in gaps(layout))
    assert all(param.grad is None for param in params)


def test_gradients_of_any_shape_and_strides_are_gathered() -> None:
    """``gather`` copies transposed, 0-d, empty and complex gradients in one foreach operation."""
    shapes: list[tuple[int, ...]] = [(2, 3), (3,), (4, 3), (), (0, 3), (5,), (1, 3)]
    params = [torch.ones(shape) for shape in shapes]
    params += [Parameter(torch.ones(3, 2).t()), torch.ones(2, dtype=torch.complex64)]
    layout = flatten(params)
    grads = [torch.randn_like(param) for param in params]
    grads[2], grads[8] = grads[2].t().contiguous().t(), grads[8].conj()
    layout.gradient_buffers()  # the first call creates the buffers
    # Torch clones a conjugate wherever it is copied to.
    assert operations(lambda: layout.gather(grads)) == ["aten::clone", "aten::_foreach_copy_"]
    for i, view in gathered(layout).items():
        assert_same(view, real(grads[i]))


@examples(25)
@given(several, aligns)
def test_attached_gradients_are_the_buffers(ones: list[Drawn], align: int) -> None:
    params = make_all(ones)
    twins = make_all(ones)
    layout = flatten(params, ones, align)
    layout.attach_gradients()
    for _ in range(2):
        for group in (params, twins):
            loss = sum((p.abs() ** 2).sum().double() for p in group if p.requires_grad)
            if isinstance(loss, Tensor):
                loss.backward()
    for i, (param, twin) in enumerate(zip(params, twins, strict=True)):
        if not param.requires_grad:
            assert param.grad is None
            continue
        assert param.grad is not None and twin.grad is not None
        assert_same(param.grad, twin.grad)
        if i not in layout.apart:
            assert_same(gathered(layout)[i], real(twin.grad))
            assert param.grad.stride() == param.stride()
    all_there = all(p.requires_grad for i, p in enumerate(params) if i not in layout.apart)
    assert layout.gradients_in_place([param.grad for param in params]) == all_there
    assert not any(gap.any() for gap in gaps(layout))
    layout.zero_gradients()
    for i, param in enumerate(params):
        if param.grad is not None and i not in layout.apart:
            assert not param.grad.any()


def test_attaching_keeps_what_was_accumulated() -> None:
    params = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    layout = flatten(params)
    layout.gather([torch.full((2,), 9.0), torch.full((3,), 9.0)])
    (params[0] * 4).sum().backward()
    for again in (4.0, 5.0):  # then one gradient is attached, and one is missing
        layout.attach_gradients()
        grads = [param.grad for param in params]
        assert layout.gradients_in_place(grads)
        assert layout.gradient_buffers()[0].tolist() == [again, again, *[again - 4] * 3]
        params[1].grad = None
        assert not layout.gradients_in_place([param.grad for param in params])
        (params[0] + params[1][:2]).sum().backward()
        params[1].grad = torch.ones(3)
    layout.attach_gradients()
    layout.zero_gradients()
    assert params[1].grad is not None and not params[1].grad.any()


def test_a_sparse_gradient_stops_attaching_before_anything_is_attached() -> None:
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    other = torch.ones(2, requires_grad=True)
    layout = FlatLayout([other, embedding.weight], ["other", "embedding"])
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="'embedding' is a Tensor with layout torch.sparse_coo"):
        layout.attach_gradients()
    assert other.grad is None
    embedding.weight.grad = None
    layout.attach_gradients()
    embedding(torch.tensor([1])).sum().backward()
    assert layout.gradients_in_place([other.grad, embedding.weight.grad])
    assert layout.gradient_buffers()[0].tolist() == [0, 0, 0, 0, 1, 1, 0, 0]


def swapped(views: list[Tensor]) -> list[Any]:
    return [views[1], views[0]]


def moved(views: list[Tensor]) -> list[Any]:
    views[1].data = views[1].data.clone()
    return list(views)


def turned(views: list[Tensor]) -> list[Any]:
    views[0].t_()
    return list(views)


NOT_IN_PLACE: dict[str, Callable[[list[Tensor]], list[Any]]] = {
    "missing": lambda views: [views[0], None],
    "a copy": lambda views: [views[0].clone(), views[1]],
    "swapped": swapped,
    "moved under its object": moved,
    "turned": turned,
    "half": lambda views: [views[0], views[1].half()],
    "other class": lambda views: [views[0], views[1].as_subclass(Other)],
    "no tensor": lambda views: [views[0], 1.0],
    "meta": lambda views: [views[0], views[1].to("meta")],
}


class Other(Tensor):
    """Tensor subclass with its own torch functions."""


def test_gradients_that_are_not_in_place() -> None:
    for name, change in NOT_IN_PLACE.items():
        with case(name=name):
            params = [torch.ones(2, 2, requires_grad=True) for _ in range(2)]
            layout = flatten(params)
            layout.attach_gradients()
            views = [param.grad for param in params if param.grad is not None]
            assert len(views) == 2 and layout.gradients_in_place(views)
            assert layout.gradients_in_place(change(views)) is False


def test_other_objects_for_the_same_memory_are_in_place() -> None:
    layout = flatten([torch.ones(2, 2), torch.ones(2, dtype=torch.complex64), torch.ones(0)])
    views = gathered(layout)
    grads = [views[0], torch.view_as_complex(views[1]), views[2]]
    assert layout.gradients_in_place(grads)
    assert not layout.gradients_in_place([grads[0], grads[1].conj(), grads[2]])


def test_gather_from_gradients_that_lie_in_the_buffers() -> None:
    params = [torch.ones(2), torch.ones(2), torch.ones(2, 1, 2), torch.ones(())]
    layout = flatten(params)
    views = [view.clone() for view in gathered(layout).values()]
    for i, view in gathered(layout).items():
        view.fill_(i + 1)
    views = list(gathered(layout).values())
    layout.gather(views)
    assert [view.flatten()[0] for view in views] == [1, 2, 3, 4]
    layout.gather([views[1], views[0], torch.full((2, 1, 2), 7.0), views[3]])
    assert layout.gradient_buffers()[0].tolist() == [2, 2, 1, 1, 7, 7, 7, 7, 4]


def test_gather_takes_gradients_that_have_a_graph_and_leaves_it_alone() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    layout = flatten([param])
    (grad,) = torch.autograd.grad((param**3).sum(), param, create_graph=True)
    layout.gather([grad])
    flat = layout.gradient_buffers()[0]
    assert flat.tolist() == [3, 3] and not flat.requires_grad and grad.requires_grad


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "missing": (None, ValueError, "'b' is missing"),
    "no tensor": (1.0, TypeError, "'b' must be a tensor or None, got float"),
    "shape": (torch.ones(1), ValueError, r"'b' has shape \(1,\).*shape \(2,\)"),
    "dtype": (torch.ones(2).double(), ValueError, "'b' has dtype torch.float64"),
    "device": (torch.ones(2, device="meta"), ValueError, "'b' has device meta"),
    "sparse": (torch.ones(2).to_sparse(), ValueError, "'b' is a Tensor with layout torch.sparse"),
    "subclass": (torch.ones(2).as_subclass(Other), ValueError, "'b' is a Other"),
}


def test_gather_refuses_before_it_writes() -> None:
    layout = FlatLayout([torch.ones(2), torch.ones(2)], ["a", "b"])
    layout.gather([torch.full((2,), 5.0)] * 2)
    for name, (grad, kind, text) in REFUSED.items():
        with pytest.raises(kind, match=text):
            layout.gather([torch.ones(2), grad])
        assert layout.gradient_buffers()[0].tolist() == [5, 5, 5, 5], name


def test_another_number_of_gradients_is_refused() -> None:
    layout = flatten([torch.ones(2), torch.ones(2)])
    with pytest.raises(ValueError, match="length 1, but the layout was given 2"):
        layout.gather([torch.ones(2)])
    with pytest.raises(ValueError, match="length 3, but the layout was given 2"):
        layout.gradients_in_place([torch.ones(2)] * 3)


def test_undo_keeps_gradients_as_they_are() -> None:
    params = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
    layout = flatten(params)
    layout.attach_gradients()
    (params[0] * 3).sum().backward()
    kept = [param.grad for param in params]
    layout.undo()
    assert all(param.grad is grad for param, grad in zip(params, kept, strict=True))
    assert [grad.tolist() for grad in kept if grad is not None] == [[3, 3], [0, 0]]


def test_gather_reads_a_gradient_that_lies_among_others_before_it_writes() -> None:
    """A gradient may begin within the view of another parameter, or within its own view."""
    for start in (2, 6, 7, 8):
        layout = FlatLayout([torch.zeros(4) for _ in range(3)], list("abc"))
        (flat,) = layout.gradient_buffers()
        flat.copy_(torch.arange(12.0))
        layout.gather([torch.full((4,), 100.0), torch.full((4,), 200.0), flat[start : start + 4]])
        with case(start=start):
            assert flat[:8].tolist() == [100.0] * 4 + [200.0] * 4
            assert flat[8:].tolist() == [float(start + k) for k in range(4)]
