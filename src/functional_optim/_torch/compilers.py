"""Torch's names for tracing and compiling a step. Slow imports are made when they are used."""

from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from functional_optim._torch.missing import Missing, held, imported


def has_dispatch_mode() -> bool:
    """Return True if each operation is recorded, as by make_fx: a loop in C++ is not seen by it.

    torch counts the modes that are active. Without that number, there may be one.
    """
    count = getattr(torch._C, "_len_torch_dispatch_stack", None)
    return count is None or bool(count() > 0)


disable_dynamo: Callable[..., Any] = getattr(torch, "_disable_dynamo", torch.compiler.disable)
"""``torch.compiler.disable`` that imports the compiler at the first call from compiled code, and
not at once. Without it: the public one."""

COMPILER = "torch._dynamo"
"""The compiler's module, which is slow to import: a process that forks others imports it first.
Without it: a forkserver leaves out of what it is to import what is not there."""


def let_script_fuse(fuse: bool) -> bool:
    """Have TorchScript fuse operations on accelerators, or not; whether it did before.

    Of the whole process, and of what it optimises from then on. Without the switch nothing changes:
    what is fused there rounds otherwise.
    """
    ask = getattr(torch._C, "_jit_texpr_fuser_enabled", None)
    tell = getattr(torch._C, "_jit_set_texpr_fuser_enabled", None)
    if ask is None or tell is None:
        return fuse
    before = bool(ask())
    tell(fuse)
    return before


SCRIPT_QUALNAME = "_jit_override_qualname"
"""The attribute of a class by which TorchScript knows it, in place of its qualified name. Without
it: TorchScript refuses a second class of one name itself, as where a notebook's cell ran twice."""


def fake_tensor_mode(**options: Any) -> Any:
    """A mode in which functions run on tensors that hold no number, so that none can be looked at.

    Raises:
        ImportError: torch has none.
    """
    without = Missing(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "a function cannot be tried on tensors without numbers",
        "give numbers in place of schedules, and do not capture or export steps",
    )
    return imported("torch._subclasses.fake_tensor", "FakeTensorMode", without)(**options)


def aoti_compile_and_package(program: Any, **options: Any) -> None:
    """Torch's compiler of what torch.export traced, to a package of machine code.

    Raises:
        ImportError: torch has none.
    """
    without = Missing(
        "torch._inductor.aoti_compile_and_package",
        "no package of machine code can be made",
        "give package='export'",
    )
    imported("torch._inductor", "aoti_compile_and_package", without)(program, **options)


def is_mutable(operator: Any) -> bool:
    """Return True if one of ``torch.ops`` writes to an argument; only its schema tells.

    Raises:
        ImportError: torch has none.
    """
    without = Missing(
        "torch._ops.OpOverload._schema",
        "it cannot be told which numbers an exported step makes nothing of",
        "step in Python",
    )
    return bool(held(operator, "_schema", without).is_mutable)


def is_higher_order(target: Any) -> bool:
    """Return True if what a node of torch.export calls is an operator on functions, such as a loop.

    Without the class: whatever is neither a function nor one of ``torch.ops``.
    """
    higher_order = getattr(getattr(torch, "_ops", None), "HigherOrderOperator", None)
    if higher_order is not None:
        return isinstance(target, higher_order)
    plain = (FunctionType, BuiltinFunctionType, type(torch.ops.aten.add.Tensor))
    return callable(target) and not isinstance(target, plain)
