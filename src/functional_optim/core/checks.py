"""Checks of parameters, gradients and state, before a step changes them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch.derivatives import is_functorch_wrapped_tensor
from functional_optim._torch.tensors import may_be_view
from functional_optim.core.aliasing import has_internal_overlap
from functional_optim.core.dtensors import to_local
from functional_optim.core.format import format_value
from functional_optim.core.leaf import needs_total
from functional_optim.core.overlap import check_no_overlap
from functional_optim.core.stage import Sparse, Stage
from functional_optim.core.state import LeafState, state_tensors
from functional_optim.core.state_init import Field, FieldsOf, check_dtype, fields_of
from functional_optim.core.tree import Path, path_name


def check_params(leaves: Sequence[Any], paths: Sequence[Path]) -> None:
    """Check that leaves are different dense floating or complex tensors, or None, not all None."""
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
    """Check that a parameter is a dense floating or complex tensor."""
    if not isinstance(param, Tensor):
        raise TypeError(
            f"the parameter at {name!r} must be a tensor or None, got {type(param).__name__}"
            f"{_tree_hint(param)}"
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


def _tree_hint(given: Any) -> str:
    """Return how to write a tree of parameters, for a module or an iterator in its place."""
    if isinstance(given, torch.nn.Module):
        return "; give a tree of tensors, such as dict(module.named_parameters())"
    if isinstance(given, Iterator):
        return "; give a list of tensors or a dict, since an iterator can be read only once"
    return ""


def check_step_count(count: Any, key: str, name: str) -> None:
    """Check a step count of a saved state: a whole number >= 0, or None if there is none."""
    if count is None or (isinstance(count, Tensor) and count.is_meta):
        return
    try:
        number = float(count)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if number < 0 or not number.is_integer():
        raise ValueError(
            f"the state of {name!r} has {format_value(count)} as {key!r}; a step count must be a "
            "whole number >= 0, or a tensor of one element with such a number"
        )


def check_count(gradients: Sequence[Any], params: int) -> None:
    """Check that there are as many gradients as parameters."""
    if len(gradients) != params:
        raise ValueError(
            f"got {len(gradients)} gradients for {params} parameters; give one gradient, or None, "
            "for each parameter, in their order"
        )


def check_grad(param: Tensor, grad: Any, name: str) -> None:
    """Check that a gradient has the shape, dtype and device of its parameter."""
    check_fit(param, grad, name)
    if grad.device != param.device:
        raise _misfit("device", grad.device, param.device, name)


def check_fit(param: Tensor, grad: Any, name: str) -> None:
    """Check that a gradient has the shape and dtype of its parameter."""
    if not isinstance(grad, Tensor):
        raise TypeError(
            f"the gradient at {name!r} must be a tensor or None, got {type(grad).__name__}"
        )
    if grad.shape != param.shape:
        raise _misfit("shape", tuple(grad.shape), tuple(param.shape), name)
    if grad.dtype != param.dtype:
        raise _misfit("dtype", grad.dtype, param.dtype, name)


def _misfit(what: str, got: Any, want: Any, name: str) -> ValueError:
    return ValueError(
        f"the gradient at {name!r} has {what} {got}, but its parameter has {what} {want}"
    )


def sparse_form(stages: Sequence[Stage], hypers: Sequence[Any], grad: Tensor, name: str) -> Sparse:
    """Return how all stages handle a sparse gradient, or raise RuntimeError as torch.optim does."""
    forms = [stage.sparse(hyper) for stage, hyper in zip(stages, hypers, strict=True)]
    refusing = [stage.name for stage, form in zip(stages, forms, strict=True) if form == "refuse"]
    if grad.layout != torch.sparse_coo or refusing:
        by = f"{refusing[0]} (as it is set)" if refusing else "any rule"
        raise RuntimeError(
            f"the gradient at {name!r} has layout {grad.layout}, which is not taken by {by}; "
            "give grad.to_dense(), or an optimizer that takes COO gradients (sgd, adagrad, "
            "rowwise_adagrad, ftrl, sparse_adam)"
        )
    if "dense" in forms:
        return "dense"
    whole = [stage.name for stage in stages if stage.kind == "per_matrix"]
    if whole and grad.sparse_dim() != 1:
        raise RuntimeError(
            f"the gradient at {name!r} has {grad.sparse_dim()} sparse dimensions, so that it "
            f"stores parts of rows, and {whole[0]} needs whole rows; give one with a single sparse "
            "dimension, such as nn.Embedding(sparse=True) makes, or grad.to_dense()"
        )
    return "rows"


def check_takes_dense(stages: Sequence[Stage], hypers: Sequence[Any], name: str) -> None:
    """Raise RuntimeError, as torch.optim does, if a stage refuses dense gradients."""
    for stage, hyper in zip(stages, hypers, strict=True):
        if not stage.dense(hyper):
            raise RuntimeError(
                f"the gradient at {name!r} is dense, and {stage.name} takes sparse ones, such as "
                "nn.Embedding(sparse=True) makes: give grad.to_sparse(1), step this parameter by "
                "another optimizer (adam), or set takes_dense=True"
            )


def check_leaf_state(
    stages: Sequence[Stage],
    hypers: Sequence[Any],
    param: Tensor,
    state: Any,
    name: str,
    fields: FieldsOf = fields_of,
) -> None:
    """Raise ValueError if a leaf state does not have the form that these stages need."""
    if not isinstance(state, LeafState):
        raise ValueError(
            f"the state at {name!r} is {type(state).__name__}, not a LeafState: it must come from "
            "this optimizer's init(params) or update"
        )
    kinds = tuple(map(type, state.stages))
    wanted = tuple([stage.state_class for stage in stages])
    if kinds != wanted:
        raise ValueError(
            f"the state at {name!r} is of another optimizer: it holds "
            f"{_kind_names(kinds)}, this one keeps {_kind_names(wanted)}; use init(params)"
        )
    if state.step.dim() != 0 or state.step.is_floating_point():
        raise ValueError(
            f"the step count at {name!r} must be a 0-d tensor of whole numbers, got "
            f"{state.step.dtype} of shape {tuple(state.step.shape)}; for a population use "
            "torch.func.vmap"
        )
    check_dtype(stages, param.dtype, f" at {name!r}")
    expected = fields(stages, hypers, param.shape, param.dtype)
    for stage, own, one in zip(stages, expected, state.stages, strict=True):
        if own:
            _check_stage_state(stage, own, param, one, name)


def _kind_names(kinds: Sequence[Any]) -> str:
    return "(" + ", ".join("nothing" if kind is tuple else kind.__name__ for kind in kinds) + ")"


def _check_stage_state(
    stage: Stage, fields: Sequence[Field], param: Tensor, state: Any, name: str
) -> None:
    # A pointwise rule may also have one number per leaf, or per block of `granularity` elements.
    shapes = {param.shape, torch.Size()}
    if stage.granularity > 1:
        shapes.add(torch.Size((-(-param.numel() // stage.granularity),)))
    device = param.device if stage.state_device is None else torch.device(stage.state_device)
    for field, value in zip(fields, state, strict=True):
        tensors = value if isinstance(value, list) else [value]
        if field.tensors is not None and len(tensors) != field.tensors:
            raise ValueError(
                f"{stage.name}: the state at {name!r} was made with other options: {field.name} "
                f"{'is missing' if field.tensors else 'is there but not used'}; use init(params) "
                "with the hyper-parameters that update is to have"
            )
        for tensor in tensors:
            if stage.kind == "pointwise" and tensor.shape not in shapes:
                raise ValueError(
                    f"{stage.name}: the state at {name!r} is of another tree: {field.name} has "
                    f"shape {tuple(tensor.shape)}, the parameter {tuple(param.shape)}; use "
                    "init(params) of these parameters"
                )
            if tensor.dtype != field.dtype:
                raise ValueError(
                    f"{stage.name}: {field.name} at {name!r} has dtype {tensor.dtype}, for a "
                    f"parameter of {param.dtype} it must be {field.dtype}; convert both, or use "
                    "init(params)"
                )
            if tensor.device != device:
                raise ValueError(
                    f"{stage.name}: {field.name} at {name!r} is on {tensor.device}, the parameter "
                    f"on {param.device}; its state belongs on {device}: move it there"
                )


def check_measured(stages: Sequence[Stage], measured: Sequence[Any], asked: int = 0) -> None:
    """Check that totals have the shapes that the measured stages of a chain need.

    ``measured`` has the totals of the first measured stages; ``asked`` is 1 if the caller needs the
    total of one more stage, else 0.
    """
    summed = [stage for stage in stages if needs_total(stage)]
    names = [stage.name for stage in summed]
    if len(measured) + asked > len(names):
        needed = f"stages that need a total: {', '.join(names)}" if names else "no such stage"
        raise ValueError(
            f"measured must have at most {len(names) - asked} totals"
            f"{' if one more is to be computed' if asked else ''}, got {len(measured)}; the chain "
            f"has {needed}"
        )
    for stage, total in zip(summed, measured, strict=False):
        shape = () if stage.reduce is None else (stage.totals,)
        if not isinstance(total, Tensor) or total.shape != shape:
            wanted = "a 0-d tensor" if shape == () else f"a vector of {stage.totals} sums"
            raise TypeError(
                f"measured takes what measure() returned, summed over the parts; for {stage.name} "
                f"that is {wanted}, got {total!r}"
            )


def check_writable(params: Mapping[str, Tensor]) -> None:
    """Check that parameters can be written in place, without shared memory."""
    for name, param in params.items():
        _check_leaf_of_autograd(param, f"parameter at {name!r}")
        if has_internal_overlap(param):
            raise ValueError(
                f"the parameter at {name!r} has stride 0 or strides so small that its elements "
                f"share memory (shape {tuple(param.shape)}, strides {param.stride()}), so it "
                "cannot be stepped in place; clone() it, or use update"
            )
        if param.is_conj() or param.is_neg():
            raise ValueError(
                f"the parameter at {name!r} is a lazy conjugate (or negative) of other memory and "
                "cannot be stepped in place; resolve_conj() it, or use update"
            )
    check_no_overlap(list(params.values()), lambda: list(params))
    starts: dict[int, str] = {}
    for name, param in params.items():
        if param.numel() == 0 or param.device.type == "meta":
            continue
        start = to_local(param).data_ptr()
        if start == 0:
            continue  # a wrapper of other tensors, or an empty shard, has no memory
        if start in starts:
            raise ValueError(
                f"the parameter at {name!r} shares its memory with {starts[start]!r} and would be "
                "stepped twice; leave None at one of them"
            )
        starts[start] = name


def check_writable_state(states: Mapping[str, LeafState]) -> None:
    """Check that states can be written in place.

    If ``init`` computes state from parameters that require grad, autograd tracks the state. Before
    the first step, such a state is accepted: :func:`detach_states` detaches it.
    """
    for name, state in states.items():
        for tensor in _computed(state):
            if may_be_view(tensor) or not _is_initial(state):
                _check_leaf_of_autograd(
                    tensor, f"state at {name!r}", "make it under torch.no_grad()"
                )


def detach_states(states: Iterable[LeafState]) -> None:
    """Detach, in place, the tensors of states that autograd computed."""
    for state in states:
        for tensor in _computed(state):
            tensor.detach_()


def _computed(state: LeafState) -> list[Tensor]:
    """Return the tensors of a state that are results of autograd."""
    return list(filter(_is_computed, state_tensors(state.stages)))


def _is_initial(state: LeafState) -> bool:
    """Return True if no stage has run since ``init``."""
    counts = [state.step, *(gate.runs for gate in state.gates)]
    return not any(is_functorch_wrapped_tensor(one) or int(one) for one in counts)


def _is_computed(tensor: Tensor) -> bool:
    return tensor.requires_grad and not (tensor.is_leaf or tensor.retains_grad)


def _check_leaf_of_autograd(tensor: Tensor, what: str, way: str = "give the leaf") -> None:
    """Check that a tensor is not a result of autograd, as torch.optim does."""
    if _is_computed(tensor):
        raise ValueError(
            f"the {what} is not a leaf of autograd: it was computed ({tensor.grad_fn}), and a step "
            f"in place would not be part of its graph; {way}, detach() it, or use update"
        )
