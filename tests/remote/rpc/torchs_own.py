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


def run(name: str, meeting: str) -> str:
    """Run one of torch's tests in this new process; return "passed", or the error."""
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
    return _run(dist_optimizer_test.DistOptimizerTest, name, meeting)


def _run(own: type, name: str, meeting: str) -> str:
    class Fixed(own, unittest.TestCase):  # type: ignore[misc]
        rank = torch.distributed.get_rank()
        file_name = meeting
        rpc_backend = rpc.backend_registry.BackendType["TENSORPIPE"]

        @property
        def rpc_backend_options(self) -> rpc.TensorPipeRpcBackendOptions:
            return rpc.TensorPipeRpcBackendOptions(init_method=self.init_method, rpc_timeout=60)

        def get_shutdown_error_regex(self) -> str:
            return ".*"

        def get_timeout_error_regex(self) -> str:
            return ".*"

        def assertEqual(self, first: Any, second: Any, msg: Any = None) -> None:  # noqa: N802
            torch.testing.assert_close(first, second, rtol=0, atol=0)

        def assertNotEqual(self, first: Any, second: Any, msg: Any = None) -> None:  # noqa: N802
            assert not torch.equal(first, second)

    result = unittest.TestResult()
    Fixed(name).run(result)
    wrong = [text for _, text in [*result.errors, *result.failures]]
    return wrong[0] if wrong else "passed"
