"""What is wrong with params, gradients or state: said before anything is changed."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from functional_optim.stage import Sparse, Stage
from functional_optim.state import LeafState
from functional_optim.tree import Path, path_name


def check_params(leaves: Sequence[Any], paths: Sequence[Path]) -> None:
    """Every leaf is a dense floating or complex tensor (or None), each once, and there is one."""
    seen: dict[int, str] = {}
    for leaf, path in zip(leaves, paths, strict=True):
        if leaf is None:
            continue
        name = path_name(path)
        check_param(leaf, name)
        if id(leaf) in seen:
            raise ValueError(
                f"the parameter at {name!r} is also at {seen[id(leaf)]!r}: a parameter is stepped "
                "once, so it has one place in the tree; leave None at the other"
            )
        seen[id(leaf)] = name
    if not seen:
        raise ValueError("the tree of params has no tensor; an optimizer needs at least one")


def check_param(param: Any, name: str) -> None:
    """One parameter that rules can take."""
    if not isinstance(param, Tensor):
        raise TypeError(
            f"the parameter at {name!r} must be a tensor or None, got {type(param).__name__}"
        )
    if param.layout != torch.strided:
        raise ValueError(
            f"the parameter at {name!r} has layout {param.layout}; parameters must be dense "
            "(sparse gradients of dense parameters are fine where the rule takes them)"
        )
    if not (param.is_floating_point() or param.is_complex()):
        raise ValueError(
            f"the parameter at {name!r} has dtype {param.dtype}; it must be floating or complex: "
            "leave None in its place, or keep it out of the tree"
        )


def check_grad(param: Tensor, grad: Any, name: str) -> None:
    """A gradient that belongs to this parameter."""
    if not isinstance(grad, Tensor):
        raise TypeError(
            f"the gradient at {name!r} must be a tensor or None, got {type(grad).__name__}"
        )
    for what, got, want in (
        ("shape", tuple(grad.shape), tuple(param.shape)),
        ("dtype", grad.dtype, param.dtype),
        ("device", grad.device, param.device),
    ):
        if got != want:
            raise ValueError(
                f"the gradient at {name!r} has {what} {got}, but its parameter has {what} {want}"
            )


def sparse_form(stages: Sequence[Stage], hypers: Sequence[Any], grad: Tensor, name: str) -> Sparse:
    """How a sparse gradient is to be taken by all stages, or RuntimeError (torch's type)."""
    forms = [stage.sparse(hyper) for stage, hyper in zip(stages, hypers, strict=True)]
    refusing = [stage.name for stage, form in zip(stages, forms, strict=True) if form == "refuse"]
    if grad.layout != torch.sparse_coo or refusing:
        by = f"{refusing[0]} (as it is set)" if refusing else "any rule"
        raise RuntimeError(
            f"the gradient at {name!r} has layout {grad.layout}, which is not taken by {by}; "
            "give grad.to_dense(), or an optimizer that takes COO gradients (sgd, adagrad)"
        )
    return "dense" if "dense" in forms else "rows"


def check_leaf_state(
    stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor, state: Any, name: str
) -> None:
    """A leaf state made by these stages for a parameter of this shape."""
    if not isinstance(state, LeafState):
        raise ValueError(
            f"the state at {name!r} is {type(state).__name__}, not a LeafState: it must come from "
            "this optimizer's init(params) or update"
        )
    kinds = tuple(type(one) for one in state.stages)
    wanted = tuple(stage.state if stage.stateful else tuple for stage in stages)
    if kinds != wanted:
        raise ValueError(
            f"the state at {name!r} is of another optimizer: it holds "
            f"{_kind_names(kinds)}, this one keeps {_kind_names(wanted)}; use init(params)"
        )
    for stage, hyper, one in zip(stages, hypers, state.stages, strict=True):
        if stage.stateful:
            _check_stage_state(stage, hyper, param, one, name)


def _kind_names(kinds: Sequence[Any]) -> str:
    return "(" + ", ".join("nothing" if kind is tuple else kind.__name__ for kind in kinds) + ")"


def _check_stage_state(stage: Stage, hyper: Any, param: Tensor, state: Any, name: str) -> None:
    expected = _optional_fields(stage, hyper, param.dim())
    for field, value, count in zip(state._fields, state, expected, strict=True):
        tensors = value if isinstance(value, list) else [value]
        if count is not None and len(tensors) != count:
            raise ValueError(
                f"{stage.name}: the state at {name!r} was made with other options: {field} "
                f"{'is missing' if count else 'is there but not used'}; use init(params) with the "
                "hyper-parameters that update is to have"
            )
        for tensor in tensors:
            if stage.kind == "pointwise" and tensor.shape != param.shape:
                raise ValueError(
                    f"{stage.name}: the state at {name!r} is of another tree: {field} has shape "
                    f"{tuple(tensor.shape)}, the parameter {tuple(param.shape)}"
                )
            if tensor.device != param.device:
                raise ValueError(
                    f"{stage.name}: {field} at {name!r} is on {tensor.device}, the parameter on "
                    f"{param.device}; move the state with the parameters"
                )


@lru_cache(maxsize=256)
def _optional_fields(stage: Stage, hyper: Any, dims: int) -> tuple[int | None, ...]:
    """For each field how many tensors an option puts into it; None for a field always there."""
    probe = stage.init(torch.empty((0,) * dims), hyper)
    return tuple(len(value) if isinstance(value, list) else None for value in probe)


def check_writable(param: Tensor, name: str) -> None:
    """A parameter that can be written in place, element by element."""
    if any(
        size > 1 and stride == 0 for size, stride in zip(param.shape, param.stride(), strict=True)
    ):
        raise ValueError(
            f"the parameter at {name!r} has stride 0 (it was expanded), so its elements share "
            "memory and cannot be stepped in place; clone() it, or use update"
        )
