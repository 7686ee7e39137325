"""Moving parameters into buffers and back changes their memory, and nothing else."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn import Parameter

from functional_optim.plan.flat.layout import FlatBuffer, FlatLayout

from ..choices import examples
from ..tensors import assert_same, bits
from .support import Drawn, aligns, flatten, make_all, several


def real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@examples(25)
@given(several, aligns)
def test_parameters_are_what_they_were_and_stand_once_in_the_buffers(
    ones: list[Drawn], align: int
) -> None:
    params, before = make_all(ones), make_all(ones)
    classes = [type(param) for param in params]
    layout = flatten(params, ones, align)
    assert layout.apart == tuple(i for i, one in enumerate(ones) if one.stays)
    assert set(layout.reasons) == set(layout.apart)
    for param, old, kind, one in zip(params, before, classes, ones, strict=True):
        assert_same(param, old)
        assert param.stride() == old.stride() and param.requires_grad == one.requires_grad
        assert param.is_leaf and param.grad is None and type(param) is kind
    layout.check()
    groups = {(b.dtype, b.device, b.key) for b in layout.buffers}
    assert len(groups) == len(layout.buffers)
    places = [segment.index for buffer in layout.buffers for segment in buffer.segments]
    assert sorted(places) == [i for i, one in enumerate(ones) if not one.stays]
    for buffer in layout.buffers:
        require_held_once(buffer, params, ones, align)


def require_held_once(
    buffer: FlatBuffer, params: list[Tensor], ones: list[Drawn], align: int
) -> None:
    covered = torch.zeros(buffer.numel, dtype=torch.int64)
    for segment, view in zip(buffer.segments, buffer.views(buffer.data), strict=True):
        param = params[segment.index]
        assert segment.name == f"p{segment.index}" and segment.offset % align == 0
        assert buffer.key == ones[segment.index].key and buffer.dtype == param.dtype.to_real()
        assert view.shape == segment.shape and view.stride() == segment.stride
        assert segment.numel == real(param).numel() and view.data_ptr() == real(param).data_ptr()
        covered[segment.offset : segment.offset + segment.numel] += 1
    assert not (covered > 1).any()
    assert not buffer.data[covered == 0].any()
    assert not buffer.data.requires_grad and buffer.data.dim() == 1


@examples(25)
@given(several, aligns)
def test_writing_goes_both_ways_and_any_flat_tensor_has_such_views(
    ones: list[Drawn], align: int
) -> None:
    params = make_all(ones)
    layout = flatten(params, ones, align)
    twice = [param.detach() * 2 for param in params]
    for buffer in layout.buffers:
        buffer.data.mul_(2)
    for i, (param, expected) in enumerate(zip(params, twice, strict=True)):
        assert i in layout.apart or bool(torch.equal(bits(param), bits(expected)))
    with torch.no_grad():
        for param in params:
            param.fill_(3.0)
    for buffer in layout.buffers:
        flat = torch.arange(buffer.numel + 5)[5:]
        views = zip(buffer.segments, buffer.views(buffer.data), buffer.views(flat), strict=True)
        for segment, view, other in views:
            assert_same(view, real(torch.full_like(params[segment.index], 3.0)))
            assert other.shape == segment.shape and other.stride() == segment.stride
            first = segment.offset + 5
            assert sorted(other.flatten().tolist()) == list(range(first, first + segment.numel))
    layout.check()


@examples(25)
@given(several, aligns)
def test_undo_gives_every_parameter_memory_of_its_own(ones: list[Drawn], align: int) -> None:
    params = make_all(ones)
    before = make_all(ones)
    layout = flatten(params, ones, align)
    buffers = layout.buffers
    layout.undo()
    seen = set[int]()
    for i, (param, old) in enumerate(zip(params, before, strict=True)):
        assert_same(param, old)
        assert param.stride() == old.stride()
        assert param.requires_grad == old.requires_grad and param.is_leaf
        if i not in layout.apart:
            storage = param.untyped_storage()
            assert storage.nbytes() == param.numel() * param.element_size()
            assert param.numel() == 0 or storage.data_ptr() not in seen
            seen.add(storage.data_ptr())
    for buffer in buffers:
        with pytest.raises(RuntimeError, match="undone"):
            _ = buffer.data
        with pytest.raises(RuntimeError, match="undone"):
            buffer.views(torch.zeros(buffer.numel))
    for method in (
        layout.undo,
        layout.check,
        layout.mark_changed,
        layout.gradient_buffers,
        layout.attach_gradients,
        layout.zero_gradients,
    ):
        with pytest.raises(RuntimeError, match="undone"):
            method()
    with pytest.raises(RuntimeError, match="undone"):
        layout.gather(params)
    again = flatten(params, ones, align)
    assert again.apart == layout.apart


def test_undo_leaves_alone_what_has_left_and_keeps_what_was_turned() -> None:
    left, turned = torch.ones(2), torch.arange(6.0).reshape(2, 3)
    layout = FlatLayout([left, turned], ["left", "turned"])
    elsewhere = torch.zeros(2)
    left.data = elsewhere
    turned.t_()
    layout.undo()
    assert left.data_ptr() == elsewhere.data_ptr()
    assert turned.tolist() == [[0, 3], [1, 4], [2, 5]] and turned.stride() == (1, 3)
    assert turned.untyped_storage().nbytes() == 24


def test_views_refuse_what_is_not_such_a_tensor() -> None:
    buffer = FlatLayout([torch.ones(4)], ["a"]).buffers[0]
    for wrong in (torch.ones(3), torch.ones(2, 2), torch.ones(8)[::2], torch.ones(())):
        with pytest.raises(ValueError, match=r"contiguous tensor of shape \(4,\)"):
            buffer.views(wrong)
    with pytest.raises(TypeError, match="list"):
        buffer.views([1.0, 2.0, 3.0, 4.0])


def test_parameters_stand_in_their_order_whatever_their_rows() -> None:
    """A buffer holds parameters in their order, or in the order that the caller gives."""
    shapes = [(2, 5), (2,), (3, 5), (4,), (2, 2)]
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
        params = [torch.full(shape, float(k)) for k, shape in enumerate(shapes)]
        given = None if order == sorted(order) else order
        (buffer,) = FlatLayout(params, [str(k) for k in range(5)], order=given).buffers
        assert [segment.index for segment in buffer.segments] == order
        want = torch.cat([torch.full(shapes[k], float(k)).flatten() for k in order])
        assert torch.equal(buffer.data, want)


def test_strides_that_reach_nothing_are_kept() -> None:
    for dtype in (torch.float32, torch.complex64):
        param = Parameter(torch.ones(3, dtype=dtype).as_strided((1, 3, 1), (100, 1, 7)))
        layout = flatten([torch.ones(1), param, torch.ones(2, 3, 1)])
        assert layout.apart == () and param.stride() == (100, 1, 7)
        layout.gather([torch.ones(1), torch.ones_like(param) * 2, torch.ones(2, 3, 1)])
        assert layout.gradient_buffers()[0].count_nonzero() == 10
        layout.undo()
        assert param.stride() == (100, 1, 7)
        assert param.untyped_storage().nbytes() == 3 * dtype.itemsize


def test_no_parameter_at_all() -> None:
    layout = FlatLayout([], [])
    layout.check()
    layout.attach_gradients()
    layout.gather([])
    assert layout.buffers == () and layout.apart == () and layout.gradient_buffers() == []
    layout.undo()


def test_made_under_any_grad_mode() -> None:
    for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        param = Parameter(torch.ones(3))
        with mode:
            layout = flatten([param])
            grads = layout.gradient_buffers()
        assert not layout.buffers[0].data.is_inference() and not grads[0].is_inference()
        (param * 2).sum().backward()
        with mode:
            layout.gather([param.grad])
        assert grads[0].tolist() == [2, 2, 2]
        with mode:
            layout.undo()
        assert not param.is_inference()
        (param * param).sum().backward()


def test_a_layout_is_neither_copied_nor_pickled() -> None:
    layout = flatten([torch.ones(2)])
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="make a new one"):
            copier(layout)


def test_what_is_shown() -> None:
    layout = flatten([torch.ones(2), torch.ones(4)[::2]])
    assert repr(layout) == (
        "FlatLayout([FlatBuffer(1 parameters in 2 elements of torch.float32 on cpu, key=None)], "
        "1 parameters apart)"
    )
    assert isinstance(layout.buffers[0], FlatBuffer)
