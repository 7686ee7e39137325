"""An optimizer's state from one kind of checkpoint to another, without the model's values."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from functional_optim import Optimizer, TorchOptimizer, as_functional_optim
from functional_optim.commands.objects import load_object, optimizer_factory
from functional_optim.core.brief import some
from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.first_state import starts_as_param
from functional_optim.core.overrides import LeafChain
from functional_optim.core.torch_state import has_begun
from functional_optim.frontends.torch_arguments import is_optimizer_class
from functional_optim.storage.plain import plain_form
from sharding.checkpoint.old_format import OldCheckpoint
from sharding.commands.checkpoints import StateDict, names_in
from sharding.sources import SAFETENSORS
from sharding.spec import ParameterSpec, Specs
from sharding.transport.local import LocalWorld
from sharding.zero.optimizer import ZeroRedundancyOptimizer
from sharding.zero.read import distributed_state_dict_of

Groups = Sequence[Sequence[str]]
"""The names of the parameters of each group."""


class TargetOptimizer(NamedTuple):
    """The optimizer that is to load the result."""

    made: Any
    """A torch.optim class, or an Optimizer."""
    options: Mapping[str, Any]
    """Keyword arguments of the class; empty for an Optimizer."""

    @property
    def optimizer(self) -> Optimizer:
        """The Optimizer, or the equivalent of the class."""
        if isinstance(self.made, Optimizer):
            return self.made
        found: Optimizer = as_functional_optim(self.made, **self.options)
        return found


class ModelParams(NamedTuple):
    """The parameters that a checkpoint is about: names, shapes and groups."""

    specs: Mapping[str, ParameterSpec]
    groups: Groups

    def params(self) -> list[dict[str, Any]]:
        """Return parameter groups of zeros, whose memory is not touched."""
        return [
            {"params": [(name, self._zeros(self.specs[name])) for name in names]}
            for names in self.groups
        ]

    def _zeros(self, spec: ParameterSpec) -> nn.Parameter:
        return nn.Parameter(torch.zeros(spec.shape, dtype=spec.dtype))


def target_named(source: str, options: Mapping[str, Any]) -> TargetOptimizer:
    """Return the target that a text names: see :func:`optimizer_factory`.

    Raises:
        ValueError: the text names something else, or a class without a functional equivalent.
        ImportError: the module cannot be imported.
    """
    found = load_object(source) if ":" in source else None
    if is_optimizer_class(found):
        refuse_closure(as_functional_optim(found, **options), "convert")
        return TargetOptimizer(found, options)
    return TargetOptimizer(optimizer_factory(source)(**options), {})


def layout_of_file(state_dict: StateDict, model: Specs, source: str) -> ModelParams:
    """Return the parameters of a state dict: its numbers, with the names and shapes of a model.

    Args:
        state_dict: the state dict. Its ``param_names``, if it has them, are the model's names.
        model: the parameters of the model, in the order of ``model.parameters()``.
        source: where the model is from; the names in a safetensors file have no such order.

    Raises:
        ValueError: the two do not fit, or it is not certain which parameter is which.
    """
    specs = {spec.path: spec for spec in model}
    groups = names_in(state_dict)
    counts = [len(group["params"]) for group in state_dict["param_groups"]]
    if groups is None:
        way_out = (
            "construct the optimizer with model.named_parameters() before you save, so that the "
            "file has the names"
        )
        if len(counts) != 1:
            raise ValueError(
                f"the file has {len(counts)} parameter groups without names, so it is not certain "
                f"which parameter is in which; {way_out}"
            )
        if source.endswith(SAFETENSORS):
            raise ValueError(
                "the file has no names, and a safetensors file does not have the order of "
                f"model.parameters(); name a function that builds the model, or {way_out}"
            )
        if counts[0] != len(specs):
            raise ValueError(
                f"the file has {counts[0]} parameters without names, the model has {len(specs)}; "
                f"{way_out}"
            )
        groups = [list(specs)]
    missing = [name for names in groups for name in names if name not in specs]
    if missing:
        raise ValueError(f"the file has {some(missing)}, and the model has not")
    named = sum(map(len, groups))
    if named != sum(counts):
        raise ValueError(f"the file has {sum(counts)} parameters and {named} names; it is damaged")
    return ModelParams(specs, groups)


def layout_of_old(old: OldCheckpoint, model: Specs | None) -> ModelParams:
    """Return the parameters of a checkpoint that ``ZeroRedundancyOptimizer.save`` wrote.

    Args:
        old: the checkpoint, which has names and shapes.
        model: gives the dtypes, if there is one; without, parameters are float32.

    Raises:
        ValueError: the model does not have a parameter of the checkpoint, or in another shape.
    """
    specs = {path: ParameterSpec(path, shape) for path, shape in old.parameters.items()}
    if model is not None:
        given = {spec.path: spec for spec in model}
        for path, spec in specs.items():
            if path not in given or given[path].shape != spec.shape:
                there = f"in shape {given[path].shape}" if path in given else "not at all"
                raise ValueError(
                    f"the checkpoint has {path!r} in shape {spec.shape}, the model has it {there}"
                )
        specs = {path: given[path] for path in specs}
    return ModelParams(specs, [list(group["params"]) for group in old.groups])


def convert_state_dict(
    state_dict: StateDict, target: TargetOptimizer, layout: ModelParams
) -> StateDict:
    """Return a state dict as the target's ``state_dict()`` has it.

    Of a torch.optim class, it is plain state with the options of that class. Of an Optimizer, it is
    that of ``TorchOptimizer``, in the storages of the optimizer.

    Raises:
        ValueError: the state does not fit the target.
    """
    require_no_values(state_dict, target, layout)
    if isinstance(target.made, Optimizer):
        made = TorchOptimizer(layout.params(), target.made)
        made.load_state_dict(state_dict)
        return made.state_dict()
    zero = _one_rank(target, layout)
    zero.load_state_dict(state_dict)
    zero.consolidate_state_dict()
    found: StateDict = zero.state_dict()
    return found


def sharded_state_dict(
    state_dict: StateDict, target: TargetOptimizer, layout: ModelParams
) -> StateDict:
    """Return a state dict as ZeRO over the target saves it: by name, with state in float32.

    Raises:
        ValueError: the state does not fit the target.
    """
    require_no_values(state_dict, target, layout)
    zero = _one_rank(target, layout)
    zero.load_state_dict(state_dict)
    return _by_name(zero.state_dict(), layout.groups)


def old_state_dict(old: OldCheckpoint, layout: ModelParams) -> StateDict:
    """Return an old checkpoint as ZeRO saves the same state now, with the names of a layout."""
    found = distributed_state_dict_of(old)
    renamed = {
        path: name
        for group, names in zip(old.groups, layout.groups, strict=True)
        for path, name in zip(group["params"], names, strict=True)
    }
    groups = [
        {**group, "params": [renamed[path] for path in group["params"]]}
        for group in found["param_groups"]
    ]
    states = {renamed[path]: entries for path, entries in found["state"].items()}
    return {"state": states, "param_groups": groups}


def _by_name(state_dict: StateDict, names: Groups) -> StateDict:
    """Return a state dict with names in place of numbers."""
    groups = [
        {**group, "params": list(own)}
        for group, own in zip(state_dict["param_groups"], names, strict=True)
    ]
    every = [name for own in names for name in own]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, every, strict=True))
    states = {by_number[number]: entries for number, entries in state_dict["state"].items()}
    return {"state": states, "param_groups": groups}


def write_folder(state_dict: StateDict, folder: Path) -> None:
    """Write a state dict to a folder of ``torch.distributed.checkpoint``, under the key "optim".

    Raises:
        OSError: a file cannot be written.
    """
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415  slow to import

    from sharding.storage import ChecksumWriter  # noqa: PLC0415  slow to import

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save({"optim": state_dict}, storage_writer=ChecksumWriter(folder), no_dist=True)
    except dcp.CheckpointException as error:
        (why, _), *_ = error.failures.values()
        raise why from error


def with_target_options(
    state_dict: StateDict, target: TargetOptimizer
) -> tuple[StateDict, list[str]]:
    """Add the hyper-parameters that the groups lack, with the values of an Optimizer.

    Returns:
        The state dict, and the names of the hyper-parameters that were added.
    """
    if not isinstance(target.made, Optimizer) or target.made.is_composed:
        return state_dict, []
    own = target.made.hyper
    groups = state_dict["param_groups"]
    lacking = [name for name in own if any(name not in group for group in groups)]
    added = {name: own[name] for name in lacking}
    return {**state_dict, "param_groups": [{**added, **group} for group in groups]}, lacking


def require_no_values(state_dict: StateDict, target: TargetOptimizer, layout: ModelParams) -> None:
    """Check that the result does not depend on the values of the parameters, which are not here.

    Raises:
        ValueError: it does: a parameter that was never stepped has a state that starts from its
            values, or the target keeps digits of each parameter that the source does not have.
    """
    names = [name for names in layout.groups for name in names]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    for name, number in zip(names, numbers, strict=True):
        spec = layout.specs[name]
        entries = state_dict["state"].get(number, {})
        chain = target.optimizer.chain_at((name,), spec.shape)
        extras = plain_form(chain.stages, chain.hypers, spec.shape, spec.dtype).extras
        absent = [extra for extra in extras if extra not in entries]
        if absent or (not has_begun(entries) and _starts_from_values(chain, spec)):
            what = f"its {absent[0]}" if absent else "its first state"
            raise ValueError(
                f"{name!r}: {what} is made of the parameter's values, which no optimizer's "
                "checkpoint has; load the module and this checkpoint in Python, and save again"
            )


def _starts_from_values(chain: LeafChain, spec: ParameterSpec) -> bool:
    """Return True if the state before the first step depends on the parameter's values."""
    return any(map(any, starts_as_param(chain.stages, chain.hypers, spec.shape, spec.dtype)))


def _one_rank(target: TargetOptimizer, layout: ModelParams) -> Any:
    """Return a ZeroRedundancyOptimizer of one rank, over all parameters."""
    (group,) = LocalWorld(1).groups
    return ZeroRedundancyOptimizer(layout.params(), target.made, group, **target.options)
