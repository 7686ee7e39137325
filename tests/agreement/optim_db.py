"""PyTorch's own list of optimizer configurations, which the tests of PyTorch use.

The list is in a private module of torch. The decorators in that module need packages that only
developers of torch have, so stand-ins replace these decorators.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch

from functional_optim import functional_optim_map

_INTERNAL = "torch.testing._internal"
_STAND_INS: dict[str, dict[str, Any]] = {
    "common_device_type": {
        "tol": lambda **_: None,
        "toleranceOverride": lambda _: None,
    },
    "common_methods_invocations": {"DecorateInfo": lambda *_, **__: None},
    "common_utils": {
        "_TestParametrizer": object,
        "skipIfMPS": None,
        "skipIfTorchDynamo": lambda _: None,
        "TEST_WITH_TORCHDYNAMO": False,
    },
}

EXECUTION = ("foreach", "fused", "capturable", "differentiable")
"""Options that select an implementation in torch."""


class Configuration(NamedTuple):
    """A class of torch and its options."""

    cls: Any
    options: dict[str, Any]
    takes_complex: bool
    takes_sparse_only: bool

    def build(self, params: Any) -> torch.optim.Optimizer:
        """Return an optimizer of the class that uses the for-loop implementation."""
        has_foreach = "foreach" in inspect.signature(self.cls).parameters
        one: torch.optim.Optimizer = self.cls(
            params, **self.options, **({"foreach": False} if has_foreach else {})
        )
        return one


def configurations() -> dict[str, Configuration]:
    """Return all configurations of classes with an equivalent here, by class and description.

    Classes whose step needs a closure are left out.
    """
    found: dict[str, Configuration] = {}
    for info in _optim_db():
        if info.optim_cls not in functional_optim_map or info.step_requires_closure:
            continue
        for one in info.optim_inputs_func("cpu", None):
            options = {key: value for key, value in one.kwargs.items() if key not in EXECUTION}
            found[f"{info.optim_cls.__name__}: {one.desc}"] = Configuration(
                info.optim_cls, options, info.supports_complex, info.only_supports_sparse_grads
            )
    return found


def _optim_db() -> list[Any]:
    with _stand_ins():
        module = importlib.import_module(f"{_INTERNAL}.common_optimizers")
        del sys.modules[module.__name__]
    listed: list[Any] = module.optim_db
    return listed


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Replace modules, or names in existing modules, by stand-ins."""
    before = {name: sys.modules.get(name) for name in [f"{_INTERNAL}.{one}" for one in _STAND_INS]}
    for name, names in _STAND_INS.items():
        module = ModuleType(f"{_INTERNAL}.{name}")
        vars(module).update(names)
        sys.modules[module.__name__] = module
    try:
        yield
    finally:
        for name, own in before.items():
            del sys.modules[name]
            if own is not None:
                sys.modules[name] = own
