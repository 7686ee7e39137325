"""Pure steps of small trees by steps in place: on copies that stay where they are.

A step in place knows its tree by where it lies, and what it does is found out once. A pure step
makes new tensors each time. So what is given is copied to where a tree like it was stepped before,
stepped there, and copied from there: two calls for all tensors. It is for what has no plan of its
own (see :mod:`functional_optim.plan.pure_plans`): steps that are decided as a whole, and those that
measure. Since the copies are kept, it is for trees of which they are small.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import foreach_clone, foreach_copy_
from functional_optim.core.chain import Chain
from functional_optim.core.hyper import is_plain
from functional_optim.core.state import State
from functional_optim.kernels import EXECUTORS
from functional_optim.native import LOOPS, Loops
from functional_optim.plan.flat_tree import FlatTree
from functional_optim.plan.pure_plans import Unflatten, without_derivative

MOST = 1 << 20
"""Elements of a tree, with its state, up to which copies of it are kept."""

TREES = 8
"""Of how many trees."""

StepInPlace = Callable[[Any, Any, State], object]
"""Takes parameters, gradients and the state, and writes to the first and the last."""


class _Copies:
    """A tree and its state, stepped for others that are like them.

    Args:
        namespace: of optree.
        given: an example of parameters, gradients and state.
        tree: the same.
        copies: of its tensors.
        loops: that look at tensors.
    """

    def __init__(
        self,
        namespace: str,
        given: tuple[Any, Any, State],
        tree: FlatTree,
        copies: Sequence[Tensor],
        loops: Loops,
    ) -> None:
        self._tree, self._like = tree.without_tensors(), loops.remember(tree.tensors)
        self._unflatten = Unflatten(namespace, given, tree)
        self._copies = list(copies)
        self._params, self._state = self._unflatten.of(self._copies)

    def is_for(self, tree: FlatTree, loops: Loops) -> bool:
        """Return True if a tree is like this one."""
        mine = self._tree
        return (
            mine.spec == tree.spec
            and mine.state_form == tree.state_form
            and loops.hold(self._like, tree.tensors, False)
        )

    def step(self, tree: FlatTree, grads: Any, step: StepInPlace) -> tuple[Any, State]:
        """The step of a tree that is like it."""
        with torch.no_grad():
            foreach_copy_(self._copies, tree.tensors)
            step(self._params, grads, self._state)
            return self._unflatten.of(list(foreach_clone(self._copies)))


_KEPT: list[_Copies] = []
"""The last one that was used is the first; what is in use is not there."""
_LOCK = Lock()


def make(
    optimizer: Chain, given: tuple[Any, Any, State], step: StepInPlace
) -> tuple[Any, State] | None:
    """A pure step: new parameters, and the new state.

    Args:
        optimizer: with the hyper-parameters of this step.
        given: parameters, gradients, and the state.
        step: makes it in place; what it raises, a pure step raises, and nothing was changed.

    Returns:
        None where it is not for such a step: a derivative may be wanted, a hyper-parameter is no
        number, a gradient is missing, the executor is not exact or steps no copies, tensors are
        elsewhere than on the CPU, have gaps or are large.
    """
    if torch.is_inference_mode_enabled():
        return None
    executor = EXECUTORS[optimizer.executor]
    if not (executor.steps_copies and executor.exact and _is_fixed(optimizer)):
        return None
    tree = without_derivative(optimizer.namespace, given)
    if tree is None or tree.missing or not tree.is_plain:
        return None
    loops = LOOPS.get(len(tree.tensors))
    if loops is None or sum(map(Tensor.numel, tree.tensors)) > MOST:
        return None
    copies = _taken(tree, loops) or _made(optimizer.namespace, given, tree, loops)
    if copies is None:
        return None
    made = copies.step(tree, given[1], step)  # where it raises, what is in them is not known
    with _LOCK:
        _KEPT.insert(0, copies)
        del _KEPT[TREES:]
    return made


def _is_fixed(optimizer: Chain) -> bool:
    """Return True if all hyper-parameters are numbers.

    A tensor, or what a schedule is made of, may carry a derivative, or stand for the numbers of a
    population.
    """
    every = [link.hyper for link in optimizer.links]
    every += [(value,) for _, changes in optimizer.overrides for *_, value in changes]
    return all(map(is_plain, every))


def _taken(tree: FlatTree, loops: Loops) -> _Copies | None:
    """Copies of a tree like this one, which nobody else has now; None where there are none."""
    with _LOCK:
        for k, one in enumerate(_KEPT):
            if one.is_for(tree, loops):
                return _KEPT.pop(k)
    return None


def _made(
    namespace: str, given: tuple[Any, Any, State], tree: FlatTree, loops: Loops
) -> _Copies | None:
    """Copies of a tree; None of one that is not copied as it lies."""
    tensors = tree.tensors
    if len(set(map(id, tensors))) < len(tensors) or not all(map(_IS_CPU, tensors)):
        return None
    with torch.no_grad():
        copies = foreach_clone(tensors)
    if [one.stride() for one in copies] != [one.stride() for one in tensors]:
        return None
    return _Copies(namespace, given, tree, copies, loops)


_IS_CPU = attrgetter("is_cpu")
