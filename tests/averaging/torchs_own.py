"""torch's own tests of averagers, hook, and optimizer, run on our classes.

The tests are written for GPUs; here all tensors stay on the CPU.
"""

import ast
import copy
import importlib.util
import tempfile
import unittest
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_pg_config
from torch.nn.parallel import DistributedDataParallel

import hooks

TESTS = (
    "test_periodic_model_averager",
    "test_periodic_model_averager_param_group",
    "test_1_level_hierarchical_model_averager_equivalent_to_periodic_model_averager",
    "test_3_level_hierarchical_model_averager",
    "test_ddp_hook_parity_post_localSGD",
    "test_post_localSGD_optimizer_parity",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    "test_post_localSGD_optimizer_step_reload",
)
_HELPERS = (
    "_test_ddp_hook_parity",
    "_test_post_localSGD_optimizer_parity",
    "_test_post_localSGD_optimizer_step_reload",
    "_create_periodic_model_averager",
    "_create_hierarchical_model_averager",
    "_create_post_localSGD_optimizer",
    "_perform_a_train_step",
)
_CLASSES = ("FC", "Net", "_FC2")


@cache
def _source() -> ast.Module:
    name = "torch.testing._internal.distributed"
    (folder,) = importlib.util.find_spec(name).submodule_search_locations
    return ast.parse((Path(folder) / "distributed_test.py").read_text(encoding="utf-8"))


def _named(nodes: Sequence[ast.AST], names: Sequence[str]) -> list[Any]:
    """Return the functions and classes of these names, without their decorators."""
    found = [node for node in nodes if getattr(node, "name", None) in names]
    for node in found:
        node.decorator_list = []
    return found


class _Case(unittest.TestCase):
    """Test case that torch's tests take as ``self``."""

    rank: int
    world_size: int

    def assertEqual(self, first: Any, second: Any, msg: Any = None) -> None:  # noqa: N802
        if isinstance(first, Tensor) or isinstance(second, Tensor):
            torch.testing.assert_close(first, second)
        else:
            super().assertEqual(first, second, msg)  # noqa: PT009  of torch's tests


def _torchs_class() -> type[_Case]:
    """Return a class with torch's test methods, whose names refer to our classes."""
    module = _source()
    names: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "F": nn.functional,
        "dist": dist,
        "copy": copy,
        "np": np,
        "tempfile": tempfile,
        "OrderedDict": OrderedDict,
        "BACKEND": "gloo",
        "_get_pg_config": _get_pg_config,
        "init_multigpu_helper": lambda size, _: {rank: [rank] for rank in range(size)},
        "averagers": hooks,
        "hierarchicalSGD": hooks,
        "post_localSGD": hooks,
        "post_localSGD_optimizer": hooks,
    }
    outer = next(node for node in module.body if getattr(node, "name", "") == "DistributedTest")
    base = next(node for node in outer.body if getattr(node, "name", "") == "_DistTestBase")
    taken = ast.Module(_named(module.body, _CLASSES) + _named(base.body, TESTS + _HELPERS), [])
    exec(compile(taken, "distributed_test.py", "exec"), names)
    return type("TorchsOwn", (_Case,), {name: names[name] for name in TESTS + _HELPERS})


@contextmanager
def _nothing_is_moved() -> Iterator[None]:
    """Keep everything on the CPU that torch's tests send to a GPU."""

    def stay(one: Any, *_: Any, **__: Any) -> Any:
        return one

    def on_cpu(module: nn.Module, *, device_ids: Any = None, **options: Any) -> Any:
        return DistributedDataParallel(module, **options)

    with ExitStack() as stack:
        for kind, name in [(nn.Module, "cuda"), (nn.Module, "to"), (Tensor, "cuda")]:
            stack.enter_context(mock.patch.object(kind, name, stay))
        stack.enter_context(mock.patch.object(torch.cuda, "set_device"))
        parallel = torch.nn.parallel
        stack.enter_context(mock.patch.object(parallel, "DistributedDataParallel", on_cpu))
        yield


def run(names: Sequence[str]) -> list[str]:
    """Run some of the tests on this rank; return those that passed."""
    made = _torchs_class()
    passed = []
    for name in names:
        one = made()
        one.rank, one.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)  # torch's tests assume that all ranks draw the same numbers
        with _nothing_is_moved(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name.endswith("reload"):
                with tempfile.TemporaryDirectory() as folder:
                    paths = [folder]
                    dist.broadcast_object_list(paths)
                    _reload(one, Path(paths[0]) / "checkpoint")
                    dist.barrier()
            else:
                getattr(one, name)()
        passed.append(name)
    return passed


def _reload(one: Any, path: Path) -> None:
    for create in (one._create_periodic_model_averager, one._create_hierarchical_model_averager):
        one._test_post_localSGD_optimizer_step_reload(create, str(path))
