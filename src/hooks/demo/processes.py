"""Processes that speak to one another over torch RPC: in the demo, and in examples."""

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing
from torch.distributed import rpc

from functional_optim._torch import rpc_over_sockets


def run_processes(names: Sequence[str], function: Callable[..., Any], *args: Any) -> None:
    """Call a function in the first of several new processes, which has the others as workers.

    Args:
        names: of the processes, for one another.
        function: at the top level of a module, also of one that is run as a script.
        args: for it; they are pickled.

    Raises:
        torch.multiprocessing.ProcessException: one of them failed or was killed; the others are
            ended then.
    """
    with tempfile.TemporaryDirectory(prefix="functional-optim-rpc-") as folder:
        meeting = f"file://{Path(folder) / 'meeting'}"
        given = (list(names), meeting, function, args)
        # They are forked off a process that has imported what they need, once for all of them.
        multiprocessing.start_processes(_process, given, len(names), start_method="forkserver")


def _process(
    rank: int, names: Sequence[str], meeting: str, function: Callable[..., Any], args: Any
) -> None:
    """Run one of the processes."""
    torch.set_num_threads(1)  # they share the cores, and sums keep one order
    with rpc_process(names[rank], rank, len(names), meeting):
        if rank == 0:
            function(*args)


@contextmanager
def rpc_process(
    name: str, rank: int, world_size: int, init_method: str = "env://"
) -> Iterator[None]:
    """This process under a name, for all others; at the end they wait for one another.

    Args:
        name: of this process.
        rank: of this process, from 0.
        world_size: how many there are.
        init_method: how they find one another; by default as torchrun tells them.
    """
    # torch's init_rpc uses a process group in a way that torch.distributed deprecates.
    warnings.filterwarnings("ignore", r"You are using a Backend <class", UserWarning)
    options = rpc_over_sockets(init_method=init_method)
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    try:
        yield
    except BaseException:
        rpc.shutdown(graceful=False)  # the others wait until whoever started them ends them
        raise
    rpc.shutdown()
