"""Rows for operators and tensors, which need one process and no process group."""

from typing import Any, ClassVar

import torch
import torch._C._dynamo.guards
import torch._subclasses.fake_tensor
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from .table import row, same

NORMAL = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))


@row((torch, "_foreach_add_"))
def adding_to_each(names: Any) -> None:
    counts = [torch.tensor(3), torch.tensor(4)]
    names.foreach_add_(counts, 1)
    assert counts == [torch.tensor(4), torch.tensor(5)] and counts[0].dtype == torch.int64


@row((torch, "_foreach_mul_"))
def multiplying_each(names: Any) -> None:
    """The factor is not rounded to 16 bits before the product."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        given = [NORMAL.to(dtype, copy=True), NORMAL[0].to(dtype, copy=True)]
        wanted = [one * 0.3 for one in given]
        names.foreach_mul_(given, torch.tensor(0.3, dtype=torch.float64))
        assert all(map(torch.equal, given, wanted)) and given[0].dtype == dtype


@row((torch, "_foreach_div_"))
def dividing_each(names: Any) -> None:
    """Each tensor is divided by its own number."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        given = [NORMAL.to(dtype, copy=True), NORMAL[0].to(dtype, copy=True)]
        wanted = [one / number for one, number in zip(given, (0.3, 7.0), strict=True)]
        names.foreach_divide_(given, [0.3, 7.0])
        assert all(map(torch.equal, given, wanted)) and given[0].dtype == dtype


@row((torch, "_foreach_copy_"))
def copying_to_each(names: Any) -> None:
    targets = [torch.zeros(5, 3).t(), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(0)]
    sources = [NORMAL, torch.tensor([1.0, 1.0 + 2**-9]), torch.zeros(0)]
    seen = [one._version for one in targets]
    names.foreach_copy_(targets, sources)
    assert all(same(one, two.to(one.dtype)) for one, two in zip(targets, sources, strict=True))
    assert all(one._version > two for one, two in zip(targets[:2], seen, strict=False))


@row((torch, "_foreach_clone"))
def clone_of_each(names: Any) -> None:
    given = [NORMAL.t(), torch.tensor(3), torch.zeros(0), torch.ones(4, dtype=torch.bfloat16)]
    found = names.foreach_clone(given)
    assert all(map(same, found, given)) and found[0].stride() == given[0].stride()
    assert all(one.data_ptr() != two.data_ptr() for one, two in zip(found[:2], given, strict=False))


@row(("torch", "_foreach_"))
def doing_to_each(names: Any) -> None:
    given = [NORMAL.abs(), torch.tensor(4.0)]
    found = names.list_function("sqrt")(given)
    assert all(same(one, two.sqrt()) for one, two in zip(found, given, strict=True))
    assert names.list_function("of no such name") is None


@row((torch, "_foreach_norm"))
def norm_of_each(names: Any) -> None:
    found = names.foreach_norm([NORMAL, NORMAL.t()[1:], NORMAL.double()])
    wanted = [NORMAL.norm(), NORMAL.t()[1:].norm(), NORMAL.double().norm()]
    assert all(map(same, found, wanted))
    given = [NORMAL, NORMAL.t()[1:].bfloat16()]
    found = names.foreach_vector_norm(given, dtype=torch.float64)
    wanted = [torch.linalg.vector_norm(one, dtype=torch.float64) for one in given]
    assert all(map(same, found, wanted))


@row((torch, "_amp_foreach_non_finite_check_and_unscale_"))
def unscaling_each(names: Any) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for bad in (torch.inf, -torch.inf, torch.nan, 1.0):
            grads = [NORMAL.to(dtype, copy=True), torch.tensor([bad, 3.0], dtype=dtype)]
            inverse = torch.tensor(1.0 / 3.0)
            wanted = [(one.double() * inverse.double()).to(dtype) for one in grads]
            found, before = torch.zeros(()), torch.ones(())
            names.amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
            assert all(map(same, grads, wanted)) and found.item() == float(bad != 1.0)
            names.amp_foreach_non_finite_check_and_unscale_([torch.ones(2)], before, inverse)
            assert before.item() == 1.0  # an earlier infinity is not cleared


def _fused_alike(kernel: Any, torchs: Any, states: int, kwargs: dict[str, Any]) -> None:
    """Make sure that the first step of a kernel equals that of torch's class."""
    theirs = Parameter(NORMAL.clone())
    theirs.grad = 2 * NORMAL
    torchs([theirs], lr=0.1, fused=True).step()
    param, buffers = NORMAL.clone(), [[torch.zeros_like(NORMAL)] for _ in range(states)]
    kernel([param], [2 * NORMAL], *buffers, lr=0.1, maximize=False, **kwargs)
    assert same(param, theirs.detach()) and not same(param, NORMAL)


_STEP: dict[str, Any] = {"weight_decay": 0.0}
_ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False}


@row((torch, "_fused_sgd_"), refuses=lambda names: names.fused_sgd_())
def fused_sgd(names: Any) -> None:
    flags = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False}

    def kernel(params: Any, grads: Any, **kwargs: Any) -> None:
        names.fused_sgd_(params, grads, [], **kwargs)

    _fused_alike(kernel, torch.optim.SGD, 0, _STEP | flags)


def _with_step(kernel: Any, *more: Any) -> Any:
    step = torch.ones((), dtype=torch.float32)

    def called(params: Any, grads: Any, *states: Any, **kwargs: Any) -> None:
        kernel(params, grads, *states, *more, [step], **kwargs)

    return called


@row((torch, "_fused_adam_"), refuses=lambda names: names.fused_adam_())
def fused_adam(names: Any) -> None:
    _fused_alike(_with_step(names.fused_adam_, []), torch.optim.Adam, 2, _STEP | _ADAM)


@row((torch, "_fused_adamw_"), refuses=lambda names: names.fused_adamw_())
def fused_adamw(names: Any) -> None:
    kwargs = _ADAM | {"weight_decay": 1e-2}
    _fused_alike(_with_step(names.fused_adamw_, []), torch.optim.AdamW, 2, kwargs)


@row((torch, "_fused_adagrad_"), refuses=lambda names: names.fused_adagrad_())
def fused_adagrad(names: Any) -> None:
    kwargs = _STEP | {"lr_decay": 0.0, "eps": 1e-10}
    _fused_alike(_with_step(names.fused_adagrad_), torch.optim.Adagrad, 1, kwargs)


@row((Tensor, "_version"))
def versions(names: Any) -> None:
    tensor = torch.zeros(3)
    seen = {names.version_of(tensor)}
    for write in (tensor.add_, tensor[1:].add_, tensor.detach().add_):
        write(1.0)
        assert names.version_of(tensor) not in seen
        seen.add(names.version_of(tensor))
    torch.autograd.graph.increment_version(tensor)
    assert names.version_of(tensor) not in seen
    if names.has_versions:
        assert names.version_of(tensor) == names.version_of(tensor)


@row((Tensor, "_is_view"), refuses=lambda names: names.is_view(NORMAL))
def views(names: Any) -> None:
    assert names.is_view(NORMAL[1:]) and names.is_view(NORMAL.view(-1))
    assert not names.is_view(NORMAL) and not names.is_view(Parameter(NORMAL))


@row((Tensor, "_is_view"))
def perhaps_views(names: Any) -> None:
    assert names.may_be_view(NORMAL[1:]) and names.may_be_view(NORMAL.view(-1))


@row((torch.UntypedStorage, "_cdata"))
def memories(names: Any) -> None:
    for device in ("cpu", "meta"):
        first, other = torch.empty(3, device=device), torch.empty(3, device=device)
        number = names.storage_id(first.untyped_storage())
        taken = [torch.empty(1).untyped_storage() for _ in range(100)]  # may reuse freed memory
        assert number == names.storage_id(first[1:].untyped_storage())
        assert number not in {names.storage_id(one) for one in (other.untyped_storage(), *taken)}


class Wrapped(Tensor):
    """Tensor subclass that records the functions called on it."""

    called: ClassVar[list[Any]] = []

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.called.append(function)
        return args[0]


@row(
    (Tensor, "_make_wrapper_subclass"),
    refuses=lambda names: names.wrapper_tensor(Wrapped, (2,), dtype=torch.int8, device="cpu"),
)
def wrappers(names: Any) -> None:
    made = names.wrapper_tensor(Wrapped, (2, 3), dtype=torch.int8, device="meta")
    assert type(made) is Wrapped and made.data_ptr() == 0
    assert [made.shape, made.dtype, made.device.type] == [(2, 3), torch.int8, "meta"]


@row(("torch.ops.aten", "_to_copy"))
def copies_to(names: Any) -> None:
    made = names.wrapper_tensor(Wrapped, (2,), dtype=torch.int8, device="cpu")
    made.to(torch.int16)
    assert names.to_copy is Wrapped.called[-1]


SPARSE = torch.sparse_coo_tensor([[2, 0, 2]], [1.0, 2.0, 3.0], (4,), check_invariants=True)


@row((Tensor, "_values"), refuses=lambda names: names.values_of(SPARSE))
def values_of_any(names: Any) -> None:
    assert names.values_of(SPARSE).tolist() == [1.0, 2.0, 3.0]
    names.values_of(SPARSE).add_(0.0)  # the result shares memory with the tensor
    assert names.values_of(SPARSE).data_ptr() == names.values_of(SPARSE.detach()).data_ptr()


@row((Tensor, "_indices"), refuses=lambda names: names.indices_of(SPARSE))
def indices_of_any(names: Any) -> None:
    assert names.indices_of(SPARSE).tolist() == [[2, 0, 2]]


@row((Tensor, "_values"), (Tensor, "_indices"))
def parts_of_coalesced(names: Any) -> None:
    summed = SPARSE.coalesce()
    assert names.values_of(summed).tolist() == [2.0, 4.0]
    assert names.values_of(summed).data_ptr() == summed.values().data_ptr()
    assert names.indices_of(summed).tolist() == [[0, 2]]


class _Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@row((torch._C, "DisableTorchFunction"))
def no_modes(names: Any) -> None:
    with _Counting() as mode, names.DisableTorchFunction():
        assert not NORMAL.is_inference() and NORMAL.data_ptr()
    if names.DisableTorchFunction is getattr(torch._C, "DisableTorchFunction", None):
        assert mode.calls == 0
