"""Registration, construction and steps in a new process, in which warnings are errors."""

import subprocess
import sys

PROGRAM = """
import io, copy, torch
from functional_optim import *
register_functional_optim("qhm", qhm, in_torch=True)
params = [torch.nn.Parameter(torch.ones(3))]
for executor in ("reference", "blocked"):
    chained = chain(clip_by_global_norm(1.0), adamw(0.1)).using(executor=executor)
    optimizer = TorchOptimizer(params, chained)
    params[0].grad = torch.ones(3)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
live = torch.optim.AdamW(params, 0.1)
live.step()
made = from_torch(live)
live.load_state_dict(to_torch_state_dict(*made))
as_functional_optim(torch.optim.SGD, 0.1).script(params).step([torch.ones(3)])
"""


def test_registration_construction_and_steps_raise_no_warning() -> None:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
