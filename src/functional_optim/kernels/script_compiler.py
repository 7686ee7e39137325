"""Text as TorchScript: where its source is found, and one compiler at a time."""

import linecache
import threading
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import let_script_fuse
from functional_optim.kernels.cache import turn


def module_of(name: str, text: str, names: dict[str, Any]) -> ModuleType:
    """A module with this text, which may use these names."""
    module = ModuleType(name)
    module.__dict__.update(names)
    module.__file__ = f"<{name}>"
    module.__doc__ = text
    exec(compile(text, module.__file__, "exec"), module.__dict__)  # noqa: S102  text written by us
    return module


def with_source(module: ModuleType, name: str) -> Any:
    """A name of a generated module, its source where TorchScript looks for it.

    That is a cache which debuggers and test tools clear, so it is filled again each time.
    """
    assert module.__file__ is not None
    assert module.__doc__ is not None
    lines = module.__doc__.splitlines(keepends=True)
    linecache.cache[module.__file__] = (len(module.__doc__), None, lines, module.__file__)
    return module.__dict__[name]


def script(thing: Any) -> Any:
    """torch.jit.script without its deprecation warning, which is not the caller's to act on.

    It must not compile in two threads at once, and hooks run in threads of gloo.
    """
    with turn(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.*")
        return torch.jit.script(thing)


class _Unfusing:
    """How many threads have TorchScript fuse nothing, and whether it did before."""

    lock = threading.Lock()
    threads = 0
    before = True


def unfused(params: Sequence[Tensor], run: Callable[..., Any], *arguments: Any) -> Any:
    """Call a program for these parameters, operation by operation.

    On an accelerator TorchScript fuses what it has run once: that rounds otherwise, and some of it
    does not compile (of torch.bfloat16, without an element). On the CPU it fuses nothing.
    """
    if not params or params[0].is_cpu:
        return run(*arguments)
    with _Unfusing.lock:
        if not _Unfusing.threads:
            _Unfusing.before = let_script_fuse(fuse=False)
        _Unfusing.threads += 1
    try:
        return run(*arguments)
    finally:
        with _Unfusing.lock:
            _Unfusing.threads -= 1
            if not _Unfusing.threads:
                let_script_fuse(fuse=_Unfusing.before)
