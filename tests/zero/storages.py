"""Expected state of one storage after conversion to another, computed by one process."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from functional_optim import Optimizer, adamw, stored
from functional_optim.storage import PARAM_STORAGES, STATE_STORAGES
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local_group import LocalGroup
from tests.zero_local.compare import same

STORAGES: dict[str, dict[str, Any]] = {
    "float32": {},
    "state bfloat16": {"state": "bfloat16"},
    "state int8": {"state": "int8"},
    "state mixed": {"state": {"exp_avg": "int8+stochastic", "*": "bfloat16+stochastic"}},
    "master": {"param": "bfloat16+master"},
    "kahan": {"param": "bfloat16+kahan"},
    "stochastic": {"param": "bfloat16+stochastic"},
    "smallest": {"param": "bfloat16+kahan", "state": "int8+stochastic", "seed": 3},
    "master int8": {"param": "bfloat16+master", "state": "int8"},
}
FIELDS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
SHAPES = {
    "wide": (90, 17),
    "long": (771,),
    "short": (5,),
    "none": (0, 3),
    "number": (),
    "one": (1,),
}


def base() -> Optimizer:
    return adamw(lr=0.01, amsgrad=True)


def chain_of(storage: str) -> Optimizer:
    return stored(base(), **STORAGES[storage])


def dtype_of(storage: str) -> torch.dtype:
    return PARAM_STORAGES[STORAGES[storage].get("param", "float32")].dtype


def kept_as(storage: str, field: str) -> str:
    """Return the storage of a field."""
    state = STORAGES[storage].get("state", "float32")
    found = state if isinstance(state, str) else state.get(field, state["*"])
    assert isinstance(found, str)
    return found


def values(dtype: torch.dtype) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(3)
    return {n: torch.randn(shape, generator=chance).to(dtype) for n, shape in SHAPES.items()}


def grads(dtype: torch.dtype, step: int) -> dict[str, Tensor]:
    """Return gradients that bfloat16 represents exactly, so that they agree in every dtype."""
    chance = torch.Generator().manual_seed(50 + step)
    made = {n: torch.randn(shape, generator=chance) for n, shape in SHAPES.items()}
    return {name: one.to(torch.bfloat16).to(dtype) for name, one in made.items()}


@functools.cache
def twin_of(storage: str, steps: int) -> tuple[dict[str, Tensor], Any]:
    """Return the parameters and the state of one uninterrupted process."""
    optimizer, params = chain_of(storage), values(dtype_of(storage))
    state = optimizer.init(params)
    for step in range(steps):
        params, state = optimizer.update(params, grads(dtype_of(storage), step), state)
    return params, state


def made(
    storage: str | Optimizer, group: LocalGroup, policy: str, views: bool, start: dict[str, Tensor]
) -> Any:
    """Return a sharded optimizer over parameters with these values."""
    dtype = dtype_of(storage) if isinstance(storage, str) else torch.float32
    params = {name: nn.Parameter(one.to(dtype, copy=True)) for name, one in start.items()}
    return ZeroRedundancyOptimizer(
        list(params.items()),
        chain_of(storage) if isinstance(storage, str) else storage,
        group,
        views,
        policy=policy,
        executor="blocked",
    )


def give(zero: Any, step: int) -> None:
    for name, param in zero.params.items():
        param.grad = grads(param.dtype, step)[name]


class Plain:
    """State of one parameter of the twin, decoded by the storages themselves."""

    def __init__(self, storage: str, param: Tensor, leaf: Any) -> None:
        state = leaf.stages[-1]
        self.param = param
        self.kept = STORAGES[storage].get("param", "float32")
        self.extras = {n: getattr(state, n) for n in PARAM_STORAGES[self.kept].extras}
        self.value = PARAM_STORAGES[self.kept].decode(param, tuple(self.extras.values()))
        self.fields = {name: self._field(storage, state, name) for name in FIELDS}

    @staticmethod
    def _field(storage: str, state: Any, name: str) -> Tensor:
        if not STORAGES[storage]:
            found = getattr(state, name)
            return found[0] if isinstance(found, list) else found
        way = STATE_STORAGES[kept_as(storage, name)]
        parts = [getattr(state, name + suffix) for suffix in way.suffixes]
        return way.decode(tuple(p[0] if isinstance(p, list) else p for p in parts))

    def as_kept(self, storage: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the parameter and its state tensors in another storage."""
        kept = STORAGES[storage].get("param", "float32")
        param = self.value if kept == "float32" else self.param.to(torch.bfloat16)
        found: dict[str, Tensor] = {}
        for name in PARAM_STORAGES[kept].extras:
            # A bfloat16 parameter without extras has no value of higher precision.
            value = self.value if self.extras else param.float()
            made = PARAM_STORAGES[kept].encode(value, None)[1][0]
            found[name] = self.extras.get(name, made)
        for name, value in self.fields.items():
            way = STATE_STORAGES[kept_as(storage, name)]
            for suffix, part in zip(way.suffixes, way.encode(value, None, 0), strict=True):
                found[name + suffix] = part
        return param, found


def own_part(one: Any, name: str, whole: Tensor) -> Tensor:
    """Return the part of a parameter's tensor that belongs to a range."""
    if one.whole:
        return whole
    unit = 256 if name.endswith("_scale") else 1
    return whole.reshape(-1)[one.start // unit : -(-one.stop // unit)]


def wrong_state(zero: Any, wanted: dict[str, tuple[Tensor, dict[str, Tensor]]]) -> list[str]:
    """Return the names of the parameters and of this rank's state entries that are wrong."""
    wrong = [
        f"{name}: parameter"
        for name, (param, _) in wanted.items()
        if not same(zero.params[name].detach(), param)
    ]
    keys = iter([key for group in zero.optim.param_groups for key in group["params"]])
    for one, key in zip(zero.owned, keys, strict=True):
        entries = zero.optim.state[key]
        expected = wanted[one.path][1]
        if entries.keys() != {"step", *expected} or int(entries["step"]) != 3:
            wrong.append(f"{one.path}: {sorted(entries)} at step {entries.get('step')}")
            continue
        for name, whole in expected.items():
            part = own_part(one, name, whole)
            if name == "master":  # ties between two parameters may differ by one unit
                same_here = torch.allclose(entries[name], part, rtol=2.0**-23, atol=0.0)
            else:
                same_here = same(entries[name].detach(), part)
            wrong += [] if same_here else [f"{one.path} [{one.start}, {one.stop}): {name}"]
    return wrong


def wanted_of(source: str, storage: str) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Return parameters and state after three steps in one storage, converted to another."""
    params, state = twin_of(source, 3)
    return {n: Plain(source, p, state.leaves[n]).as_kept(storage) for n, p in params.items()}
