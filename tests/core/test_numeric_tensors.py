"""Numbers that stand in tensors do what numbers do: in 16 bits too, and where terms cancel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import numeric


def drawn(seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(200, generator=generator, dtype=torch.float64) + 0.5).to(dtype)


CALLS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "add": (numeric.add, 2),
    "mul": (numeric.mul, 1),
    "div": (numeric.div, 1),
    "shift": (numeric.shift, 1),
    "lerp": (numeric.lerp, 2),
    "addcmul": (numeric.addcmul, 3),
    "addcdiv": (numeric.addcdiv, 3),
}


@pytest.mark.parametrize("value", [0.999, 0.001, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_stands_for_its_number(name: str, dtype: torch.dtype, value: float) -> None:
    function, count = CALLS[name]
    given = [drawn(seed, dtype) for seed in range(count)]
    want = function(*given, value)
    got = function(*given, torch.tensor(value, dtype=torch.float64))
    assert got.dtype == dtype
    ulps = (got.double() - want.double()).abs() / want.double().abs() / torch.finfo(dtype).eps
    assert float(ulps.max()) <= 2.0


@pytest.mark.parametrize("value", [0.999, 0.001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [numeric.mul, numeric.div, numeric.shift])
def test_a_number_is_rounded_to_16_bits_where_torch_does(
    function: Any, dtype: torch.dtype, value: float
) -> None:
    """Its kernels multiply and divide by scalars of 32 bits, and add those of 16."""
    x = drawn(0, dtype)
    assert torch.equal(function(x, torch.tensor(value, dtype=torch.float64)), function(x, value))


@pytest.mark.parametrize("name", ["add", "addcmul", "addcdiv"])
def test_tensors_of_several_dtypes_are_promoted_as_by_torch(name: str) -> None:
    """A compensation in float32 is not lost to a parameter in bfloat16."""
    function, count = CALLS[name]
    given = [drawn(seed, torch.float32) for seed in range(count)]
    given[0] = given[0].to(torch.bfloat16)
    want = function(*given, 0.3)
    got = function(*given, torch.tensor(0.3, dtype=torch.float64))
    assert got.dtype == want.dtype == torch.float32
    assert torch.allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("function", "operands"), [(numeric.addcmul, (3e19, 3e19)), (numeric.addcdiv, (3e19, 1e-19))]
)
def test_nothing_overflows_that_torch_keeps(function: Any, operands: tuple[float, float]) -> None:
    given = [torch.zeros(3), *(torch.full((3,), one) for one in operands)]
    got = function(*given, torch.tensor(1e-3, dtype=torch.float64))
    assert torch.allclose(got, function(*given, 1e-3), rtol=1e-6)
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("weight", [1.0, 0.7])
def test_interpolation_begins_at_the_nearer_end(weight: float) -> None:
    """From the other end, what is small beside it would be lost."""
    start, end = torch.tensor([1.0]), torch.tensor([1e-9])
    got = numeric.lerp(start, end, torch.tensor(weight, dtype=torch.float64))  # type: ignore[arg-type]  # a number
    assert torch.equal(got, torch.lerp(start, end, weight))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, n: numeric.clamp(x, -0.1, n),
        lambda x, n: numeric.at_first_step(n, 0.0, 0.9),
        lambda x, n: numeric.select(x, x > 0, n),
        numeric.fill_like,
    ],
)
def test_no_number_is_brought_to_the_device_or_back(call: Any) -> None:
    """Either would make a CUDA graph's capture fail."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kw: Any = None
        ) -> Any:
            seen.append(function._schema.name)
            return function(*args, **(kw or {}))

    with FakeTensorMode():
        x, number = torch.empty(3), torch.empty((), dtype=torch.float64)
        with Watch():
            call(x, number)
    assert not {"aten::lift_fresh", "aten::_local_scalar_dense"} & set(seen), seen
