"""Write AdamW with clipping as a program, then train with it in a process that has only torch.

    python examples/export_step.py

The second process loads two files: the program, and the model's first parameters. It never
imports functional_optim.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from functional_optim import adamw, chain, clip_by_global_norm
from functional_optim.export import export_step

ELSEWHERE = """
import json, sys
import torch

folder = sys.argv[1]
step = torch.export.load(f"{folder}/step.pt2").module()
with open(f"{folder}/step.pt2.json") as file:
    manifest = json.load(file)

# What the manifest says: states as they begin, step counts, and the numbers that are fed.
inputs = manifest["inputs"]
states = [
    torch.full(one["shape"], float(one["initial"]), dtype=getattr(torch, one["dtype"]))
    for one in inputs if one["list"] == "states"
]
steps = [torch.tensor(0) for one in inputs if one["list"] == "steps"]
hyper = {name: torch.tensor(float(v), dtype=torch.float64) for name, v in manifest["hyper"].items()}

model = torch.nn.Linear(4, 1)
model.load_state_dict(torch.load(f"{folder}/model.pt"))
named = dict(model.named_parameters())
params = [named[one["name"]] for one in inputs if one["list"] == "params"]
draws = torch.Generator().manual_seed(1)
data = torch.randn(64, 4, generator=draws)
target = data.sum(dim=1, keepdim=True)
for made in range(60):
    loss = torch.nn.functional.mse_loss(model(data), target)
    grads = list(torch.autograd.grad(loss, params))
    hyper["lr"].fill_(0.2 * (1 - made / 60))  # a schedule, fed step by step
    with torch.no_grad():
        step(params, grads, states, steps, list(hyper.values()))
    if made % 20 == 0 or made == 59:
        print(f"step {int(steps[0]):2}  lr {hyper['lr']:.3f}  loss {loss:.6f}")
assert "functional_optim" not in sys.modules
"""


def main() -> None:
    """Export, then train elsewhere."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = chain(clip_by_global_norm(1.0), adamw(lr=0.2))
    with tempfile.TemporaryDirectory() as folder:
        made = export_step(optimizer, dict(model.named_parameters()), Path(folder) / "step.pt2")
        torch.save(model.state_dict(), Path(folder) / "model.pt")
        print(f"exported: {made.manifest['chain']}")
        print(f"to feed at each step: {', '.join(made.manifest['hyper'])}")
        subprocess.run([sys.executable, "-c", ELSEWHERE, folder], check=True)


if __name__ == "__main__":
    main()
