"""The loops in C++ agree with Python about tensors, and copy only tensors that they may copy."""

import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from functional_optim.core.leaf import layouts_of
from functional_optim.native import LOOPS
from functional_optim.plan.flat.buffer import difference
from functional_optim.plan.flat.layout import FlatLayout
from functional_optim.plan.python_loops import PYTHON_LOOPS

from ..choices import case, examples
from .support import MANY, loops

MOVED = "it is in other memory"

pytestmark = pytest.mark.usefixtures("with_loops")


class Own(Tensor):
    """Tensor subclass of a user."""


def flat() -> Tensor:
    return torch.arange(24.0)


def laid_out(tensors: list[Any], writable: int = 0) -> Any:
    """Record layouts, and that the first tensors must be writable and may share memory."""
    count = len(tensors)
    written = [None if k < writable else False for k in range(count)]
    return loops().lay_out(tensors, written, list(range(count)))


def there(layout: Any, tensors: list[Any], at: bytes | None) -> bool:
    """Return True if tensors have a layout, and are at these addresses."""
    return at is not None and loops().locate(layout, tensors) == at


def views(of: Tensor) -> list[Tensor]:
    """Return views of one buffer: a matrix, a transposed one, a scalar, an empty one, a vector."""
    return [of[:6].view(2, 3), of[6:12].view(2, 3).t(), of[12], of[13:13], of[14:20]]


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "moved": lambda one: one.clone(memory_format=torch.preserve_format),
    "turned": lambda one: one.t() if one.dim() == 2 else one[None],
    "shorter": lambda one: one[..., :1] if one.dim() else one.expand(2),
    "expanded": lambda one: one.new_zeros(()).expand(one.shape),
    "dtype": lambda one: one.view(torch.int32),
    "device": lambda one: one.to("meta"),
    "negative": torch._neg_view,
    "sparse": Tensor.to_sparse,
    "subclass": lambda one: one.detach().as_subclass(Own),
    "nothing": lambda _: None,
    "number": lambda _: 1.0,
}


def test_equal_layouts_are_found_as_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change but that of memory is another layout; results of autograd have none."""
    ours, leaf = views(flat()), Parameter(torch.ones(2, 3))
    with torch.inference_mode():
        frozen = torch.ones(2, 3)
    more = [change(one) for change in CHANGES.values() for one in ours[:2]]
    given = [*ours, *more, leaf, leaf * 2, leaf.detach().clone(), frozen, *views(flat())]
    found = loops().layouts(given)
    assert found[-len(ours) :] == found[: len(ours)] == list(range(len(ours)))
    monkeypatch.setattr(type(LOOPS), "get", lambda self, count: None)
    alone = [k for k, one in enumerate(given) if isinstance(one, Tensor) and one.is_neg()]
    kept = [k for k in range(len(given)) if k not in alone]
    python = layouts_of(given)
    assert [found[k] for k in kept] == [python[k] for k in kept]


def test_what_differs_is_seen() -> None:
    ours = views(flat())
    layout = laid_out(ours)
    at = loops().locate(layout, ours)
    for what, place in itertools.product(CHANGES, [0, 1, 2, 4]):
        other: list[Any] = list(ours)
        other[place] = CHANGES[what](ours[place])
        alike = what == "moved" or (what, place) == ("expanded", 2)
        with case(what=what, place=place):
            assert not there(layout, other, at)
            assert loops().hold(layout, other) == alike
            assert there(layout, ours, at)


def test_who_looks_changes_nothing_and_autograd_is_told_when_asked() -> None:
    ours = views(flat())
    layout = laid_out(ours)
    versions = [one._version for one in ours]
    assert loops().hold(layout, ours) and loops().locate(layout, ours)
    assert [one._version for one in ours] == versions
    loops().bump(ours)
    # Views of one tensor share a version.
    assert [one._version for one in ours] == [version + len(ours) for version in versions]
    apart = [torch.zeros(2), torch.zeros(3), torch.zeros(4)]
    loops().bump(apart[:2])
    assert [one._version for one in apart] == [1, 1, 0]


def test_who_requires_grad_does_not_matter() -> None:
    ours = views(flat())
    layout = laid_out(ours)
    params: list[Tensor] = [Parameter(one) for one in ours]
    assert there(layout, params, loops().locate(layout, ours))
    with torch.inference_mode():
        assert loops().hold(layout, views(flat()))


def test_a_result_of_autograd_is_seen_among_tensors_that_must_be_leaves() -> None:
    for place, leaves in itertools.product(range(3), range(4)):
        ours = [torch.zeros(2), torch.zeros(3), torch.zeros(4)]
        layout = laid_out(ours, leaves)
        at = loops().locate(layout, ours)
        assert at is not None
        ours[place].mul_(torch.ones_like(ours[place], requires_grad=True))
        with case(place=place, leaves=leaves):
            assert there(layout, ours, at) == (place >= leaves)
            ours[place].detach_()
            assert there(layout, ours, at)


def test_tensors_that_torch_func_or_fake_mode_wraps_are_not_taken() -> None:
    ours = views(flat())
    layout = laid_out(ours)
    seen: list[bool] = []

    def wrapped(one: Tensor) -> Tensor:
        seen.append(loops().hold(layout, [one, *ours[1:]]))
        assert laid_out([one]) is None
        return one.sum()

    torch.func.grad(wrapped)(ours[0])
    with FakeTensorMode():
        wrapped(torch.zeros(2, 3))
    assert seen == [False, False]


def test_another_number_of_tensors() -> None:
    assert not loops().hold(laid_out(views(flat())), [])
    assert loops().hold(laid_out([]), [])


def test_what_is_no_plain_tensor_is_not_remembered() -> None:
    wrong: list[Any] = [torch.zeros(2).to_sparse(), torch.zeros(2).as_subclass(Own), 3]
    for one in wrong:
        assert laid_out([torch.zeros(1), one]) is None


def test_what_has_no_version_is_an_error() -> None:
    for count in (1, MANY):
        with torch.inference_mode():
            made = list(torch.zeros(count, 1))
        with pytest.raises(TypeError, match="inference mode"):
            loops().bump(made)
        with pytest.raises(TypeError):
            loops().bump([*torch.zeros(count, 1), None])


class Pair(NamedTuple):
    first: Any
    second: Any


def test_a_tree_is_walked_as_python_walks_it() -> None:
    one, two, three = (torch.full((k,), float(k)) for k in (1, 2, 3))
    tree = [(one, None), Pair([two], []), {}.get("nothing"), Pair((), Parameter(three))]
    tensors, form = walked = loops().walk(tree) or ([], [])
    assert [one.shape[0] for one in tensors] == [1, 2, 3]
    python = PYTHON_LOOPS.walk(tree)
    assert python is not None
    assert python[1] == form and all(a is b for a, b in zip(*(walked[0], python[0]), strict=True))
    for other in (1.0, "", {}, torch.zeros(2).as_subclass(Own)):
        assert loops().walk([one, (other,)]) is None
        assert PYTHON_LOOPS.walk([one, (other,)]) is None
    ring: list[Any] = []
    ring.append(ring)
    assert loops().walk(ring) is None


def test_forms_differ_where_trees_do() -> None:
    one = torch.zeros(1)
    trees: list[Any] = [
        [one, one],
        [one, None],
        [[one], one],
        [(one,), one],
        [[one, one]],
        [Pair(one, one)],
        [(one, one)],
        [Pair(one, [one])],
        [Pair([one], one)],
    ]
    forms = [(loops().walk(tree) or ([], []))[1] for tree in trees]
    for place, form in enumerate(forms):
        assert forms.index(form) == place
        assert form == (PYTHON_LOOPS.walk(trees[place]) or ([], []))[1]


def test_pointers_are_given_by_slot() -> None:
    memory = flat()
    ours = [memory[:6].view(2, 3), memory[6:12].view(2, 3).t(), memory[12], memory[13:13]]
    layout = loops().lay_out(ours, [True, False, True, True], [2, 0, -1, 1])
    found = loops().locate(layout, ours)
    assert found is not None
    pointers = [one.data_ptr() for one in ours]
    assert list(memoryview(found).cast("N")) == [pointers[1], 0, pointers[0]]
    assert loops().hold(layout, ours)


def test_what_may_not_be_stepped_by_pointers_is_not_located() -> None:
    memory = torch.zeros(40)
    ours = [memory[:6], memory[6:12], memory[12:18]]
    layout = loops().lay_out(ours, [True, True, False], [0, 1, 2])
    assert loops().locate(layout, ours) is not None
    given = torch.zeros(6, requires_grad=True)
    with torch.inference_mode():
        made = torch.zeros(6)
    read, written = {"grad": given * 2, "inference": made}, {"leaf": given}
    wrong = {
        "read by another": [ours[0], ours[1], memory[11:17]],
        "written twice": [ours[0], memory[5:11], ours[2]],
        "one tensor": [ours[0], ours[0], ours[2]],
        "shape": [ours[0], ours[1], memory[12:17]],
        "number": ours[:2],
        "computed": [ours[0], given * 2, ours[2]],
        "inference": [ours[0], made, ours[2]],
        **{what: [ours[0], CHANGES[what](ours[1]), ours[2]] for what in ("dtype", "negative")},
    }
    for what, tensors in wrong.items():
        for _ in range(2):
            with case(what=what):
                assert loops().locate(layout, tensors) is None
        assert loops().locate(layout, ours) is not None
    for what, one in read.items():
        with case(what=what):
            assert loops().locate(layout, [ours[0], ours[1], one]) is not None
    for what, one in written.items():
        with case(what=what):
            assert loops().locate(layout, [ours[0], one, ours[2]]) is not None


def test_every_slot_of_the_table_is_filled_once() -> None:
    ours = [torch.zeros(2), torch.zeros(2)]
    for slots in ([0, 0], [1, 2], [-1, 1], [0, 2]):
        with case(slots=slots), pytest.raises(ValueError, match="each once"):
            loops().lay_out(ours, [True, False], slots)


def test_memory_that_was_freed_is_not_located() -> None:
    for of in (loops(), PYTHON_LOOPS):
        ours = [torch.zeros(6), torch.zeros(6)]
        layout = of.lay_out(ours, [True, False], [0, 1])
        assert of.locate(layout, ours) is not None
        ours[1].untyped_storage().resize_(0)
        assert of.locate(layout, ours) is None


def test_some_of_a_list_by_their_positions() -> None:
    for of in (loops(), PYTHON_LOOPS):
        every = [torch.tensor([k, k]) for k in (3, 4, 3)]
        assert of.common(every, [0, 2]) == 3 and of.common(every, [0, 1]) is None
        assert of.common([*every, torch.zeros(1)], [0, 3]) is False
        versions = [one._version for one in every]
        of.bump(every, [2])
        assert [one._version for one in every] == [versions[0], versions[1], versions[2] + 1]
        assert of.advance_each(every, [0, 1])
        assert [one.tolist() for one in every] == [[4, 4], [5, 5], [3, 3]]
    for position in (-1, 3):
        with pytest.raises(IndexError):
            loops().bump(every, [position])


def test_entries_of_parameters_in_their_order() -> None:
    params = [torch.zeros(1), torch.zeros(1)]
    state = {params[0]: {"step": 1, "exp_avg": 2}, params[1]: {}}
    assert loops().entries(state, params) == (["step", "exp_avg", None, None], [1, 2])
    assert loops().entries({}, []) == ([], [])
    assert loops().entries(state, params[::-1]) is None, "another order"
    assert loops().entries(state, params[:1]) is None, "more than was asked for"
    assert loops().entries({params[0]: 1, params[1]: {}}, params) is None, "no dict"


def test_a_mask_tells_what_is_missing() -> None:
    for values in ([], [1, torch.zeros(2)]):
        assert loops().mask(values) is None
    assert loops().mask([None, torch.zeros(2), None]) == b"\0\1\0"


@st.composite
def sources(draw: st.DrawFn) -> list[Tensor]:
    """Draw gradients for the views, some of them with another layout, dtype or sign."""
    made = []
    for k, one in enumerate(views(flat())):
        grad = torch.full_like(one, 100.0 + k)
        change = draw(st.sampled_from([None] * 8 + ["turned", "dtype", "expanded", "negative"]))
        made.append(grad if change is None else CHANGES[change](grad))
    return made


def addresses_in(found: bytes | None) -> list[int] | None:
    return None if found is None else memoryview(found).cast("q").tolist()


@examples(25)
@given(grads=sources())
def test_where_they_lie(grads: list[Tensor]) -> None:
    places = views(flat())
    there = loops().lay_out(places, [False] * len(places), list(range(len(places))))
    good = all(
        not grad.is_neg() and difference(grad, place) in {None, MOVED}
        for grad, place in zip(grads, places, strict=True)
    )
    want = [grad.data_ptr() if grad.numel() else 0 for grad in grads] if good else None
    assert addresses_in(loops().locate(there, grads)) == want


def test_sources_in_memory_that_is_written_are_not_located() -> None:
    written = torch.zeros(24)
    grads = views(torch.full((24,), 2.0))
    every = [*grads, written[:2]]
    count = len(grads)
    there = loops().lay_out(every, [False] * count + [True], list(range(count + 1)))
    assert loops().locate(there, every) is not None
    assert loops().locate(there, [*grads[:4], flat()[17:23], written[:2]]) is not None
    assert loops().locate(there, [*grads[:4], written[1:7], written[:2]]) is None
    assert loops().locate(there, every[:4]) is None
    with pytest.raises(ValueError, match="PyCapsule"):
        loops().locate("taken", every)


def test_a_gradient_buffer_that_has_moved_is_not_written_where_it_was() -> None:
    layout = FlatLayout([torch.zeros(3), torch.zeros(5)], ["a", "b"])
    grads = [torch.ones(3), torch.ones(5)]
    [buffer] = layout.gradient_buffers()
    layout.gather(grads)
    old = buffer.clone()
    other = torch.zeros(8)
    buffer.set_(other.untyped_storage(), 0, (8,))  # type: ignore[call-overload]
    layout.gather([2 * grad for grad in grads])
    assert torch.equal(old, torch.ones(8))
    assert not other.any() or torch.equal(other, torch.full((8,), 2.0))


def test_autograd_is_told_of_what_was_gathered() -> None:
    layout = FlatLayout([torch.zeros(3), torch.zeros(5)], ["a", "b"])
    [buffer] = layout.gradient_buffers()
    weight = Parameter(torch.ones(8))
    loss = (weight * buffer).sum()
    layout.gather([torch.ones(3), torch.ones(5)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nobody_elses_module_is_replaced() -> None:
    assert "loops" not in sys.modules
    assert loops().__name__ == "functional_optim.native.loops"  # type: ignore[attr-defined]


def test_no_module_says_that_it_is_from_the_file_that_the_loops_were_loaded_from() -> None:
    """Hypothesis reads the files of all modules, and a descriptor may be a pipe that blocks."""
    assert not hasattr(loops(), "__file__")
    files = [str(getattr(one, "__file__", "")) for one in list(sys.modules.values())]
    assert not [one for one in files if one.startswith(("/proc", "/dev"))]
