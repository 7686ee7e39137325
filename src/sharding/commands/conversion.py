"""Conversion of optimizer checkpoints between formats, without the values of the model."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from functional_optim import Optimizer, TorchOptimizer, as_functional_optim
from functional_optim.commands.objects import load_object, optimizer_factory
from functional_optim.engine.messages import format_names
from functional_optim.engine.recipes import is_optimizer_class
from functional_optim.engine.stages import refuse_closure
from functional_optim.engine.states import has_begun, starts_as_param
from functional_optim.storage.conversion import plain_form
from sharding.checkpoint.old_format import OldCheckpoint
from sharding.commands.checkpoints import StateDict, names_in
from sharding.sources import SAFETENSORS
from sharding.spec import ParameterSpec, Specs
from sharding.transport.local import LocalWorld
from sharding.zero.old_checkpoint import distributed_state_dict_of
from sharding.zero.optimizer import ZeroRedundancyOptimizer

Groups = Sequence[Sequence[str]]
"""The names of the parameters of each group."""


class TargetOptimizer(NamedTuple):
    """The optimizer that will load the result."""

    source: Any
    """A torch.optim class, or an Optimizer."""
    options: Mapping[str, Any]
    """Keyword arguments of the class; empty for an Optimizer."""

    @property
    def optimizer(self) -> Optimizer:
        """The Optimizer, or the equivalent of the class."""
        if isinstance(self.source, Optimizer):
            return self.source
        found: Optimizer = as_functional_optim(self.source, **self.options)
        return found


class ModelParams(NamedTuple):
    """The parameters of a checkpoint: names, shapes and groups."""

    specs: Mapping[str, ParameterSpec]
    groups: Groups

    def params(self) -> list[dict[str, Any]]:
        """Return parameter groups of zeros."""

        def zeros(name: str) -> nn.Parameter:
            spec = self.specs[name]
            return nn.Parameter(torch.zeros(spec.shape, dtype=spec.dtype))

        return [{"params": [(name, zeros(name)) for name in names]} for names in self.groups]


def find_target(source: str, options: Mapping[str, Any]) -> TargetOptimizer:
    """Return the target of a name: see :func:`optimizer_factory`.

    Raises:
        ValueError: the name is invalid, or the class has no functional equivalent.
        ImportError: the module cannot be imported.
    """
    found = load_object(source) if ":" in source else None
    if is_optimizer_class(found):
        refuse_closure(as_functional_optim(found, **options), "convert")
        return TargetOptimizer(found, options)
    return TargetOptimizer(optimizer_factory(source)(**options), {})


def params_of_file(state_dict: StateDict, model: Specs, source: str) -> ModelParams:
    """Return the parameters of a state dict, with the names and shapes of a model.

    Args:
        state_dict: the state dict. Its ``param_names``, if any, are names of the model.
        model: the parameters of the model, in the order of ``model.parameters()``.
        source: of the model. A safetensors file does not have the order of ``model.parameters()``.
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
        raise ValueError(
            f"the file has {format_names(missing)}, and the model has not; name the model that "
            "was trained"
        )
    named = sum(map(len, groups))
    if named != sum(counts):
        raise ValueError(f"the file has {sum(counts)} parameters and {named} names; it is damaged")
    return ModelParams(specs, groups)


def params_of_old(old: OldCheckpoint, model: Specs | None) -> ModelParams:
    """Return the parameters of a checkpoint that ``ZeroRedundancyOptimizer.save`` wrote.

    The model gives the dtypes. Without a model, parameters are float32.
    """
    specs = {path: ParameterSpec(path, shape) for path, shape in old.parameters.items()}
    if model is not None:
        given = {spec.path: spec for spec in model}
        for path, spec in specs.items():
            if path not in given or given[path].shape != spec.shape:
                there = f"in shape {given[path].shape}" if path in given else "not at all"
                raise ValueError(
                    f"the checkpoint has {path!r} in shape {spec.shape}, the model has it {there}; "
                    "name the model that was trained"
                )
        specs = {path: given[path] for path in specs}
    return ModelParams(specs, [list(group["params"]) for group in old.groups])


def convert_state_dict(
    state_dict: StateDict, target: TargetOptimizer, layout: ModelParams
) -> StateDict:
    """Return a state dict in the form of the target's ``state_dict()``.

    For a torch.optim class, it has the options of that class. For an Optimizer, it is the state
    dict of ``TorchOptimizer``, with the values that the storages of the optimizer have.

    Raises:
        ValueError: the state does not match the target.
    """
    check_no_values_needed(state_dict, target, layout)
    if isinstance(target.source, Optimizer):
        optimizer = TorchOptimizer(layout.params(), target.source)
        optimizer.load_state_dict(state_dict)
        return optimizer.state_dict()
    zero = _load_on_one_rank(state_dict, target, layout)
    zero.consolidate_state_dict()
    found: StateDict = zero.state_dict()
    return found


def sharded_state_dict(
    state_dict: StateDict, target: TargetOptimizer, layout: ModelParams
) -> StateDict:
    """Return a state dict in the form of ZeRO over the target: by name, with state in float32.

    Raises:
        ValueError: the state does not match the target.
    """
    check_no_values_needed(state_dict, target, layout)
    return _rename_params(_load_on_one_rank(state_dict, target, layout).state_dict(), layout.groups)


def old_state_dict(old: OldCheckpoint, layout: ModelParams) -> StateDict:
    """Convert an old checkpoint to the present format of ZeRO, with the names of a layout."""
    return _rename_params(distributed_state_dict_of(old), layout.groups)


def _rename_params(state_dict: StateDict, names: Groups) -> StateDict:
    """Return a state dict with names in place of the keys of parameters."""
    groups = [
        {**group, "params": list(own)}
        for group, own in zip(state_dict["param_groups"], names, strict=True)
    ]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    by_key = dict(zip(keys, (name for own in names for name in own), strict=True))
    states = {by_key[key]: entries for key, entries in state_dict["state"].items()}
    return {"state": states, "param_groups": groups}


def write_folder(state_dict: StateDict, folder: Path) -> None:
    """Save a state dict with ``torch.distributed.checkpoint``, under the key "optim"."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415  slow to import

    from sharding.storage import ChecksumWriter  # noqa: PLC0415  slow to import

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save({"optim": state_dict}, storage_writer=ChecksumWriter(folder), no_dist=True)
    except dcp.CheckpointException as error:
        (why, _), *_ = error.failures.values()
        raise why from error


def add_target_options(
    state_dict: StateDict, target: TargetOptimizer
) -> tuple[StateDict, list[str]]:
    """Add hyper-parameters that groups lack, with the values of an Optimizer.

    Returns:
        The state dict, and the names of the added hyper-parameters.
    """
    if not isinstance(target.source, Optimizer) or target.source.is_composed:
        return state_dict, []
    own = target.source.hyper
    groups = state_dict["param_groups"]
    lacking = [name for name in own if any(name not in group for group in groups)]
    added = {name: own[name] for name in lacking}
    return {**state_dict, "param_groups": [{**added, **group} for group in groups]}, lacking


def check_no_values_needed(
    state_dict: StateDict, target: TargetOptimizer, layout: ModelParams
) -> None:
    """Check that the result does not depend on the values of the parameters."""
    names = [name for names in layout.groups for name in names]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    for name, number in zip(names, numbers, strict=True):
        spec = layout.specs[name]
        entries = state_dict["state"].get(number, {})
        chain = target.optimizer.chain_at((name,), spec.shape)
        leaf = (chain.stages, chain.hypers, spec.shape, spec.dtype)
        absent = [extra for extra in plain_form(*leaf).extras if extra not in entries]
        if absent or (not has_begun(entries) and any(map(any, starts_as_param(*leaf)))):
            what = f"its {absent[0]}" if absent else "its first state"
            raise ValueError(
                f"{name!r}: {what} is made of the parameter's values, which no optimizer's "
                "checkpoint has; load the module and this checkpoint in Python, and save again"
            )


def _load_on_one_rank(state_dict: StateDict, target: TargetOptimizer, layout: ModelParams) -> Any:
    """Return a ZeroRedundancyOptimizer of one rank, with a loaded state dict."""
    (group,) = LocalWorld(1).groups
    zero = ZeroRedundancyOptimizer(layout.params(), target.source, group, **target.options)
    zero.load_state_dict(state_dict)
    return zero
