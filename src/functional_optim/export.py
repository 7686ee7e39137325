"""``export_step``: an optimizer's update as a program that runs without this package."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from functional_optim.checks import check_params, check_writable
from functional_optim.export_coefficients import choose
from functional_optim.export_hyper import all_slots, choices, filled, slotted
from functional_optim.export_manifest import (
    LISTS,
    Entry,
    LeafEntries,
    example,
    hyper_entry,
    leaf_entries,
    manifest,
    require_fits,
)
from functional_optim.export_package import require_place, write_package
from functional_optim.export_program import LeafPlan, StepProgram, exported, state_tensors
from functional_optim.forms import real_view
from functional_optim.optimizer import Optimizer
from functional_optim.overrides import paths_of
from functional_optim.state import State
from functional_optim.tree import flatten, flatten_like, leaf_states, path_name

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
        ()
        >>> params["w"], state.leaves["w"].step
        (tensor([0.7500, 0.7500]), tensor(1))
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
        """What to call the program with: the tensors of these trees themselves, in five lists.

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
