"""Tensors as numbers, which give the results of numbers in 16 bits and under cancellation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from functional_optim import numeric
from tests.choices import case, each_value

CALLS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "add": (numeric.add, 2),
    "mul": (numeric.mul, 1),
    "div": (numeric.div, 1),
    "shift": (numeric.shift, 1),
    "lerp": (numeric.lerp, 2),
    "addcmul": (numeric.addcmul, 3),
    "addcdiv": (numeric.addcdiv, 3),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def drawn(seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(200, generator=generator, dtype=torch.float64) + 0.5).to(dtype)


def in_tensor(value: float) -> Any:
    return torch.tensor(value, dtype=torch.float64)


@each_value(name=list(CALLS), dtype=DTYPES, value=[0.999, 0.001, 1.0])
def test_a_tensor_stands_for_its_number(name: str, dtype: torch.dtype, value: float) -> None:
    """In 16 bits, results are rounded as in torch, whose kernels use 32-bit scalars."""
    function, count = CALLS[name]
    given = [drawn(seed, dtype) for seed in range(count)]
    want, got = function(*given, value), function(*given, in_tensor(value))
    ulps = (got.double() - want.double()).abs() / want.double().abs()
    assert got.dtype == dtype
    assert float(ulps.max()) <= 2.0 * torch.finfo(dtype).eps
    if name in ("mul", "div", "shift") and dtype.itemsize == 2:
        assert torch.equal(got, want)


@each_value(name=["add", "addcmul", "addcdiv"])
def test_tensors_of_several_dtypes_are_promoted_as_by_torch(name: str) -> None:
    """A float32 compensation keeps its digits beside a bfloat16 parameter."""
    function, count = CALLS[name]
    for place in range(count):
        given = [drawn(seed, torch.float32) for seed in range(count)]
        given[place] = given[place].to(torch.bfloat16)
        want, got = function(*given, 0.3), function(*given, in_tensor(0.3))
        with case(place=place):
            assert got.dtype == want.dtype == torch.float32
            assert torch.allclose(got, want, rtol=1e-6)


@each_value(dtype=[torch.bfloat16, torch.float16])
def test_a_product_of_matrices_in_16_bits_is_rounded_once(dtype: torch.dtype) -> None:
    x, a, b = (drawn(seed, dtype).reshape(10, 20) for seed in range(3))
    for given in ((x[:, :10], a, b.t()), (x[None, :, :10], a[None], b.t()[None])):
        want = numeric.addmm(*given, 3.4445, -4.775)
        got = numeric.addmm(*given, in_tensor(3.4445), in_tensor(-4.775))
        ulps = (got.double() - want.double()).abs() / want.double().abs()
        assert got.dtype == dtype and float(ulps.max()) <= torch.finfo(dtype).eps


def test_nothing_overflows_that_torch_keeps() -> None:
    for function, operands in ((numeric.addcmul, (3e19, 3e19)), (numeric.addcdiv, (3e19, 1e-19))):
        given = [torch.zeros(3), *(torch.full((3,), one) for one in operands)]
        got = function(*given, in_tensor(1e-3))
        assert torch.allclose(got, function(*given, 1e-3), rtol=1e-6)
        assert bool(got.isfinite().all())


def test_interpolation_begins_at_the_nearer_end() -> None:
    """Interpolation from the farther end would lose a number that is much smaller."""
    start, end = torch.tensor([1.0]), torch.tensor([1e-9])
    for weight in (1.0, 0.7):
        got = numeric.lerp(start, end, in_tensor(weight))
        assert torch.equal(got, torch.lerp(start, end, weight))


class Watch(TorchDispatchMode):
    """Mode that records the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
        self.seen.append(function._schema.name)
        return function(*args, **(kw or {}))


@each_value(
    call={
        "clamp": lambda x, n: numeric.clamp(x, -0.1, n),
        "at_first_step": lambda x, n: numeric.at_first_step(n, 0.0, 0.9),
        "select": lambda x, n: numeric.select(x, x > 0, n),
        "fill_like": numeric.fill_like,
    }
)
def test_no_number_is_brought_to_the_device_or_back(call: Callable[[Tensor, Any], Any]) -> None:
    """Either transfer would make the capture of a CUDA graph fail."""
    with FakeTensorMode():
        x, number = torch.empty(3), torch.empty((), dtype=torch.float64)
        with Watch() as watch:
            call(x, number)
    assert watch.seen
    assert not {"aten::lift_fresh", "aten::_local_scalar_dense"} & set(watch.seen)
