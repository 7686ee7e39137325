"""Rows for transforms, modes, compilers and graphs, which need one process and no process group."""

import importlib.util
import operator
from typing import Any

import pytest
import torch
import torch._subclasses.fake_tensor
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from .single import NORMAL
from .table import row, same

FUNCTORCH: Any = torch._C._functorch


def _in_transforms(look: Any) -> dict[str, Any]:
    """Return the results of ``look`` on a vector in each transform of torch.func."""
    seen: dict[str, Any] = {"none": look(torch.ones(3)), "meta": look(torch.ones(3, device="meta"))}

    def looked(name: str) -> Any:
        def function(x: Tensor) -> Tensor:
            seen[name] = look(x)
            return x.sum()

        return function

    x = torch.ones(3)
    torch.func.grad(looked("grad"))(x)
    torch.func.jvp(looked("jvp"), (x,), (x,))
    torch.func.vmap(looked("vmap"))(torch.ones(2, 3))
    torch.func.grad(lambda y: torch.func.vmap(looked("vmap in grad"))(y).sum())(torch.ones(2, 3))
    return seen


@row(("torch._C", "_functorch"), (FUNCTORCH, "is_functorch_wrapped_tensor"))
def wrapped(names: Any) -> None:
    seen = _in_transforms(names.is_functorch_wrapped_tensor)
    assert seen == {name: name not in {"none", "meta"} for name in seen} and len(seen) == 6


@row((FUNCTORCH, "is_gradtrackingtensor"))
def followed_by_grad(names: Any) -> None:
    seen = _in_transforms(names.is_gradtrackingtensor)
    assert seen == {name: name in {"grad", "jvp"} for name in seen} and len(seen) == 6


@row((FUNCTORCH, "get_unwrapped"))
def unwrapped(names: Any) -> None:
    def look(tensor: Tensor) -> Any:
        if not names.is_functorch_wrapped_tensor(tensor):
            return None
        within = names.get_unwrapped(tensor)
        return list(within.shape), names.is_gradtrackingtensor(within)

    shapes = {"grad": [3], "jvp": [3], "vmap": [2, 3], "vmap in grad": [2, 3]}
    outer = "vmap in grad"
    assert _in_transforms(look) == {"none": None, "meta": None} | {
        name: (shape, name == outer) for name, shape in shapes.items()
    }


@row((FUNCTORCH, "is_batchedtensor"), (FUNCTORCH, "maybe_get_level"))
def batched(names: Any) -> None:
    seen = _in_transforms(names.vmap_levels)
    known = hasattr(FUNCTORCH, "is_batchedtensor")
    assert {name for name, levels in seen.items() if levels} == (
        {"vmap", "vmap in grad"} if known else set()
    )


@row((FUNCTORCH, "maybe_current_level"))
def transforms(names: Any) -> None:
    seen = _in_transforms(lambda _: names.is_transforming())
    outside = {seen.pop(name) for name in ("none", "meta")}
    assert [*seen.values()] == [True] * 4
    assert outside == {not hasattr(FUNCTORCH, "maybe_current_level")}


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@row((torch._C, "_len_torch_dispatch_stack"))
def modes(names: Any) -> None:
    with _Mode():
        assert names.has_dispatch_mode()


@row(("torch._C", "_set_grad_enabled"))
def without_autograd(names: Any) -> None:
    assert (
        names.without_grad(torch.is_grad_enabled) is False
    )  # torch calls this function too, so the row does not hide it
    assert torch.is_grad_enabled()


@row(("forward_ad", "_current_level"))
def tangents(names: Any) -> None:
    assert forward_ad._current_level == -1  # torch reads this, too: only our code does not see it
    assert names.tangent_of(NORMAL) is None
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(NORMAL, 2 * NORMAL)
        assert names.is_forward_mode()
        assert names.tangent_of(NORMAL) is None
        assert same(names.tangent_of(dual), 2 * NORMAL)
    assert names.tangent_of(dual) is None


@row((torch, "_disable_dynamo"))
def not_compiled(names: Any) -> None:
    if hasattr(torch, "_disable_dynamo"):  # the public one imports the compiler in this version
        assert names.disable_dynamo(lambda x: x + 1)(1) == 2
    else:
        assert names.disable_dynamo is torch.compiler.disable


@row((torch._C, "_jit_texpr_fuser_enabled"), (torch._C, "_jit_set_texpr_fuser_enabled"))
def fusing_scripts(names: Any) -> None:
    there = {"_jit_texpr_fuser_enabled", "_jit_set_texpr_fuser_enabled"} <= set(dir(torch._C))
    before = names.set_script_fusion(fuse=False)
    assert names.set_script_fusion(before) is (not there and before)
    assert names.set_script_fusion(before) is before


@row(("a class", "_jit_override_qualname"))
def names_in_script(names: Any) -> None:
    made = type("Twice", (), {names.SCRIPT_QUALNAME: "__torch__.other.Twice"})
    assert torch._jit_internal._qualified_name(made) == "__torch__.other.Twice"
    assert "other" not in torch._jit_internal._qualified_name(type("Twice", (), {}))


@row(("torch", "_dynamo"))
def compilers_module(names: Any) -> None:
    assert importlib.util.find_spec(names.COMPILER) is not None


@row(
    ("torch", "_subclasses"),
    (torch._subclasses.fake_tensor, "FakeTensorMode"),
    refuses=lambda names: names.fake_tensor_mode(),
)
def without_numbers(names: Any) -> None:
    with names.fake_tensor_mode(allow_non_fake_inputs=True) as mode:
        made = torch.empty((), dtype=torch.float64, device="cpu") + 1
        assert mode.from_tensor(NORMAL).shape == NORMAL.shape
        with pytest.raises(Exception, match=r"item|data-dependent|_local_scalar_dense"):
            made.item()


ADD_ = torch.ops.aten.add_.Tensor


@row((ADD_, "_schema"), refuses=lambda names: names.is_mutable(ADD_))
def schemas(names: Any) -> None:
    assert names.is_mutable(ADD_) and names.is_mutable(torch.ops.aten.add.out)
    assert not names.is_mutable(torch.ops.aten.add.Tensor)


@row(("torch", "_ops"), (torch._ops, "HigherOrderOperator"))
def operators_on_functions(names: Any) -> None:
    assert names.is_higher_order(torch.ops.higher_order.cond)
    for other in (ADD_, operator.getitem, torch.sym_max, "output", None):
        assert not names.is_higher_order(other)
