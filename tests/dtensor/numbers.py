"""Test of state that is one scalar for a whole parameter, of which each rank has a shard."""

import torch

from functional_optim import asgd, nadam
from tests.choices import case

from . import jobs


def as_torch() -> None:
    """Compare NAdam and ASGD with torch, bit for bit."""
    made = {"nadam": (nadam, torch.optim.NAdam), "asgd": (asgd, torch.optim.ASGD)}
    for name, (factory, cls) in made.items():
        for model in ("fsdp", "by hand"):
            ours, twin = (jobs.MODELS[model](torch.float32) for _ in range(2))
            step = jobs.torch_optimizer(factory(lr=jobs.LR), ours)
            theirs = cls(twin.parameters(), lr=jobs.LR, foreach=False)
            with case(name=name, model=model):
                for number in range(jobs.STEPS):
                    for one in (ours, twin):
                        jobs.set_gradients(one, number, model, missing=number == 2)
                    step(ours)
                    theirs.step()
                    jobs.assert_same(ours, twin)
