"""``export_step``: an optimizer's update as a program that runs without this package."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from functional_optim.core.chain import require_one_dense_chain
from functional_optim.core.checks import check_writable
from functional_optim.core.local_shards import check_whole
from functional_optim.core.overrides import shape_of
from functional_optim.core.selectors import applies
from functional_optim.core.slots import Slotted, all_slots, choices, slotted
from functional_optim.core.spelling import format_stage
from functional_optim.core.state import State, state_tensors
from functional_optim.core.tree import Path as TreePath
from functional_optim.core.tree import flatten, flatten_like, leaf_states, path_name
from functional_optim.core.views import real_view
from functional_optim.export.manifest import (
    LISTS,
    Entry,
    LeafEntries,
    examples,
    in_lists,
    leaf_entries,
    manifest,
    require_fits,
)
from functional_optim.export.package import require_place, write_package
from functional_optim.export.program import LeafPlan, StepProgram, exported, unread
from functional_optim.optimizer import Optimizer
from functional_optim.plan.fed_coefficients import COMPILED, INTERPRETED, choose
from functional_optim.plan.items import params_of

Package = Literal["export", "aoti"]

Arguments = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
"""params, grads, states, steps, hyper: what a program is called with."""


@dataclass(frozen=True, eq=False)
class ExportedStep:
    """An exported step, on the side where it was made.

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
    """What stands in the package and beside it."""
    path: Path | None
    """Of the package; None if it was not written."""
    entries: tuple[Entry, ...]
    """All inputs, in the order of the flattened lists."""
    namespace: str = ""
    """Of optree, of the tree of params."""

    def arguments(self, params: Any, grads: Any, state: State, **hyper: float) -> Arguments:
        """Return the arguments of the program: the tensors of these trees, in five lists.

        A program in place writes into params and state through them. To run it elsewhere, save
        the lists with torch.save.

        Args:
            params: the tree that was exported with, or one like it.
            grads: a gradient for every parameter.
            state: of these params.
            hyper: numbers to feed other than those at export, by name (``**{"betas[0]": 0.8}``).

        Returns:
            ``(params, grads, states, steps, hyper)``.

        Raises:
            TypeError: a number that is no input; something that is no tensor.
            ValueError: another tree; a tensor of another shape, dtype, device or (for "aoti")
                layout than the program was exported for.
        """
        leaves, spec = flatten(params, self.namespace)
        kept = [i for i, leaf in enumerate(leaves) if leaf is not None]
        every_grad = flatten_like(spec, grads, "gradients")
        states = leaf_states(spec, state)
        known: dict[str, Any] = self.manifest["hyper"]
        for name in hyper:
            if name not in known:
                raise TypeError(
                    f"{name!r} is no input of this program; its inputs are "
                    f"{', '.join(known) or 'none'}, and it was exported with "
                    f"{name}={self.manifest['fixed'].get(name, 'nothing of that name')}"
                )
        fed = {**known, **hyper}
        made: Arguments = (
            [_seen(leaves[i]) for i in kept],
            [_seen(every_grad[i]) for i in kept],
            [_seen(tensor) for i in kept for tensor in state_tensors(states[i].stages)],
            [states[i].step for i in kept],
            [torch.tensor(float(fed[name]), dtype=torch.float64) for name in known],
        )
        strides = self.manifest["package"] == "aoti"
        for name, tensors in zip(LISTS, made, strict=True):
            wanted = [entry for entry in self.entries if entry.list == name]
            if len(wanted) != len(tensors):
                raise ValueError(
                    f"{name}: {len(tensors)} tensors, the program was exported for {len(wanted)}"
                )
            for entry, tensor in zip(wanted, tensors, strict=True):
                require_fits(entry, tensor, strides=strides)
        return made


def _seen(tensor: Any) -> Any:
    return real_view(tensor.detach()) if isinstance(tensor, Tensor) else tensor


def export_step(
    optimizer: Optimizer,
    params: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    package: Package = "export",
    inputs: Sequence[str] | None = None,
    in_place: bool = True,
    dynamic: bool = False,
) -> ExportedStep:
    """The update of an optimizer as a program that runs without this package, or without Python.

    ``step(params, grads, states, steps, hyper)`` does all of one step, coefficients included:
    ``params, states = rule(params, grads, states, coefficients(steps + 1, hyper))``, and
    ``steps = steps + 1``. Each argument is a list of tensors:

    - params: the parameters, in the order of :func:`functional_optim.leaf_paths`; None leaves have
      no place. Complex ones as ``torch.view_as_real`` shows them, and so everything of theirs.
    - grads: their gradients, dense. Every leaf is stepped at every call.
    - states: the tensors of the state, leaf by leaf, as the manifest names them.
    - steps: a 0-d int64 tensor for each leaf: the steps it has made.
    - hyper: a 0-d float64 tensor for each number that is fed, such as this step's ``lr``. Bounds
      are checked at export only. Flags, whole numbers, numbers that decide a choice (a momentum
      of 0 keeps no buffer) and numbers that no step reads are fixed in the program.

    The manifest (JSON) says for every input, in order, its name, shape, strides, dtype and
    device, for a state what it is before the first step, for a number its value at export. It is
    written as ``<path>.json`` and stands in the package: with "export" as the extra file
    ``manifest.json``, with "aoti" as ``get_metadata()["manifest"]``.

    Where no Python of this package is::

        step = torch.export.load("step.pt2").module()            # package="export"
        step = torch._inductor.aoti_load_package("step.pt2")     # package="aoti"
        with torch.no_grad():
            step(params, grads, states, steps, hyper)

    Args:
        optimizer: any chain; its executor does not matter.
        params: a pytree of parameters: their shapes and layouts are used, not their values.
        path: where to write, ending in ``.pt2``; None (with "export" only) writes nothing.
        package: "export" for a program that torch.export.load reads and torch's interpreter runs:
            bit for bit the reference executor. "aoti" for machine code by AOTInductor: for
            processors like this one (C++ hosts included) and for the layouts in the manifest. It
            rounds apart by some units in the last place. It does not check what it is given: let
            :meth:`ExportedStep.arguments` check, or set AOTI_RUNTIME_CHECK_INPUTS=1. It needs a
            C++ compiler, and compiles for seconds, for many leaves for minutes: one flat buffer
            instead of them compiles and runs faster.
        inputs: names of the numbers to feed (``lr``, ``betas[0]``, ``override_0.lr``), the
            others being fixed; None for all that can be.
        in_place: write into params, states and steps, and return ``(steps,)``; otherwise return
            new ``(params, states, steps)``.
        dynamic: for parameters of one dimension (flat buffers): their lengths are free, from 2 on.

    Returns:
        An :class:`ExportedStep`.

    Raises:
        ValueError: a schedule (feed its value at each step instead); an unknown package or input;
            an input that decides a choice; "aoti" without a path; a path without ``.pt2``;
            parameters as :meth:`Optimizer.init` or ``update_`` refuse them.
        TypeError: a rule or its coefficients that cannot be traced; it is named.
        OSError: a path that cannot be written to. All of these come before anything is compiled.

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
    target = _checked(path, package)
    kept = _kept(optimizer, params)
    places = [(at, shape_of(leaf)) for at, leaf in kept.items()]
    hypers = slotted(optimizer.links, optimizer.overrides, places)
    numbers = all_slots(hypers)
    found = [
        leaf_entries(optimizer.stages, own, leaf, path_name(at), dynamic=f"n{i}" if dynamic else "")
        for i, ((at, leaf), own) in enumerate(zip(kept.items(), hypers, strict=True))
    ]
    program, entries = _traced(
        optimizer, list(zip(found, hypers, strict=True)), package, inputs, in_place=in_place
    )
    fed = {entry.name: numbers[entry.name] for entry in entries if entry.list == "hyper"}
    rest = {name: value for name, value in numbers.items() if name not in fed}
    facts = manifest(
        entries,
        fed,
        {**rest, **choices(optimizer.links, optimizer.overrides)},
        chain=" -> ".join(map(format_stage, optimizer.links)),
        package=package,
        in_place=in_place,
        overrides=_overridden(optimizer, kept),
    )
    if target is not None:
        write_package(program, target, facts, package)
    return ExportedStep(program, facts, target, entries, optimizer.namespace)


def _traced(
    optimizer: Optimizer,
    leaves: Sequence[tuple[LeafEntries, Slotted]],
    package: Package,
    inputs: Sequence[str] | None,
    *,
    in_place: bool,
) -> tuple[Any, tuple[Entry, ...]]:
    """The program and its inputs; numbers that it does not read are none."""
    groups = list({id(own): own for _, own in leaves}.values())
    ways = COMPILED if package == "aoti" else INTERPRETED
    asked = inputs
    while True:
        chosen = choose(optimizer.stages, groups, ways, list(all_slots(groups)), asked)
        of_group = {id(own): made for own, made in zip(groups, chosen.ways, strict=True)}
        plans = [LeafPlan(one.param.name, one.state, own, of_group[id(own)]) for one, own in leaves]
        step = StepProgram(
            optimizer.stages, plans, chosen.inputs, compiled=package == "aoti", in_place=in_place
        )
        entries = in_lists([one for one, _ in leaves], chosen.inputs)
        program = exported(step, *examples(entries))
        spare = unread(program, chosen.inputs)
        if not spare:
            return program, entries
        if inputs is not None:
            raise ValueError(
                f"inputs: {spare[0]} cannot be fed, since no step of this chain reads it as it is "
                "set: leave it out"
            )
        asked = [name for name in chosen.inputs if name not in spare]


def _checked(path: str | os.PathLike[str] | None, package: str) -> Path | None:
    if package not in get_args(Package):
        raise ValueError(f"package must be one of {', '.join(get_args(Package))}, got {package!r}")
    if path is not None:
        return require_place(path)
    if package == "aoti":
        raise ValueError("package='aoti' makes a file: give the path to write it to, got None")
    return None


def _kept(optimizer: Optimizer, params: Any) -> dict[TreePath, Tensor]:
    """The parameters that there are, by path."""
    leaves, _, paths = params_of(optimizer, params)
    kept = {at: leaf for at, leaf in zip(paths, leaves, strict=True) if leaf is not None}
    named = {path_name(at): leaf for at, leaf in kept.items()}
    check_whole(named, "an exported step")
    check_writable(named)
    for at, leaf in kept.items():
        if leaf.device.type == "meta":
            raise ValueError(
                f"the parameter at {path_name(at)!r} is on the meta device, and a program is made "
                "for the device of its parameters: put it there (torch.empty_like will do)"
            )
    return kept


def _overridden(optimizer: Optimizer, kept: Mapping[TreePath, Tensor]) -> dict[str, list[str]]:
    """The names of the leaves that each override is meant for."""
    return {
        f"override_{k}": [
            path_name(at) for at, leaf in kept.items() if applies(where, at, shape_of(leaf))
        ]
        for k, (where, _) in enumerate(optimizer.overrides)
    }
