"""Processes that call one another over torch RPC, in the demo and in examples."""

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing
from torch.distributed import rpc

from functional_optim._torch.distributed import rpc_over_sockets


def run_processes(names: Sequence[str], function: Callable[..., Any], *args: Any) -> None:
    """Call a function in the first of several new processes, with the others as RPC workers.

    Args:
        names: of the processes.
        function: at the top level of a module or script.
        args: of the function; they are pickled.

    Raises:
        torch.multiprocessing.ProcessException: a process failed or was killed; the others are then
            ended.
    """
    with tempfile.TemporaryDirectory(prefix="functional-optim-rpc-") as folder:
        meeting = f"file://{Path(folder) / 'meeting'}"
        arguments = (list(names), meeting, function, args)
        # The fork server imports modules once for all processes.
        multiprocessing.start_processes(_process, arguments, len(names), start_method="forkserver")


def _process(
    rank: int, names: Sequence[str], meeting: str, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)  # processes share the cores, and sums keep one order
    with rpc_process(names[rank], rank, len(names), meeting):
        if rank == 0:
            function(*args)


@contextmanager
def rpc_process(
    name: str, rank: int, world_size: int, init_method: str = "env://"
) -> Iterator[None]:
    """Run the body as a named RPC process; at the end, wait for all processes.

    By default, processes find one another through torchrun's variables.
    """
    # torch's init_rpc uses a process group in a way that torch.distributed deprecates.
    warnings.filterwarnings("ignore", r"You are using a Backend <class", UserWarning)
    options = rpc_over_sockets(init_method=init_method)
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    try:
        yield
    except BaseException:
        rpc.shutdown(graceful=False)  # the parent process ends the others
        raise
    rpc.shutdown()
