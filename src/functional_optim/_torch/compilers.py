"""Private names of torch for tracing and compiling."""

from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from functional_optim._torch.missing_name import MissingName, get_private, import_private


def has_dispatch_mode() -> bool:
    """Return True if a mode such as make_fx records operations: it would not record C++ loops.

    If torch does not give the number of active modes, the result is True.
    """
    count = getattr(torch._C, "_len_torch_dispatch_stack", None)
    return count is None or bool(count() > 0)


disable_dynamo: Callable[..., Any] = getattr(torch, "_disable_dynamo", torch.compiler.disable)
"""``torch.compiler.disable`` that imports the compiler at the first call from compiled code, not at
once. Without the private function: the public one."""

COMPILER = "torch._dynamo"
"""The compiler's module, which is slow to import: a process that forks others imports it first.
A forkserver ignores a module that does not exist."""


def set_script_fusion(fuse: bool) -> bool:
    """Switch TorchScript's fusion on accelerators on or off, and return the previous setting.

    The setting holds for the whole process, and for later optimizations. Without the private
    functions nothing changes, and fused operations may round differently.
    """
    get = getattr(torch._C, "_jit_texpr_fuser_enabled", None)
    set_ = getattr(torch._C, "_jit_set_texpr_fuser_enabled", None)
    if get is None or set_ is None:
        return fuse
    before = bool(get())
    set_(fuse)
    return before


SCRIPT_QUALNAME = "_jit_override_qualname"
"""Attribute of a class that TorchScript uses as its qualified name. Without it, TorchScript refuses
a second class of one name, as when a notebook's cell runs twice."""


def fake_tensor_mode(**options: Any) -> Any:
    """Return a mode in which functions run on tensors without values, so that none can be read."""
    without = MissingName(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "a function cannot be tried on tensors without numbers",
        "give numbers in place of schedules, and do not capture or export steps",
    )
    return import_private("torch._subclasses.fake_tensor", "FakeTensorMode", without)(**options)


def is_mutable(operator: Any) -> bool:
    """Return True if an operator of ``torch.ops`` writes to an argument, by its schema."""
    without = MissingName(
        "torch._ops.OpOverload._schema",
        "it cannot be told which numbers an exported step makes nothing of",
        "step in Python",
    )
    return bool(get_private(operator, "_schema", without).is_mutable)


def is_higher_order(target: Any) -> bool:
    """Return True for a higher-order operator, such as a loop, in a graph of torch.export.

    Without the class, any callable that is not a function or an operator of ``torch.ops`` counts.
    """
    higher_order = getattr(getattr(torch, "_ops", None), "HigherOrderOperator", None)
    if higher_order is not None:
        return isinstance(target, higher_order)
    plain = (FunctionType, BuiltinFunctionType, type(torch.ops.aten.add.Tensor))
    return callable(target) and not isinstance(target, plain)
