"""The page of storages."""

from collections.abc import Mapping
from typing import Any

import torch

from docs._pages.markdown import table
from functional_optim import algorithms, compare_storages, describe, stored
from functional_optim.storage import CHOICES, PARAM_STORAGES, STATE_STORAGES

PARAMS = {
    "float32": "as it is",
    "bfloat16": "rounded to nearest; an update below 2^-9 of the parameter is lost",
    "bfloat16+master": "with a float32 copy in the state: the steps of float32 parameters, bit for "
    "bit",
    "bfloat16+kahan": "with the rounding error in the state, also in bfloat16: together within "
    "2^-17 of the float32 result",
    "bfloat16+stochastic": "rounded up or down at random, so that the mean is exact",
}
STATES = {
    "float32": "as it is",
    "bfloat16": "rounded to nearest; an average whose steps are below 2^-9 of it does not move",
    "bfloat16+stochastic": "rounded up or down at random, so that the mean is exact",
    "int8": "8 bits an element and a scale for each block of 256: an error of at most 1/16 of the "
    "value, or 2^-19 of the largest in the block",
    "int8+stochastic": "the same, rounded at random: an error of at most 1/8 of the value, or "
    "2^-18 of the largest in the block",
}

HEAD = """# Storages

`stored` keeps the parameters and the state of an optimizer in fewer bytes between steps. A step
decodes to float32, runs the whole chain, and encodes. The rule does not change.

```python
import torch
from functional_optim import adamw, compare_storages, describe, stored

params = {"w": torch.zeros(1024, 256, dtype=torch.bfloat16)}
optimizer = stored(adamw(lr=1e-3), param="bfloat16+kahan", state="int8+stochastic")
state = optimizer.init(params)
optimizer.update_(params, {"w": torch.ones_like(params["w"])}, state)
print(describe(optimizer, params))               # bytes per parameter, field by field
print(compare_storages(adamw(lr=1e-3), params))  # the same for every choice below
```
"""

REST = """Random bits are a function of the value, the gradient, the step and a seed. So they do not
depend on how tensors are cut, on the rank, or on restarts. The bounds above are tested. In blocks
without a negative number, the bounds relative to the largest value are 2^-34.

A stored optimizer accepts no complex parameters and no sparse gradients, and TorchScript cannot run
it: [what composes with what](composes-with.md). It has no derivative: `update` raises an error if
torch.func differentiates it, or if an argument other than a parameter requires grad. Inside
torch.compile, this is not checked. A step takes longer than in float32:
[benchmarks](benchmarks.md).

## State in files

`mapped_state` keeps the state in memory-mapped files, so that it can be larger than memory.

```python
import tempfile

import torch
from functional_optim import adamw, mapped_state

optimizer, params = adamw(lr=1e-3), {"w": torch.zeros(1024, 256)}
state = mapped_state(optimizer, params, tempfile.mkdtemp())
optimizer.update_(params, {"w": torch.ones_like(params["w"])}, state)
```
"""


def page() -> str:
    """Return the page."""
    assert PARAMS.keys() == PARAM_STORAGES.keys()
    assert STATES.keys() == STATE_STORAGES.keys()
    params = torch.empty(1024, 1024, device="meta")
    found = compare_storages(algorithms.adamw(), params)
    return "\n".join(
        [
            HEAD,
            "## Parameters\n",
            table(["`param=`", "how a parameter is kept"], _code(PARAMS)),
            "## State\n",
            table(["`state=`, for all fields or by field", "how a field is kept"], _code(STATES)),
            "## Bytes per parameter\n",
            "AdamW on a matrix of 1024 rows and 1024 columns:\n",
            f"```text\n{found}\n```\n",
            "The same choices for other algorithms, all bytes per parameter:\n",
            table(["storage", *(f"`{one}`" for one in OTHERS)], _others(params)),
            REST,
        ]
    )


OTHERS = ("sgd", "lion", "adam", "adagrad", "muon")


def _code(entries: dict[str, str]) -> list[list[str]]:
    return [[f"`{name}`", text] for name, text in entries.items()]


def _others(params: torch.Tensor) -> list[list[str]]:
    """Return the total bytes per parameter of some algorithms, by storage."""
    rows = []
    every: Mapping[str, Mapping[str, Any]] = CHOICES
    for name, arguments in every.items():
        dtype = PARAM_STORAGES[arguments.get("param", "float32")].dtype
        cells = []
        for algorithm in OTHERS:
            options: dict[str, Any] = {"momentum": 0.9} if algorithm == "sgd" else {}
            optimizer = stored(getattr(algorithms, algorithm)(**options), **arguments)
            found = describe(optimizer, params.to(dtype))
            cells.append(f"{sum(row.bytes_per_parameter for row in found.rows):.2f}")
        rows.append([name, *cells])
    return rows
