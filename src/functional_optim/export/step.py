"""``export_step``: an optimizer step as a program that runs without this package."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.chain import require_one_dense_chain
from functional_optim.core.checks import check_writable
from functional_optim.core.constructor_calls import format_stage
from functional_optim.core.hyper_inputs import (
    InputHypers,
    build_input_hypers,
    collect_inputs,
    static_options,
)
from functional_optim.core.local_shards import check_no_dtensor
from functional_optim.core.overrides import shape_of
from functional_optim.core.selectors import is_selected
from functional_optim.core.state import State, state_tensors
from functional_optim.core.tree import Path as TreePath
from functional_optim.core.tree import flatten, flatten_like, leaf_states, path_name
from functional_optim.core.views import real_view
from functional_optim.export.manifest import (
    INPUT_LISTS,
    Entry,
    LeafEntries,
    build_manifest,
    check_tensor,
    example_inputs,
    leaf_entries,
    order_entries,
)
from functional_optim.export.package import check_path, write_package
from functional_optim.export.program import LeafPlan, StepProgram, trace, unused_inputs
from functional_optim.optimizer import Optimizer
from functional_optim.plan.fed_coefficients import INTERPRETED, choose
from functional_optim.plan.tree import params_of

Arguments = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
"""The arguments of a program: params, grads, states, steps, hyper."""


@dataclass(frozen=True, eq=False)
class ExportedStep:
    """An exported step, in the process that exported it.

    Example::

        >>> import torch
        >>> from functional_optim import sgd
        >>> params = {"w": torch.ones(2)}
        >>> state = sgd(lr=0.5).init(params)
        >>> step = export_step(sgd(lr=0.5), params)
        >>> run = step.program.module()
        >>> run(*step.arguments(params, {"w": torch.ones(2)}, state, lr=0.25))
        ([tensor(1)],)
        >>> params["w"]
        tensor([0.7500, 0.7500])
    """

    program: Any
    """The torch.export.ExportedProgram."""
    manifest: dict[str, Any]
    """The manifest, which is also stored in the package and in a file next to it."""
    path: Path | None
    """The path of the package; None if it was not written."""
    entries: tuple[Entry, ...]
    """All inputs, in the order of the flattened lists."""
    namespace: str = ""
    """The optree namespace of the tree of params."""

    def arguments(self, params: Any, grads: Any, state: State, **hyper: float) -> Arguments:
        """Return the arguments of the program: the tensors of these trees, in five lists.

        A program in place writes into params and state through these tensors. To run the program
        elsewhere, save the lists with torch.save.

        Args:
            params: the exported tree, or a tree with the same structure.
            grads: a gradient for every parameter.
            state: of these params.
            hyper: numbers that differ from those at export, by name (``**{"betas[0]": 0.8}``).

        Returns:
            ``(params, grads, states, steps, hyper)``.

        Raises:
            TypeError: a number that is not an input, or a value that is not a tensor.
            ValueError: another tree; or a tensor whose shape, dtype or device differs from the
                exported one.
        """
        leaves, spec = flatten(params, self.namespace)
        kept = [i for i, leaf in enumerate(leaves) if leaf is not None]
        every_grad = flatten_like(spec, grads, "gradients")
        states = leaf_states(spec, state)
        known: dict[str, Any] = self.manifest["hyper"]
        for name in hyper:
            if name not in known:
                raise TypeError(
                    f"{name!r} is not an input of this program; its inputs are "
                    f"{', '.join(known) or 'none'}, and it was exported with "
                    f"{name}={self.manifest['fixed'].get(name, 'nothing of that name')}"
                )
        fed = {**known, **hyper}
        made: Arguments = (
            [_as_program_input(leaves[i]) for i in kept],
            [_as_program_input(every_grad[i]) for i in kept],
            [_as_program_input(tensor) for i in kept for tensor in state_tensors(states[i].stages)],
            [states[i].step for i in kept],
            [torch.tensor(float(fed[name]), dtype=torch.float64) for name in known],
        )
        for name, tensors in zip(INPUT_LISTS, made, strict=True):
            wanted = [entry for entry in self.entries if entry.list == name]
            if len(wanted) != len(tensors):
                raise ValueError(
                    f"{name}: {len(tensors)} tensors, the program was exported for {len(wanted)}; "
                    "pass the same trees, or export a program for these"
                )
            for entry, tensor in zip(wanted, tensors, strict=True):
                check_tensor(entry, tensor)
        return made


def _as_program_input(tensor: Any) -> Any:
    return real_view(tensor.detach()) if isinstance(tensor, Tensor) else tensor


def export_step(
    optimizer: Optimizer,
    params: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    inputs: Sequence[str] | None = None,
    in_place: bool = True,
    dynamic: bool = False,
) -> ExportedStep:
    """Export an optimizer's update as a program that runs without this package or Python.

    ``step(params, grads, states, steps, hyper)`` makes one whole step, including coefficients:
    ``params, states = rule(params, grads, states, coefficients(steps + 1, hyper))``, and ``steps =
    steps + 1``. Each argument is a list of tensors:

    - params: the parameters, in the order of :func:`functional_optim.leaf_paths`, without None
      leaves. Complex parameters, gradients and states are passed as ``torch.view_as_real``.
    - grads: their dense gradients. Every call steps every leaf.
    - states: the tensors of the state, leaf by leaf, as the manifest names them.
    - steps: a 0-d int64 tensor for each leaf: the number of its steps.
    - hyper: a 0-d float64 tensor for each input number, such as this step's ``lr``. Bounds are
      checked at export only. Flags, whole numbers, numbers that decide a choice (a momentum of 0
      keeps no buffer) and numbers that no step reads are fixed in the program.

    The manifest (JSON) lists every input in order: its name, shape, strides, dtype and device, the
    initial value of a state, and the value of a number at export. It is written to ``<path>.json``,
    and is part of the package, as the extra file ``manifest.json``.

    In an environment without this package::

        step = torch.export.load("step.pt2").module()
        with torch.no_grad():
            step(params, grads, states, steps, hyper)

    Args:
        optimizer: any chain; its executor is ignored.
        params: a pytree of parameters. Their shapes and layouts are used, not their values.
        path: of the package, ending in ``.pt2``; None writes nothing. torch.export.load reads it,
            and torch's interpreter runs it, bit for bit like the reference executor.
        inputs: names of the numbers that are inputs (``lr``, ``betas[0]``, ``override_0.lr``); all
            other numbers are fixed. None for all that can be inputs.
        in_place: True to write into params, states and steps, and return ``(steps,)``; False to
            return new ``(params, states, steps)``.
        dynamic: True for dynamic lengths, from 2 on. All parameters must have one dimension (flat
            buffers).

    Returns:
        An :class:`ExportedStep`.

    Raises:
        ValueError: a schedule (pass its value at each step instead); an unknown input; an input
            that decides a choice; a path without ``.pt2``; parameters that :meth:`Optimizer.init`
            or ``update_`` refuse.
        TypeError: a rule or its coefficients cannot be traced; the error names the rule.
        OSError: the path cannot be written.

    Example::

        >>> import tempfile, torch
        >>> from functional_optim import adamw
        >>> params = {"w": torch.ones(2), "frozen": None}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = export_step(adamw(lr=0.1), params, f"{folder}/step.pt2")
        ...     step = torch.export.load(f"{folder}/step.pt2").module()
        >>> list(made.manifest["hyper"])
        ['lr', 'weight_decay', 'betas[0]', 'betas[1]', 'eps']
        >>> w, grad = torch.ones(2), torch.tensor([3.0, -2.0])
        >>> averages = [torch.zeros(2), torch.zeros(2)]
        >>> numbers = [torch.tensor(v, dtype=torch.float64) for v in (0.1, 0.0, 0.9, 0.999, 1e-8)]
        >>> step([w], [grad], averages, [torch.tensor(0)], numbers)
        ([tensor(1)],)
        >>> w
        tensor([0.9000, 1.1000])

    Reference:
        Ansel et al., "PyTorch 2: faster machine learning through dynamic Python bytecode
        transformation and graph compilation", ASPLOS 2024.
    """
    require_one_dense_chain(optimizer, "export_step")
    target = None if path is None else check_path(path)
    kept = _params_by_path(optimizer, params)
    places = [(at, shape_of(leaf)) for at, leaf in kept.items()]
    hypers = build_input_hypers(optimizer.links, optimizer.overrides, places)
    numbers = collect_inputs(hypers)
    found = [
        leaf_entries(optimizer.stages, own, leaf, path_name(at), dynamic=f"n{i}" if dynamic else "")
        for i, ((at, leaf), own) in enumerate(zip(kept.items(), hypers, strict=True))
    ]
    program, entries = _trace(
        optimizer, list(zip(found, hypers, strict=True)), inputs, in_place=in_place
    )
    fed = {entry.name: numbers[entry.name] for entry in entries if entry.list == "hyper"}
    rest = {name: value for name, value in numbers.items() if name not in fed}
    facts = build_manifest(
        entries,
        fed,
        {**rest, **static_options(optimizer.links, optimizer.overrides)},
        chain=" -> ".join(map(format_stage, optimizer.links)),
        in_place=in_place,
        overrides=_override_names(optimizer, kept),
    )
    if target is not None:
        write_package(program, target, facts)
    return ExportedStep(program, facts, target, entries, optimizer.namespace)


def _trace(
    optimizer: Optimizer,
    leaves: Sequence[tuple[LeafEntries, InputHypers]],
    inputs: Sequence[str] | None,
    *,
    in_place: bool,
) -> tuple[Any, tuple[Entry, ...]]:
    """Return the program and its inputs, without the numbers that the program does not read."""
    groups = list({id(own): own for _, own in leaves}.values())
    asked = inputs
    while True:
        chosen = choose(optimizer.stages, groups, INTERPRETED, list(collect_inputs(groups)), asked)
        of_group = {id(own): made for own, made in zip(groups, chosen.ways, strict=True)}
        plans = [LeafPlan(one.param.name, one.state, own, of_group[id(own)]) for one, own in leaves]
        step = StepProgram(optimizer.stages, plans, chosen.inputs, in_place=in_place)
        entries = order_entries([one for one, _ in leaves], chosen.inputs)
        program = trace(step, *example_inputs(entries))
        spare = unused_inputs(program, chosen.inputs)
        if not spare:
            return program, entries
        if inputs is not None:
            raise ValueError(
                f"inputs: {spare[0]} cannot be fed, since no step of this chain reads it as it is "
                "set: leave it out"
            )
        asked = [name for name in chosen.inputs if name not in spare]


def _params_by_path(optimizer: Optimizer, params: Any) -> dict[TreePath, Tensor]:
    leaves, _, paths = params_of(optimizer, params)
    kept = {at: leaf for at, leaf in zip(paths, leaves, strict=True) if leaf is not None}
    named = {path_name(at): leaf for at, leaf in kept.items()}
    check_no_dtensor(named, "an exported step")
    check_writable(named)
    for at, leaf in kept.items():
        if leaf.device.type == "meta":
            raise ValueError(
                f"the parameter at {path_name(at)!r} is on the meta device, and a program is made "
                "for the device of its parameters: put it there (torch.empty_like will do)"
            )
    return kept


def _override_names(optimizer: Optimizer, kept: Mapping[TreePath, Tensor]) -> dict[str, list[str]]:
    """Return the names of the leaves that each override selects."""
    return {
        f"override_{k}": [
            path_name(at) for at, leaf in kept.items() if is_selected(where, at, shape_of(leaf))
        ]
        for k, (where, _) in enumerate(optimizer.overrides)
    }
