"""Test of processes over torch RPC when one of them dies."""

import os
import signal

import pytest
from torch.distributed import rpc
from torch.multiprocessing.spawn import ProcessException

from hooks.demo.processes import run_processes


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ask_the_worker_to_die() -> None:
    rpc.rpc_sync("worker", die)


def test_a_process_that_dies_ends_all() -> None:
    with pytest.raises(ProcessException):
        run_processes(["trainer", "worker"], ask_the_worker_to_die)
