"""Specs of the parameters of a model."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from functional_optim import Optimizer
from functional_optim.core.stage import Kind
from sharding.spec import ParameterSpec, Specs, check_specs, kind_of
from sharding.steppers import hypers_of, optimizers_of


def specs_of(model: Any, kind: Kind = "pointwise", *, optimizer: Optimizer | None = None) -> Specs:
    """The specs of a model's parameters, in its order.

    Where all parameters are on one device, it stands in the specs without its index, so that
    every rank has the same specs.

    Args:
        model: a module (its parameters may be on the meta device), or tensors by name.
        kind: what the rule that will step them declares; see :class:`ParameterSpec`.
        optimizer: what will step them. Given one, the kind and the blocks of each parameter are
            those that its rule declares, such as ``MatrixBlocks(row_blocks=12)`` of
            ``muon(row_blocks=12)``.

    Returns:
        One :class:`ParameterSpec` for each parameter; a tied one stands once, under its first
        name.

    Raises:
        TypeError: ``model`` is neither.
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
    return with_rules(specs, optimizer)


def with_rules(specs: Specs, optimizer: Optimizer | None) -> Specs:
    """Return specs with the kinds and blocks that the rules of an optimizer declare.

    Args:
        specs: of parameters.
        optimizer: what will step them; None leaves the specs as they are.

    Raises:
        ValueError: the options of a rule do not divide a parameter.
    """
    if optimizer is None:
        return specs
    optimizers = optimizers_of(specs, optimizer)
    own: dict[int, list[int]] = {}
    for place, one in enumerate(optimizers):
        own.setdefault(id(one), []).append(place)
    found = list(specs)
    for places in own.values():
        chain = optimizers[places[0]]
        part = [specs[place] for place in places]
        for place, spec, hypers in zip(places, part, hypers_of(part, chain), strict=True):
            found[place] = replace(spec, kind=kind_of(chain))
            for stage, hyper in zip(chain.stages, hypers, strict=True):
                blocks = None if stage.blocks is None else stage.blocks.of(hyper)
                if blocks is not None and blocks.has_parts:
                    found[place] = replace(spec, kind="per_matrix", blocks=blocks)
    return tuple(found)


def as_specs(given: Any, optimizer: Any = None) -> Specs:
    """The specs that a caller gave, or those of the model given.

    Args:
        given: specs, or a model.
        optimizer: what will step the parameters of a model; their kinds are those of its rules.

    Raises:
        TypeError: what was given is no model and no iterable of specs.
        ValueError: a path that stands twice.
    """
    if isinstance(given, (nn.Module, Mapping)):
        if isinstance(optimizer, Optimizer) and optimizer.is_composed:
            whole = specs_of(given, optimizer=optimizer)
            return tuple(replace(spec, blocks=None) for spec in whole)
        return specs_of(given, kind_of(optimizer))
    if not isinstance(given, Iterable):
        raise TypeError(
            "a plan is made for a torch.nn.Module, a mapping of names to tensors, or an iterable "
            f"of ParameterSpec, got {type(given).__name__}"
        )
    specs = tuple(given)
    check_specs(specs)
    return specs
