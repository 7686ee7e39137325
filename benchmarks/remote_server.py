"""Functions of the server that the trainers' process calls: RPC finds them by name."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import parent_process

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.nn import Parameter

import functional_optim.testing.compiled_executor  # noqa: F401  adds the executor "compiled"
from benchmarks.cases import CASES
from benchmarks.contestants import START
from benchmarks.workloads import Shape
from functional_optim.native import LOOPS

SERVER, TRAINER = "server", "trainer"
ANSWER_SECONDS = 120.0
"""Seconds without an answer after which a call fails."""

HELD: dict[str, list[Tensor]] = {}
"""Parameters of each contestant on this server."""


def join(name: str, meeting: str) -> None:
    """Join the RPC group, and answer calls.

    Args:
        name: SERVER or TRAINER.
        meeting: the path of a file for the rendezvous, which must not exist yet.
    """
    torch.set_num_threads(1)  # OMP_NUM_THREADS does not reach all pools
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{meeting}", rpc_timeout=ANSWER_SECONDS
    )
    rank = (TRAINER, SERVER).index(name)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def serve(meeting: str) -> None:
    """Answer calls until the trainers have finished, or their process has ended."""
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.join,), daemon=True).start()
    join(SERVER, meeting)
    rpc.shutdown()


def _end_after(join_parent: Callable[[], object]) -> None:
    join_parent()
    os._exit(1)


def prepare(rule: str, count: int) -> None:
    """Build now what would be built in the background, or only after many steps.

    Args:
        rule: a key of CASES.
        count: the number of parameters.
    """
    CASES[rule].ours().using(executor="compiled").bind([Parameter(torch.zeros(1))]).ready()
    LOOPS.get(count)
    LOOPS.wait()


def parameters(shapes: Sequence[Shape]) -> list[Tensor]:
    """Return new parameters."""
    return [Parameter(torch.full(tuple(shape), START)) for shape in shapes]


def hold(name: str, shapes: Sequence[Shape]) -> list[rpc.RRef[Tensor]]:
    """Make the parameters of a contestant, and return references to them."""
    HELD[name] = parameters(shapes)
    return [rpc.RRef(param) for param in HELD[name]]


def drop(name: str) -> None:
    """Release a contestant's parameters."""
    HELD.pop(name, None)


def loss(name: str) -> Tensor:
    """Return a loss whose gradients are standard normal numbers."""
    return torch.stack([(one * torch.randn_like(one)).sum() for one in HELD[name]]).sum()


def moved(name: str) -> list[float]:
    """Return the distance of each parameter of a contestant from its start."""
    return [distance(one) for one in HELD[name]]


def distance(param: Tensor) -> float:
    """Return the greatest change of an element of a parameter since its start."""
    return (param.detach() - START).abs().max().item()


def python_seconds(count: int) -> float:
    """Return the seconds of a loop that has nothing to do with optimizers."""
    begin = time.perf_counter()
    total = 0
    for number in range(count):
        total += number
    return time.perf_counter() - begin
