"""What the ranks do: save state in one storage, load it into another, beside one process."""

import functools
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, sgd, stored
from functional_optim.storage import PARAM_STORAGES, STATE_STORAGES
from sharding import ZeroRedundancyOptimizer
from sharding.zero.read import read_state_dict

from .jobs import difference, differing, same
from .jobs_more import raised

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
    """The storage of a field."""
    state = STORAGES[storage].get("state", "float32")
    found = state if isinstance(state, str) else state.get(field, state["*"])
    assert isinstance(found, str)
    return found


def values(dtype: torch.dtype) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(3)
    return {n: torch.randn(shape, generator=chance).to(dtype) for n, shape in SHAPES.items()}


def grads(dtype: torch.dtype, step: int) -> dict[str, Tensor]:
    """The same in every dtype: numbers of bfloat16."""
    chance = torch.Generator().manual_seed(50 + step)
    made = {n: torch.randn(shape, generator=chance) for n, shape in SHAPES.items()}
    return {name: one.to(torch.bfloat16).to(dtype) for name, one in made.items()}


@functools.cache
def twin_of(storage: str, steps: range) -> tuple[dict[str, Tensor], Any]:
    """One process, which never stops."""
    optimizer, params = chain_of(storage), values(dtype_of(storage))
    state = optimizer.init(params)
    for step in steps:
        params, state = optimizer.update(params, grads(dtype_of(storage), step), state)
    return params, state


def made(storage: str | Optimizer, policy: str, views: bool, start: dict[str, Tensor]) -> Any:
    """A sharded optimizer over parameters that have these values."""
    dtype = dtype_of(storage) if isinstance(storage, str) else torch.float32
    params = {name: nn.Parameter(one.to(dtype, copy=True)) for name, one in start.items()}
    return ZeroRedundancyOptimizer(
        list(params.items()),
        chain_of(storage) if isinstance(storage, str) else storage,
        policy=policy,
        parameters_as_bucket_view=views,
    )


def give(zero: Any, step: int) -> None:
    for name, param in zero.params.items():
        param.grad = grads(param.dtype, step)[name]


def saves(folder: str) -> dict[str, Any]:
    """Three steps in every storage, and a checkpoint of each."""
    seen = {}
    for storage in STORAGES:
        zero = made(storage, "elements", views=True, start=values(torch.float32))
        for step in range(3):
            give(zero, step)
            zero.step()
        zero.save(Path(folder, storage))
        zero.consolidate_state_dict(to=1)
        if dist.get_rank() == 1:
            torch.save(zero.state_dict(), Path(folder, f"{storage}.pt"))
        seen[storage] = differing(zero.params, twin_of(storage, range(3))[0])
    return seen


class Plain:
    """What a twin has of one parameter, decoded by the storages themselves."""

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
        """(the parameter, the tensors of its state) in another storage."""
        kept = STORAGES[storage].get("param", "float32")
        param = self.value if kept == "float32" else self.param.to(torch.bfloat16)
        found: dict[str, Tensor] = {}
        for name in PARAM_STORAGES[kept].extras:
            # Of a bfloat16 parameter alone, nothing is known beyond it.
            value = self.value if self.extras else param.float()
            made = PARAM_STORAGES[kept].encode(value, None)[1][0]
            found[name] = self.extras.get(name, made)
        for name, value in self.fields.items():
            way = STATE_STORAGES[kept_as(storage, name)]
            for suffix, part in zip(way.suffixes, way.encode(value, None, 0), strict=True):
                found[name + suffix] = part
        return param, found


def own_part(one: Any, name: str, whole: Tensor) -> Tensor:
    """Of a tensor for a whole parameter, what belongs to a range of it."""
    if one.whole:
        return whole
    unit = 256 if name.endswith("_scale") else 1
    return whole.reshape(-1)[one.start // unit : -(-one.stop // unit)]


def wrong_state(zero: Any, wanted: dict[str, tuple[Tensor, dict[str, Tensor]]]) -> list[str]:
    """What is not as it should be of this rank's state, and of all parameters."""
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
            if name == "master":  # by one unit, where a value is halfway between two parameters
                same_here = torch.allclose(entries[name], part, rtol=2.0**-23, atol=0.0)
            else:
                same_here = same(entries[name].detach(), part)
            wrong += [] if same_here else [f"{one.path} [{one.start}, {one.stop}): {name}"]
    return wrong


def loads(folder: str) -> dict[str, Any]:
    """Every storage from every other, by files and by state dicts; then one more step."""
    seen: dict[str, Any] = {}
    for number, (source, storage) in enumerate(itertools.product(STORAGES, STORAGES)):
        params, state = twin_of(source, range(3))
        plain = {n: Plain(source, params[n], state.leaves[n]) for n in params}
        wanted = {n: one.as_kept(storage) for n, one in plain.items()}
        policy, views = ("greedy", "elements")[number % 2], number % 3 == 0
        by_file, by_dict = (made(storage, policy, views, params) for _ in range(2))
        by_file.load(Path(folder, source))
        given = torch.load(Path(folder, f"{source}.pt"))
        by_dict.load_state_dict(given)
        wrong = [f"file: {text}" for text in wrong_state(by_file, wanted)]
        wrong += [f"dict: {text}" for text in wrong_state(by_dict, wanted)]
        if source == storage or (source, storage) == ("master", "float32"):
            # As if it had never stopped; a master's steps are those of float32.
            go_on = range(3, 5)
            for step in go_on:
                give(by_file, step)
                by_file.step()
            never = twin_of(source, range(5))
            found = {n: Plain(source, p, never[1].leaves[n]).value for n, p in never[0].items()}
            if storage != "float32":
                found = never[0]
            wrong += [f"goes on: {text}" for text in differing(by_file.params, found)]
        else:
            for zero in (by_file, by_dict):
                give(zero, 3)
                zero.step()
            wrong += differing(by_file.params, by_dict.params)
        seen[f"{source} > {storage}"] = wrong
    return seen


def plain_torch(folder: str) -> dict[str, Any]:
    """Every storage into torch's own class, and from it; and a sharded class of torch's."""
    seen: dict[str, Any] = {}
    options = {"lr": 0.01, "amsgrad": True, "foreach": False}
    for source in STORAGES:
        params, state = twin_of(source, range(3))
        plain = {n: Plain(source, params[n], state.leaves[n]) for n in params}
        found = read_state_dict(Path(folder, source))
        wrong = difference(found, torch.load(Path(folder, f"{source}.pt")))
        wrong = [text for text in wrong if "param_names" not in text]
        start = {n: nn.Parameter(one.value.clone()) for n, one in plain.items()}
        other = torch.optim.AdamW(start.values(), **options)
        other.load_state_dict(found)
        for (name, one), entries in zip(plain.items(), other.state.values(), strict=True):
            for field, value in one.fields.items():
                wrong += [] if same(entries[field], value) else [f"{name}: {field}"]
        # Back from torch's class, cut among ranks, into the storage it came from.
        back = made(source, "elements", views=False, start=params)
        back.load_state_dict(other.state_dict())
        wrong += [
            f"back: {text}"
            for text in wrong_state(back, {n: one.as_kept(source) for n, one in plain.items()})
        ]
        # And into torch's class, sharded: the name of the algorithm is all that is the same.
        named = [(n, nn.Parameter(p.to(torch.float32, copy=True))) for n, p in params.items()]
        sharded = ZeroRedundancyOptimizer(named, torch.optim.AdamW, policy="elements", **options)
        sharded.load(Path(folder, source))
        for name, param in start.items():
            param.grad = grads(torch.float32, 3)[name]
        give(sharded, 3)
        other.step()
        sharded.step()
        wrong += [f"torch: {text}" for text in differing(sharded.params, start)]
        seen[source] = wrong
    return seen


def from_class(folder: str) -> dict[str, Any]:
    """A checkpoint of torch's class, into a stored optimizer; and what does not fit."""
    start = values(torch.float32)
    named = [(n, nn.Parameter(p.clone())) for n, p in start.items()]
    options = {"lr": 0.01, "amsgrad": True}
    zero = ZeroRedundancyOptimizer(named, torch.optim.AdamW, **options)
    for step in range(3):
        give(zero, step)
        zero.step()
    zero.save(folder)
    params, state = twin_of("float32", range(3))
    plain = {n: Plain("float32", params[n], state.leaves[n]) for n in params}
    wrong = []
    for storage in STORAGES:
        into = made(storage, "elements", views=False, start=params)
        into.load(folder)
        wrong += wrong_state(into, {n: one.as_kept(storage) for n, one in plain.items()})
    clipped = made(
        stored(chain(clip_by_global_norm(1.0), base()), state="int8"), "greedy", False, params
    )
    other = made(stored(sgd(lr=0.1, momentum=0.9), state="int8"), "greedy", False, params)
    ascends = ZeroRedundancyOptimizer(
        [(n, nn.Parameter(p.clone())) for n, p in start.items()],
        torch.optim.AdamW,
        maximize=True,
        **options,
    )
    give(ascends, 0)
    ascends.step()
    ascends.save(Path(folder, "ascends"))
    into = made("state int8", "greedy", False, params)
    unknown = {"state": {}, "param_groups": [{"params": [*range(len(SHAPES))], "trust": True}]}
    before = {name: param.detach().clone() for name, param in into.params.items()}
    return {
        "wrong": wrong,
        "clipped": raised(clipped.load, folder),
        "other": raised(other.load, folder),
        "ascends": raised(into.load, Path(folder, "ascends")),
        "maximize": into.param_groups[0]["maximize"],
        "unknown": raised(into.load_state_dict, unknown),
        "unchanged": differing(into.params, before),
    }


def elsewhere(folder: str) -> dict[str, Any]:
    """All of it while torch makes tensors on another device, unless it is told where."""
    params, state = twin_of("state int8", range(3))
    plain = {n: Plain("state int8", params[n], state.leaves[n]) for n in params}
    wanted = {n: one.as_kept("state int8") for n, one in plain.items()}
    zero = made("state int8", "elements", views=True, start=values(torch.float32))
    other = made("state int8", "greedy", views=False, start=params)
    given = [grads(torch.float32, step) for step in range(3)]
    with torch.device("meta"):
        for step in range(3):
            for name, param in zero.params.items():
                param.grad = given[step][name].clone()
            zero.clip_grad_norm_(1e9)
            zero.step()
        zero.save(folder)
        other.load(folder)
        zero.consolidate_state_dict(to=1)
        if dist.get_rank() == 1:
            found = zero.state_dict()
            whole = read_state_dict(folder)
        wrong = wrong_state(other, wanted)
    if dist.get_rank() == 1:
        wrong += difference(found["state"], whole["state"])
        other.load_state_dict(found)
        wrong += wrong_state(other, wanted)
    return {"wrong": wrong}
