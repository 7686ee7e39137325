"""What each process of ``--front-end rpc`` does: rank 0 trains, the others own the parameters.

Started by ``torchrun`` (see ``launch.py``), which ends all of them when one dies.
"""

import copy
import os
from collections.abc import Sequence

from hooks.demo import text
from hooks.demo.front_ends import HyperParameters
from hooks.demo.interleaved import first_model, train_runs
from hooks.demo.processes import rpc_process
from hooks.demo.result import RankResult
from hooks.demo.rpc_run import InThisProcess, OnWorkers, RpcRun, RpcWay
from hooks.demo.settings import Settings
from hooks.demo.train import given, peak_rss_bytes, sample

TRAINER = "trainer"


def train(settings: Settings, workers: Sequence[str]) -> RankResult:
    """Both runs, interleaved step by step, on the same batches."""
    model = first_model(settings)
    hyper = HyperParameters(settings.learning_rate)
    away = OnWorkers(copy.deepcopy(model), hyper, workers)
    where = f"{len(workers)} worker{'s' if len(workers) > 1 else ''}"
    runs = [
        RpcRun(RpcWay("A", "torch.optim.AdamW, in one process"), InThisProcess(model, hyper)),
        RpcRun(RpcWay("B", f"DistributedOptimizer, parameters on {where}"), away),
    ]
    chance = train_runs(settings, runs, model.context, rank=0)
    return RankResult(
        rank=0,
        numel=sum(param.numel() for param in model.parameters()),
        runs=[run.result(runs[0]) for run in runs],
        peak_rss_bytes=peak_rss_bytes(),
        sample=sample(model, text.corpus().alphabet, chance),
    )


def main() -> None:
    """Entry point of a process."""
    settings, folder = given("One process of `functional-optim demo --front-end rpc`.")
    rank = int(os.environ["RANK"])
    names = [TRAINER, *(f"worker{one}" for one in range(1, settings.ranks))]
    with rpc_process(names[rank], rank, settings.ranks):
        if rank == 0:
            train(settings, names[1:]).save(folder)


if __name__ == "__main__":
    main()
