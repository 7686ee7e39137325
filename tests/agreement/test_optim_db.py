"""Every configuration in PyTorch's own list of optimizers: equal in every bit."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_optim import Optimizer, TorchOptimizer, as_functional_optim, functional_optim_map

from ..choices import EVERYTHING, case, has_turn
from ..core.support import same_bits
from .optim_db import Configuration, configurations

CONFIGURATIONS = configurations()
LISTED = sorted({one.cls.__name__ for one in CONFIGURATIONS.values()})
STEPS = 8
"""Number of steps, of which RAdam's first five are steps of momentum."""

KINDS = ("some are missing", "none is missing", "other strides", "zeros now and then")
"""Kinds of gradients."""

Params = Sequence[Tensor]
Grads = Sequence[list[Tensor | None]]


def adds_complex_numbers(one: Configuration) -> bool:
    """Return True if torch multiplies complex numbers in this configuration.

    Elsewhere, torch uses the real view of complex numbers. The complex product rounds differently
    from the real view. It occurs in SGD, in RMSprop with momentum, in the step of Adadelta, and in
    each decay that is added to the gradient. NAdam, RAdam and ASGD use the real view before that
    decay. Rprop with maximize negates a complex 0 to 0, and a real 0 to -0. In all these cases, we
    match torch's class on the real view.
    """
    if one.cls in (torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD):
        return False
    decouples = one.cls is torch.optim.AdamW or "decoupled_weight_decay" in one.options
    return (
        one.cls is torch.optim.SGD
        or (one.cls is torch.optim.RMSprop and "momentum" in one.options)
        or (one.cls is torch.optim.Adadelta and "lr" in one.options)
        or (one.cls is torch.optim.Rprop and "maximize" in one.options)
        or ("weight_decay" in one.options and not decouples)
    )


MISSING = ((0, 1), (4, 0))
"""Pairs of a step and a parameter without a gradient."""


def shapes(one: Configuration) -> list[tuple[int, ...]]:
    if one.cls is torch.optim.Muon:
        return [(10, 5), (3, 4)]
    return [(10, 5), (6,)] if one.takes_sparse_only else [(10, 5), (10,), ()]


def values(
    one: Configuration, dtype: torch.dtype, kind: str = KINDS[0]
) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """Return parameters, and the gradients of each step."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype)

    def gradient(shape: tuple[int, ...], step: int) -> Tensor:
        if not one.takes_sparse_only:
            made = drawn(shape)
            if kind == "other strides" and len(shape) == 2:
                return made.t().contiguous().t()
            return (
                torch.zeros_like(made) if kind == "zeros now and then" and step % 3 == 1 else made
            )
        rows = torch.randint(0, shape[0], (1, 4), generator=generator)  # some rows twice
        stored = drawn((4, *shape[1:]))
        return torch.sparse_coo_tensor(rows, stored, shape, check_invariants=True)

    params = [drawn(shape) for shape in shapes(one)]
    grads = [
        [
            None if (step, place) in MISSING and kind == KINDS[0] else gradient(shape, step)
            for place, shape in enumerate(shapes(one))
        ]
        for step in range(STEPS)
    ]
    return params, grads


def stepped(
    build: Callable[[list[nn.Parameter]], torch.optim.Optimizer], params: Params, grads: Grads
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return each parameter and its state after several steps."""
    leaves = [nn.Parameter(param.clone()) for param in params]
    optimizer = build(leaves)
    for row in grads:
        for leaf, grad in zip(leaves, row, strict=True):
            leaf.grad = None if grad is None else grad.clone()
        optimizer.step()
    return [(leaf.detach(), dict(optimizer.state[leaf])) for leaf in leaves]


def updated(optimizer: Optimizer, params: Params, grads: Grads) -> list[Tensor]:
    """Return the parameters after pure updates."""
    tree, state = list(params), optimizer.init(list(params))
    for row in grads:
        tree, state = optimizer.update(tree, row, state)
    return tree


def on_real_view(tensors: Sequence[Any]) -> list[Any]:
    return [None if one is None else torch.view_as_real(one) for one in tensors]


def assert_same(ours: Any, theirs: Any, *, on_view: bool) -> None:
    """Make sure that parameters and state are equal.

    If torch ran on the real view, our complex tensors are compared by their real view.
    """
    for (param, state), (wanted, entries) in zip(ours, theirs, strict=True):
        assert same_bits(torch.view_as_real(param) if on_view else param, wanted)
        assert int(state.get("step", 0)) == int(entries.get("step", state.get("step", 0)))
        for key, value in entries.items():
            if key != "step" and value is not None:
                found = state[key]
                is_seen = on_view and found.is_complex()
                with case(entry=key):
                    assert same_bits(torch.view_as_real(found) if is_seen else found, value)


def runs(one: Configuration) -> list[tuple[torch.dtype, str]]:
    """Return all dtypes and kinds of gradients that a configuration has.

    For 16-bit dtypes, torch's kernels round differently for other strides, so that kind is left
    out.
    """
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    dtypes += [torch.complex64] if one.takes_complex else []
    pairs = product(dtypes, KINDS[:1] if one.takes_sparse_only else KINDS)
    return [pair for pair in pairs if pair != (torch.bfloat16, "other strides")]


def chosen(one: Configuration, turn: int) -> list[tuple[torch.dtype, str]]:
    """Return the dtypes and kinds of gradients to run a configuration with."""
    every = runs(one)
    dtypes = list(dict.fromkeys(dtype for dtype, _ in every))
    if one.takes_sparse_only:
        return every
    return [
        (dtype, kind)
        for dtype, kind in every
        if has_turn(len(KINDS), dtypes.index(dtype), KINDS.index(kind), turn)
    ]


def test_there_are_as_many_runs_as_torch_has() -> None:
    """There are at least 1,036 runs, as in PyTorch's suite, over four dtypes and four kinds."""
    assert sum(len(runs(one)) for one in CONFIGURATIONS.values()) >= 1036


def test_the_list_has_every_class_that_has_an_equivalent() -> None:
    """The list has all classes with an equivalent here.

    A failure means that torch has changed its list, or that the registry has other classes.
    """
    classes = [key for key in functional_optim_map if isinstance(key, type)]
    known = {one.__name__ for one in classes if one.__module__.startswith("torch.optim")}
    assert set(LISTED) == known - {"LBFGS"}  # a step of LBFGS needs a closure


@pytest.mark.parametrize("cls", LISTED)
def test_every_configuration_is_torchs(cls: str) -> None:
    """Every configuration equals torch's class in place, and every fourth run by pure updates.

    Each dtype of a configuration has one kind of gradients, by turns. If everything is tested,
    each dtype has every kind.
    """
    for turn, (name, one) in enumerate(CONFIGURATIONS.items()):
        if one.cls.__name__ != cls:
            continue
        optimizer = as_functional_optim(one.cls, **one.options)
        for number, (dtype, kind) in enumerate(chosen(one, turn)):
            on_view = dtype.is_complex and adds_complex_numbers(one)
            params, grads = values(one, dtype, kind)
            ours = stepped(partial(TorchOptimizer, optimizer=optimizer), params, grads)
            is_pure = EVERYTHING or (number + turn) % 4 == 0
            pure = updated(optimizer, params, grads) if is_pure else None
            if on_view:
                params, grads = on_real_view(params), list(map(on_real_view, grads))
            theirs = stepped(one.build, params, grads)
            with case(name=name, dtype=dtype, kind=kind):
                assert_same(ours, theirs, on_view=on_view)
                if pure is not None:
                    assert all(same_bits(a, b) for a, (b, _) in zip(pure, ours, strict=True))


def test_adafactor_bounds_an_estimate_by_the_square_of_eps() -> None:
    """The estimates of these gradients are between the square of ``eps[0]`` and ``eps[0]``."""
    ends = []
    for ours in (False, True):
        draws = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=draws)) for shape in ((5, 3), (4,))]
        options: dict[str, Any] = {"lr": 0.1, "eps": (1e-5, 1e-3)}
        optimizer: Any = torch.optim.Adafactor(params, **options, foreach=False)
        if ours:
            made = as_functional_optim(torch.optim.Adafactor, **options)
            optimizer = TorchOptimizer(params, made)
        for _ in range(3):
            for param in params:
                param.grad = 1e-4 * torch.randn(param.shape, generator=draws)
            optimizer.step()
        ends.append(params)
    assert all(map(same_bits, *ends))


def test_torch_contradicts_itself_where_it_adds_complex_numbers() -> None:
    """Each class that multiplies complex numbers differs from itself on the real view.

    The difference shows for at least one configuration and one kind of gradients.
    """
    adding = [one for one in CONFIGURATIONS.values() if one.takes_complex]
    adding = list(filter(adds_complex_numbers, adding))
    differing = set()
    for one, kind in product(adding, KINDS):
        params, grads = values(one, torch.complex64, kind)
        found = stepped(one.build, params, grads)
        viewed = stepped(one.build, on_real_view(params), list(map(on_real_view, grads)))
        try:
            assert_same(found, viewed, on_view=True)
        except AssertionError:
            differing.add(one.cls)
    assert differing == {one.cls for one in adding}
