"""The pages of transforms, wrappers and schedules."""

from inspect import signature
from typing import Any

import functional_optim
from docs._pages.markdown import table
from docs._pages.stories import call, example, formula, reference, summary
from functional_optim import schedules, transforms, wrappers
from functional_optim.core.leaf import is_measured
from functional_optim.core.stage import Rule

DIRECTIONS = (
    "scale_by_adahessian",
    "scale_by_adam",
    "scale_by_lion",
    "scale_by_rms",
    "scale_by_sophia",
    "trace",
)
"""Transforms that an algorithm is made of; each is defined in the file of that algorithm."""

COMPOSITION = ("chain", "partition", "masked", "freeze")
SELECTORS = ("matching", "with_shape", "labels", "if_any")

TRANSFORMS = """# Transforms

A transform changes the gradient before an algorithm uses it. `chain` applies its parts from left
to right, so put a transform before the algorithm. A chain of transforms needs one rule that
changes the parameter: an algorithm, or `descend(lr)`.

```python
import torch
from functional_optim import cautious, chain, clip_by_global_norm, descend, scale_by_adam

optimizer = chain(clip_by_global_norm(1.0), scale_by_adam(), cautious(), descend(lr=1e-3))
params = {"w": torch.ones(3)}
params, state = optimizer.update(params, {"w": torch.ones(3)}, optimizer.init(params))
```

The column *needs* says which gradients a transform reads: of one element, of its whole tensor, or
of all tensors. What needs all tensors is summed over all shards and ranks.
"""

WRAPPERS = """# Wrappers, composition and selectors

A wrapper is a stage that decides if the stages after it run, or that keeps averages of the
parameters. `chain`, `partition`, `masked` and `freeze` put optimizers together. Selectors say
which parameters they act on, by name or by shape.

```python
import torch
from functional_optim import (
    TorchOptimizer, accumulate, adamw, chain, ema, labels, muon, partition, with_shape,
)

split = labels({"muon": with_shape(ndim=2)}, default="adamw")
both = partition({"muon": muon(lr=0.02), "adamw": adamw(lr=1e-3)}, split)
optimizer = chain(accumulate(4), both, ema(0.999))
trainer = TorchOptimizer(torch.nn.Linear(4, 2).named_parameters(), optimizer)
```
"""

SCHEDULES = """# Schedules

A schedule is a function of the steps made. It stands for any hyper-parameter that is a number, or
for one number of a tuple. Schedules are values: they can be printed, compared, hashed and pickled.

```python
import pickle

from functional_optim import adamw, cosine, one_cycle, warmup

lr = warmup(100, then=cosine(1e-3, to=1e-5, steps=900))
optimizer = adamw(lr=lr, betas=(0.9, one_cycle(0.999, steps=1000, final_div_factor=1.0)))
assert pickle.loads(pickle.dumps(lr)) == lr == optimizer.hyper["lr"]
print(lr(0.0), lr(50.0), lr(1000.0))
```

A function of your own is a schedule too. It is given the number of steps made before this one, as
a number or as a 0-d tensor. [Agreement](agreement.md) has the distance of each schedule from
torch's scheduler of the same kind.
"""


def transforms_page() -> str:
    """Return the page of transforms."""
    names = sorted({*transforms.__all__, *DIRECTIONS})
    rows = [[f"[`{name}`](#{name})", summary(_public(name)), _needs(name)] for name in names]
    parts = [TRANSFORMS, table(["transform", "what it does", "needs"], rows)]
    return "\n".join([*parts, *map(_section, names)])


def wrappers_page() -> str:
    """Return the page of wrappers, composition and selectors."""
    groups = {"wrapper": wrappers.__all__, "composition": COMPOSITION, "selector": SELECTORS}
    parts = [WRAPPERS]
    for title, names in groups.items():
        rows = [[f"[`{name}`](#{name})", summary(_public(name))] for name in names]
        parts.append(table([title, "what it does"], rows))
    return "\n".join([*parts, *(_section(name) for names in groups.values() for name in names)])


def schedules_page() -> str:
    """Return the page of schedules."""
    names = schedules.__all__
    rows = [[f"[`{name}`](#{name})", summary(_public(name))] for name in names]
    parts = [SCHEDULES, table(["schedule", "its value"], rows)]
    return "\n".join([*parts, *map(_section, names)])


def _public(name: str) -> Any:
    return getattr(functional_optim, name)


def _section(name: str) -> str:
    made = _public(name)
    parts = [f"## {name}\n", f"`{call(name, made)}`\n"]
    if name in (*transforms.__all__, *wrappers.__all__) and name != "maximized":
        parts.append(f"```text\n{formula(made)}\n```\n")
    parts.append(f"```pycon\n{example(made)}\n```\n")
    if source := reference(made):
        parts.append(f"Reference: {source}\n")
    return "\n".join(parts)


def _needs(name: str) -> str:
    """Return which gradients a transform reads."""
    make = _public(name)
    required = [one for one in signature(make).parameters.values() if one.default is one.empty]
    stage = make(*(0.1 for _ in required)).stage
    if is_measured(stage):
        return "all tensors"
    if isinstance(stage, Rule):
        return "one element; it changes the parameter"
    return "one element" if stage.kind == "pointwise" else "its whole tensor"
