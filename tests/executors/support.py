"""What the tests of the executors share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from functional_optim import Optimizer
from functional_optim.executors import EXECUTORS, LaneExecutor
from functional_optim.executors.leaf import Leaf
from functional_optim.executors.reference import ReferenceExecutor
from functional_optim.stage import Stage

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

SHAPES: dict[str, tuple[int, ...]] = {"w": (3, 4), "b": (7,), "s": (), "e": (0, 2)}
LARGE = 70_001
"""Elements of a leaf that is a lane of its own."""

Tree = dict[str, Tensor]


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same for the same seed and shape in every dtype (up to rounding)."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


def tensors(*trees: Any) -> list[Tensor]:
    """Every tensor in some trees."""
    return [leaf for leaf in optree.tree_leaves(trees) if isinstance(leaf, Tensor)]


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns of a tensor, as integers: -0.0 is not 0.0, and NaN equals itself."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape, one dtype, and the same bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def assert_same(got: Any, want: Any) -> None:
    """Two trees of one structure whose tensors are the same bit for bit."""
    paths, left, spec = optree.tree_flatten_with_path(got, none_is_leaf=True)
    right, other = optree.tree_flatten(want, none_is_leaf=True)
    assert spec == other
    for path, a, b in zip(paths, left, right, strict=True):
        assert a is b or same_bits(a, b), f"{path}: {a} is not {b}"


def differ(a: Any, b: Any) -> bool:
    """Whether two trees differ anywhere; guards a comparison that could not fail."""
    return not all(map(same_bits, tensors(a), tensors(b)))


def tree(seed: int, dtype: torch.dtype = torch.float32, *, large: bool = True) -> Tree:
    """A tree of small leaves and, where asked for, one that is no longer packed."""
    made = {
        key: noise(seed + 7 * k, *shape, dtype=dtype)
        for k, (key, shape) in enumerate(SHAPES.items())
    }
    return {**made, "z": noise(seed + 5, LARGE, dtype=dtype)} if large else made


def gradients(
    step: int, dtype: torch.dtype = torch.float32, *, large: bool = True
) -> dict[str, Any]:
    """Gradients of a step; one is missing at the second."""
    grads: dict[str, Any] = tree(100 * (step + 1), dtype, large=large)
    if step == 1:
        grads["b"] = None
    return grads


def pure_steps(
    optimizer: Optimizer, params: Any, grads: Callable[[int], Any], count: int = 3
) -> Any:
    """Params and state after some pure steps."""
    state = optimizer.init(params)
    for step in range(count):
        params, state = optimizer.update(params, grads(step), state)
    return params, state


def steps_in_place(
    optimizer: Optimizer, params: Any, grads: Callable[[int], Any], count: int = 3
) -> Any:
    """The same in place."""
    state = optimizer.init(params)
    for step in range(count):
        optimizer.update_(params, grads(step), state)
    return params, state


def bound_steps(
    optimizer: Optimizer, params: Any, grads: Callable[[int], Any], count: int = 3
) -> Any:
    """The same by a bound optimizer."""
    bound = optimizer.bind(params)
    for step in range(count):
        bound.step(grads(step))
    return bound.params, bound.state


def copied(trees: Any) -> Any:
    """The same trees with tensors of their own."""
    return optree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, trees)


class _Calls(TorchDispatchMode):
    """Counts results that lie in memory which no argument had."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tensors(args, kwargs or {})}
        made = function(*args, **(kwargs or {}))
        for tensor in tensors(made):
            if tensor.numel() > 1 and tensor.untyped_storage().data_ptr() not in given:
                self.new.append(str(function))
        return made


@contextmanager
def new_tensors() -> Iterator[list[str]]:
    """The operations that allocate a result of more than one element, as they are called."""
    calls = _Calls()
    with calls:
        yield calls.new


@contextmanager
def no_reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail where a step falls back to the reference executor."""

    def refuse(self: Any, *_: Any) -> None:
        raise AssertionError("a step went to the reference executor")

    with monkeypatch.context() as patch:
        patch.setattr(ReferenceExecutor, "update", refuse)
        patch.setattr(ReferenceExecutor, "update_", refuse)
        yield


def lane_executor(name: str) -> LaneExecutor:
    """An executor that runs kernels over lanes."""
    found = EXECUTORS[name]
    assert isinstance(found, LaneExecutor)
    return found


def why_not(name: str, optimizer: Optimizer, param: Tensor) -> str:
    """What an executor says of a leaf."""
    stages: tuple[Stage, ...] = optimizer.stages
    state = optimizer.init(param).leaves
    hypers = tuple(link.hyper for link in optimizer.links)
    coefficients = tuple(s.coefficients(1.0, h) for s, h in zip(stages, hypers, strict=True))
    lane = Leaf(param, torch.ones_like(param), state.stages, coefficients, "w", hypers, 1.0)
    return lane_executor(name).explain(stages, lane)
