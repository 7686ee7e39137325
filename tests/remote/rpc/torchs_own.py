"""Runner of torch's own tests of its DistributedOptimizer, unchanged, on our class."""

import os
import sys
import unittest
import warnings
from types import ModuleType
from typing import Any

import torch
from torch.distributed import rpc

from functional_optim import DistributedOptimizer
from functional_optim._torch.distributed import rpc_over_sockets
from sharding.testing import at


def run(names: list[str], meeting: str) -> dict[str, str]:
    """Run torch's tests one after another; return for each "passed", or the error.

    RPC starts only once in a process, so the tests run without the decorator that starts it.
    """
    # torch's own tests import and call names that torch deprecates.
    warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
    warnings.filterwarnings("ignore", r"You are using a Backend <class", UserWarning)
    warnings.filterwarnings("ignore", ".* has no functional equivalent", UserWarning)
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    # torch's tests use only two names of this module. The module itself needs packages that only
    # torch's developers have.
    common = ModuleType("torch.testing._internal.common_utils")
    common.FILE_SCHEMA, common.TEST_WITH_TSAN = "file://", False  # type: ignore[attr-defined]
    sys.modules[common.__name__] = common
    from torch.testing._internal.distributed.rpc import dist_optimizer_test

    del sys.modules[common.__name__]
    dist_optimizer_test.DistributedOptimizer = DistributedOptimizer  # type: ignore[misc, assignment]
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    options = rpc_over_sockets(init_method=f"file://{meeting}", rpc_timeout=60)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    found = {}
    for name in names:
        at(name)
        found[name] = _run(dist_optimizer_test.DistOptimizerTest, name)
        torch.distributed.barrier()
    rpc.shutdown()
    return found


def _run(own: Any, name: str) -> str:
    class Fixed(own, unittest.TestCase):  # type: ignore[misc]
        rank = worker_id = torch.distributed.get_rank()
        rpc_backend = rpc_backend_options = None  # RPC has started

        def get_shutdown_error_regex(self) -> str:
            return ".*"

        def get_timeout_error_regex(self) -> str:
            return ".*"

        def assertEqual(self, first: Any, second: Any, msg: Any = None) -> None:  # noqa: N802
            torch.testing.assert_close(first, second, rtol=0, atol=0)

        def assertNotEqual(self, first: Any, second: Any, msg: Any = None) -> None:  # noqa: N802
            assert not torch.equal(first, second)

    setattr(Fixed, name, getattr(own, name).__wrapped__)
    result = unittest.TestResult()
    Fixed(name).run(result)
    wrong = [text for _, text in [*result.errors, *result.failures]]
    return wrong[0] if wrong else "passed"
