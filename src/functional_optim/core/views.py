"""Views of leaves as real, dense tensors for rules, and the conversion of results.

A complex leaf is converted to its real view. If every stage supports sparse gradients, a rule gets
the stored rows of the gradient, and the same rows of the parameter and its state. So algorithms
need no code for complex numbers or sparse rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.leaf import Leaf, Stepped
from functional_optim.core.state import map_state


def real_view(tensor: Tensor) -> Tensor:
    """Return a complex tensor with a last dimension of (real, imaginary), or any other tensor."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def complex_view(tensor: Tensor) -> Tensor:
    """Return the inverse of :func:`real_view` for a tensor that was complex."""
    return torch.view_as_complex(tensor.contiguous())


class Form(NamedTuple):
    """Conversion of a leaf for rules, and of results back to the form of the leaf."""

    enter: Callable[[Leaf], Leaf] = lambda leaf: leaf
    """Return the leaf for rules. If possible, its tensors are views of the original tensors."""
    leave: Callable[[Leaf, Stepped], Stepped] = lambda leaf, stepped: stepped
    """``leave(original, stepped)``: convert the result of a pure step."""
    write: Callable[[Leaf, Leaf], None] = lambda leaf, entered: None
    """``write(original, entered)``: write entered tensors that are not views back, in place."""


def _to_dense_enter(leaf: Leaf) -> Leaf:
    return leaf._replace(grad=leaf.grad.to_dense())


def _complex_enter(leaf: Leaf) -> Leaf:
    return leaf._replace(
        param=real_view(leaf.param),
        grad=real_view(leaf.grad),
        states=tuple(map_state(real_view, state) for state in leaf.states),
    )


def _complex_leave(leaf: Leaf, stepped: Stepped) -> Stepped:
    def back(old: Tensor, new: Tensor) -> Tensor:
        return complex_view(new) if old.is_complex() else new

    states = [map_state(back, o, n) for o, n in zip(leaf.states, stepped.states, strict=True)]
    return Stepped(complex_view(stepped.param), tuple(states))


def _rows_enter(leaf: Leaf) -> Leaf:
    grad = leaf.grad.coalesce()
    rows = tuple(grad.indices())
    states = tuple(
        # A 0-d state of the whole leaf has no rows.
        map_state(lambda t: real_view(t[rows] if t.dim() else t), state)
        for state in leaf.states
    )
    return leaf._replace(
        param=real_view(leaf.param[rows]), grad=real_view(grad.values()), states=states
    )


def _put_rows(leaf: Leaf, param: Tensor, states: Sequence[Any], *, in_place: bool) -> Stepped:
    rows = tuple(leaf.grad.coalesce().indices())

    def put(old: Tensor, new: Tensor) -> Tensor:
        if old.dim() == 0:
            return old.copy_(new) if in_place else new
        values = complex_view(new) if old.is_complex() else new
        return old.index_put_(rows, values) if in_place else old.index_put(rows, values)

    made = [map_state(put, old, new) for old, new in zip(leaf.states, states, strict=True)]
    return Stepped(put(leaf.param, param), tuple(made))


def _rows_leave(leaf: Leaf, stepped: Stepped) -> Stepped:
    return _put_rows(leaf, stepped.param, stepped.states, in_place=False)


def _rows_write(leaf: Leaf, entered: Leaf) -> None:
    with torch.no_grad():
        _put_rows(leaf, entered.param, entered.states, in_place=True)


def _copies_enter(fields: Sequence[tuple[str, ...]], leaf: Leaf) -> Leaf:
    strides = torch.empty_like(leaf.grad).stride()

    def copy(tensor: Tensor) -> Tensor:
        if tensor.shape != leaf.grad.shape or tensor.stride() == strides:
            return tensor
        return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)

    return leaf._replace(
        states=tuple(
            state._replace(**{name: _map_field(copy, getattr(state, name)) for name in names})
            if names
            else state
            for names, state in zip(fields, leaf.states, strict=True)
        )
    )


def _map_field(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    return list(map(function, value)) if isinstance(value, list) else function(value)


def _copies_write(leaf: Leaf, entered: Leaf) -> None:
    def copy_(old: Tensor, new: Tensor) -> Tensor:
        return old if old is new else old.copy_(new)

    for old, new in zip(leaf.states, entered.states, strict=True):
        map_state(copy_, old, new)


DENSE = Form()
TO_DENSE = Form(_to_dense_enter)
COMPLEX = Form(_complex_enter, _complex_leave)
COMPLEX_TO_DENSE = Form(lambda leaf: _complex_enter(_to_dense_enter(leaf)), _complex_leave)
ROWS = Form(_rows_enter, _rows_leave, _rows_write)


def has_other_strides(param: Tensor, grad: Tensor) -> bool:
    """Return True for a 16-bit gradient with other strides, which may change rounding in torch."""
    return param.dtype.itemsize == 2 and grad.stride() != param.stride()


def form_as_gradient(fields: tuple[tuple[str, ...], ...]) -> Form:
    """Return the form that copies the fields of ``Stage.as_gradient`` to the gradient's strides."""
    return Form(partial(_copies_enter, fields), write=_copies_write)


def form_of(param: Tensor, sparse: str) -> Form:
    """Return the form of a leaf; ``sparse`` is "no", "rows" or "dense" (see ``Stage.sparse``)."""
    if sparse == "rows":
        return ROWS
    if sparse == "dense":
        return COMPLEX_TO_DENSE if param.is_complex() else TO_DENSE
    return COMPLEX if param.is_complex() else DENSE
