"""Specs of the parameters of a model."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from functional_optim import Optimizer
from functional_optim.engine.stages import Kind
from sharding.optimizer_costs import by_optimizer, hypers_of
from sharding.spec import ParameterSpec, Specs, check_specs, kind_of


def specs_of(model: Any, kind: Kind = "pointwise", *, optimizer: Optimizer | None = None) -> Specs:
    """Return the specs of a model's parameters, in the order of the model.

    If all parameters are on one device, the specs have its type without an index, so that all ranks
    have the same specs.

    Args:
        model: a module (its parameters can be on the meta device), or tensors by name.
        kind: the kind of the parameters' rule; see :class:`ParameterSpec`.
        optimizer: of the parameters. The kind and the blocks of each parameter are then those that
            its rule declares, such as ``MatrixBlocks(row_blocks=12)`` of ``muon(row_blocks=12)``.

    Returns:
        One :class:`ParameterSpec` for each parameter. A tied parameter occurs once, under its first
        name.

    Raises:
        TypeError: ``model`` is neither a module nor a mapping.
        ValueError: the options of a rule do not divide a parameter.

    Example::

        >>> import torch
        >>> from functional_optim import muon
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(2, 3, bias=False)
        >>> [(spec.path, spec.shape) for spec in specs_of(model)]
        [('weight', (3, 2))]
        >>> specs_of(model, optimizer=muon(row_blocks=3))[0].bounds
        [0, 2, 4, 6]
    """
    if isinstance(model, nn.Module):
        named: dict[str, Tensor] = dict(model.named_parameters())
    elif isinstance(model, Mapping) and all(isinstance(one, Tensor) for one in model.values()):
        named = dict(model)
    else:
        raise TypeError(
            "specs are made of a torch.nn.Module or a mapping of names to tensors, got "
            f"{type(model).__name__}"
        )
    devices = {param.device for param in named.values()}
    one_device = len(devices) == 1
    specs = tuple(
        ParameterSpec(
            path,
            tuple(param.shape),
            param.dtype,
            param.device.type if one_device else str(param.device),
            param.requires_grad,
            kind,
        )
        for path, param in named.items()
    )
    return add_kinds(specs, optimizer)


def add_kinds(specs: Specs, optimizer: Optimizer | None) -> Specs:
    """Return specs with the kinds and blocks that the rules of an optimizer declare.

    Raises:
        ValueError: the options of a rule do not divide a parameter.
    """
    if optimizer is None:
        return specs
    found = list(specs)
    for chain, indices in by_optimizer(specs, optimizer):
        part = [specs[index] for index in indices]
        for index, spec, hypers in zip(indices, part, hypers_of(part, chain), strict=True):
            found[index] = replace(spec, kind=kind_of(chain))
            for stage, hyper in zip(chain.stages, hypers, strict=True):
                blocks = None if stage.blocks is None else stage.blocks.of(hyper)
                if blocks is not None and blocks.has_parts:
                    found[index] = replace(spec, kind="per_matrix", blocks=blocks)
    return tuple(found)


def as_specs(source: Any, optimizer: Any = None) -> Specs:
    """Return the specs of an argument: specs, or a model."""
    if isinstance(source, (nn.Module, Mapping)):
        if isinstance(optimizer, Optimizer) and optimizer.is_composed:
            whole = specs_of(source, optimizer=optimizer)
            return tuple(replace(spec, blocks=None) for spec in whole)
        return specs_of(source, kind_of(optimizer))
    if not isinstance(source, Iterable):
        raise TypeError(
            "a plan is made for a torch.nn.Module, a mapping of names to tensors, or an iterable "
            f"of ParameterSpec, got {type(source).__name__}"
        )
    specs = tuple(source)
    check_specs(specs)
    return specs
