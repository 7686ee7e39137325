"""Rule and Transform: the mathematics of an optimizer, on one tensor, and what it needs.

Both are frozen records around pure functions. They know nothing of trees, ranks, devices or
step counts; whoever runs them obeys what they declare (``kind``, ``measure``, ``sparse``).
"""

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from functional_optim.bounds import Interval
from functional_optim.core.blocks import BlockOptions
from functional_optim.core.gate import Gate
from functional_optim.core.hyper import build
from functional_optim.core.leaf_input import LeafInput, require_fields
from functional_optim.core.reserved_names import RESERVED_HYPER, RESERVED_STATE, require_free
from functional_optim.core.spelling import spell_link
from functional_optim.core.stage_defaults import (
    NoState,
    Sparse,
    no_check,
    no_init,
    no_shared,
    refuse_sparse,
    rows_of_sparse,
    same_coefficients,
    takes_dense,
)

__all__ = [
    "Kind",
    "Link",
    "NoState",
    "Rule",
    "Sparse",
    "Stage",
    "Transform",
    "rows_of_sparse",
    "same_coefficients",
]

Kind = Literal["pointwise", "per_matrix"]


class Link(NamedTuple):
    """A stage together with its hyper-parameters: what ``chain`` joins."""

    stage: "Stage"
    hyper: Any
    where: Any = None
    """The leaves it acts on, as for :meth:`Optimizer.override`; None for all of them."""
    label: str = ""
    """Of the part of a :func:`~functional_optim.partition` that it belongs to."""

    def __repr__(self) -> str:
        return spell_link(self)


@dataclass(frozen=True, kw_only=True, repr=False)
class Stage:
    """Base class of :class:`Rule` and :class:`Transform`.

    Call it with its hyper-parameters, by name, to get a :class:`Link` for ``chain``.

    Args:
        name: a short name; it stands in errors and in ``optimizer.hyper``.
        hyper: a NamedTuple class. Fields annotated ``float`` (or a tuple of floats) take a number,
            a 0-d tensor or a schedule; fields annotated ``bool`` are fixed choices. None is called
            ``params``, ``param_names``, ``initial_lr``, ``decoupled_weight_decay`` or ``step``.
        state: a NamedTuple class whose fields are tensors, or ``list[Tensor]`` for a field that
            only some options or shapes need (``[]`` or ``[tensor]``, or one for each side of a
            matrix); :data:`NoState` where there is none. None is called ``step``.
        init: ``init(param, hyper) -> state``.
        state_depends_on: the hyper-parameters by which ``init`` decides which tensors there are,
            and of which shape and dtype. By default all: ``init`` is called for each new value.
        coefficients: ``coefficients(step, hyper)`` gives what changes with the step but is the
            same for every element: a NamedTuple of a few numbers, in double precision, computed
            once per step. ``step`` counts from 1. Left out, the rule is handed ``hyper`` itself.
        bounds: pairs (field, interval) of the values that are allowed.
        check: raises ValueError where hyper-parameters contradict one another.
        kind: "pointwise" (each element alone: may be cut anywhere) or "per_matrix" (needs its
            whole tensor).
        granularity: a pointwise stage may be cut only at multiples of this many elements of a leaf.
        dtypes: the dtypes of parameters that it takes; empty for every floating and complex one.
        differentiable: whether torch.func and autograd see through it.
        as_gradient: fields of the state that a step sees in the gradient's layout where that is not
            the parameter's (torch.optim makes them as a copy of the first gradient): in 16 bits,
            torch's kernels round an element by the strides of all operands.
        state_device: the type of device that its state is kept on; None for the parameter's own.
        stacked: of a per_matrix stage: whether it also takes several tensors of one shape at once,
            stacked in one more dimension in front (its state's tensors too), and makes of each what
            it makes of that one alone, up to the rounding of torch's batched products.
        takes_dtensors: of a per_matrix stage: whether it also computes with DTensors, by torch's
            operators over all ranks, what it computes with whole tensors: a norm of the tensor
            does, a product of matrices rounds otherwise. Without it, a DTensor is refused.
        blocks: of a per_matrix stage: how its hyper-parameters divide a parameter into matrices.
        flops: ``flops(shape, hyper)``: floating-point operations of a step of one matrix of that
            shape, on average over steps. None: the operations on each element are counted.
        sparse: for given hyper-parameters, what a sparse gradient means: "rows" (only the rows
            it stores change), "dense" (as if it were dense), or "refuse".
        dense: for given hyper-parameters, whether a dense gradient is taken; RuntimeError, if not.
        shared: a NamedTuple class of numbers that belong to no leaf (an estimated distance, a sum
            of weights, a count of skipped steps); :data:`NoState` where there are none. They are
            kept in ``State.shared``, in double precision.
        shared_by: the hyper-parameters that ``init_shared`` and ``combine`` read. They have to be
            the same for all leaves that the stage acts on: others are refused. By default all.
        init_shared: ``init_shared(hyper) -> shared``: before the first step.
        reduce: ``reduce(param, grad, state, coefficients)`` gives 0-d tensors, additive: they are
            summed, in double precision, over every tensor, shard and rank. ``grad`` is as the
            stages before have left it, ``coefficients`` of the shared numbers before this step.
        totals: how many sums ``reduce`` gives.
        reduce_each: ``reduce`` for several tensors at once, with the same bits. Arguments are lists
            of dense tensors of one device; ``state`` has such a list in the place of each tensor.
            It gives, for each total, a 1-D float64 tensor with a number for each tensor, or None
            where these are to be reduced one by one.
        combine: ``combine(shared, totals, hyper) -> shared``, once per step; ``totals`` holds the
            sums of ``reduce``, ``()`` without. Where a stage has it, its ``coefficients`` are
            called with the new shared numbers as a third argument. Numbers are floats, or 0-d
            tensors where one differentiates.
        gate: whether the stages behind this one run; see :class:`Gate`. The step that a gate's own
            ``coefficients`` are given counts from the last time that it was open.
        view: ``view(param, state, hyper)`` gives the parameter to evaluate with.
        extra: names of inputs beside the gradient that the stage needs at each step: of shared
            numbers (such as "loss"), which ``combine`` then takes by name. Behind a closed gate the
            stage does not run, and needs none.
        inputs: those that are one tensor for each leaf: see :class:`LeafInput`.
    """

    name: str
    hyper: type
    state: Any = NoState
    init: Callable[[Tensor, Any], Any] = no_init
    state_depends_on: tuple[str, ...] | None = None
    coefficients: Callable[..., Any] = same_coefficients
    bounds: tuple[tuple[str, Interval], ...] = ()
    check: Callable[[Any], None] = no_check
    kind: Kind = "pointwise"
    granularity: int = 1
    dtypes: tuple[torch.dtype, ...] = ()
    differentiable: bool = True
    as_gradient: tuple[str, ...] = ()
    state_device: str | None = None
    stacked: bool = False
    takes_dtensors: bool = False
    blocks: BlockOptions | None = None
    flops: Callable[[tuple[int, ...], Any], int] | None = None
    sparse: Callable[[Any], Sparse] = refuse_sparse
    dense: Callable[[Any], bool] = takes_dense
    shared: Any = NoState
    state_class: ClassVar[Any]
    """The class of a state between steps: ``state``, or tuple for :data:`NoState`."""
    shared_by: tuple[str, ...] | None = None
    init_shared: Callable[[Any], Any] = no_shared
    reduce: Callable[..., tuple[Tensor, ...]] | None = None
    totals: int = 0
    reduce_each: Callable[..., "tuple[Tensor, ...] | None"] | None = None
    combine: Callable[..., Any] | None = None
    gate: Gate | None = None
    view: Callable[[Tensor, Any, Any], Tensor] | None = None
    extra: tuple[str, ...] = ()
    inputs: tuple[LeafInput, ...] = ()

    def __post_init__(self) -> None:
        """Refuse names that mean something else; let torch.load read the state.

        It reads it with its safe defaults: a NamedTuple runs no code.

        Raises:
            ValueError: a field of state or a hyper-parameter with a reserved name; an input that
                has no place in the state; declarations that contradict one another.
        """
        require_free(self.name, "a field of state", self.state, RESERVED_STATE)
        require_free(self.name, "a hyper-parameter", self.hyper, RESERVED_HYPER)
        require_fields(self.name, self.state, self.inputs)
        object.__setattr__(self, "_stateful", self.state != NoState)
        kind = self.state if self.state != NoState else tuple
        object.__setattr__(self, "state_class", kind)
        object.__setattr__(self, "_sharing", self.shared != NoState)
        if self.stateful:
            torch.serialization.add_safe_globals([self.state])
        if self.sharing:
            torch.serialization.add_safe_globals([self.shared])
        if self.combine is None and (self.shared != NoState or self.reduce or self.extra):
            raise ValueError(
                f"{self.name}: shared numbers, reduce and extra inputs come together in combine; "
                "give combine(shared, totals, hyper)"
            )
        for declared in ("shared_by", "state_depends_on"):
            self._require_hyper(declared)
        if (self.reduce is not None) != (self.totals > 0):
            raise ValueError(
                f"{self.name}: totals must be the number of sums that reduce gives, got "
                f"{self.totals}"
            )
        if self.reduce_each is not None and self.reduce is None:
            raise ValueError(f"{self.name}: reduce_each needs reduce, which it equals")
        if self.gate is not None and self.combine is None:
            raise ValueError(
                f"{self.name}: a gate opens by shared numbers; give shared and combine"
            )

    def _require_hyper(self, declared: str) -> None:
        """Refuse a declaration that names what is no hyper-parameter."""
        known = getattr(self.hyper, "_fields", ())
        unknown = [one for one in getattr(self, declared) or () if one not in known]
        if unknown:
            raise ValueError(
                f"{self.name}: {declared} names hyper-parameters, and {unknown[0]!r} is none; "
                f"there are {', '.join(known)}"
            )

    def __hash__(self) -> int:
        """Return the hash of the fields; kept, since stages are keys of caches."""
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            found = hash((type(self), *(getattr(self, one.name) for one in fields(self))))
            object.__setattr__(self, "_hash", found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash, which another process would not find equal."""
        return {key: value for key, value in self.__dict__.items() if key != "_hash"}

    @property
    def stateful(self) -> bool:
        """Return True if the stage keeps anything between steps."""
        found: bool = self.__dict__["_stateful"]  # torch.compile compares no generic aliases
        return found

    @property
    def sharing(self) -> bool:
        """Return True if the stage keeps numbers that belong to no leaf."""
        found: bool = self.__dict__["_sharing"]
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.name}({', '.join(getattr(self.hyper, '_fields', ()))})"

    def made_of(self, hyper: Any) -> tuple[str, tuple[Link, ...], dict[str, Any]] | None:
        """Return the name of the function that made it, its links, and the other arguments.

        None of a stage that is itself. An optimizer shows such a call in its ``repr``.
        """
        return None

    def parts(self) -> "tuple[Stage, ...]":
        """Return the stages whose functions a step calls: itself, unless it was made of others."""
        return (self,)

    def __call__(self, **hyper: Any) -> Link:
        return Link(self, build(self.name, self.hyper, self.bounds, self.check, hyper))


S = TypeVar("S", bound=Stage)


def _with_arguments_of_stage(cls: type[S]) -> type[S]:
    """Document the arguments that a class inherits from Stage behind its own, for ``help``."""
    if cls.__doc__ is not None and Stage.__doc__ is not None:  # python -OO keeps no docstrings
        inherited = inspect.cleandoc(Stage.__doc__).partition("Args:\n")[2]
        own, example, rest = inspect.cleandoc(cls.__doc__).partition("\n\nExample::")
        cls.__doc__ = f"{own}\n{inherited}{example}{rest}"
    return cls


@_with_arguments_of_stage
@dataclass(frozen=True, kw_only=True, repr=False)
class Rule(Stage):
    """A step on one parameter: ``rule(param, grad, state, coefficients) -> (param, state)``.

    Pure: no side effect, no ``.item()``, no branch on data. It has to be a module-level function
    with annotations that TorchScript reads, since that is one of the ways it is run. The helpers
    in :mod:`functional_optim.numeric` take each coefficient as a number or as a 0-d tensor.

    A rule reads its arguments, functions, modules, classes, and constants (numbers, strings,
    tuples of them). A compiled step is compiled again when such a constant or a helper is
    replaced. A rule that reads anything else, such as a dict, a list or a tensor of its module, a
    closure or a default, is not compiled: ``explain`` names it, and the reference steps.

    A pointwise rule is given flat pieces of a parameter. One that reads ``ndim``, ``dim()``,
    ``stride()`` or ``len(param.shape)``, or branches on a size, raises an error where it would be
    compiled: let a hyper-parameter decide, or declare ``kind="per_matrix"``. The same holds for
    transforms.

    Args:
        rule: ``rule(param, grad, state, coefficients) -> (param, state)``. All tensors have the
            shape of the parameter, unless ``init`` made them otherwise. ``coefficients`` is what
            the function ``coefficients`` returned for this step.
        uses_gradient: whether the rule reads the gradient. False for one that acts on the parameter
            alone, such as an average or a decay. A chain needs a rule that reads it, and no
            transform may stand behind the last such rule.

    Example::

        >>> import torch
        >>> from torch import Tensor
        >>> from typing import NamedTuple
        >>> from functional_optim import NoState, Rule, chain
        >>> from functional_optim.numeric import add
        >>> class SignHyper(NamedTuple):
        ...     lr: float
        >>> def sign_rule(param: Tensor, grad: Tensor, state: NoState, c: SignHyper):
        ...     return add(param, grad.sign(), -c.lr), state
        >>> sign = Rule(name="sign", hyper=SignHyper, rule=sign_rule)
        >>> optimizer = chain(sign(lr=0.1))
        >>> params = {"w": torch.ones(2)}
        >>> grads = {"w": torch.tensor([3.0, -2.0])}
        >>> new, _ = optimizer.update(params, grads, optimizer.init(params))
        >>> new["w"]
        tensor([0.9000, 1.1000])
    """

    rule: Callable[[Tensor, Tensor, Any, Any], tuple[Tensor, Any]]
    uses_gradient: bool = True
    __hash__ = Stage.__hash__


@_with_arguments_of_stage
@dataclass(frozen=True, kw_only=True, repr=False)
class Transform(Stage):
    """A step on one gradient: ``transform(grad, param, state, coefficients) -> (grad, state)``.

    Pure, and a module-level function that TorchScript reads, as for :class:`Rule`.

    Args:
        transform: ``transform(grad, param, state, coefficients) -> (grad, state)``. With
            ``measure``, it takes the total as a fifth argument. With ``raw``, its last argument is
            the raw gradient.
        measure: for a transform that needs a number from *all* gradients first: ``measure(grad)``
            returns a 0-d float64 tensor. The sum over every tensor, shard and rank is the total
            that ``transform`` takes.
        measure_each: ``measure`` for a list of dense tensors of one device, with the same bits: a
            1-D float64 tensor with a number for each.
        transform_each_: ``transform`` for several leaves at once, in place and with the same bits,
            of a per_matrix transform without ``measure`` and ``raw``.
            ``transform_each_(grads, params, state, coefficients)`` writes the new gradients to
            ``grads`` and the new state to ``state``. Arguments are lists of plain, contiguous
            tensors on the CPU; ``state`` has such a list in the place of each tensor. With it, the
            pointwise stages before and behind run as loops over all leaves.
        leads: whether the transform acts on the raw gradient, wherever it stands in the chain.
        raw: whether ``transform`` also takes the raw gradient: the gradient that the chain was
            given, changed only by transforms that lead and by the last gate before this one.

    Example::

        >>> import torch
        >>> from torch import Tensor
        >>> from typing import NamedTuple
        >>> from functional_optim import NoState, Transform, chain, sgd
        >>> class ScaleHyper(NamedTuple):
        ...     scale: float
        >>> def scale_transform(grad: Tensor, param: Tensor, state: NoState, c: ScaleHyper):
        ...     return grad * c.scale, state
        >>> scale = Transform(name="scale", hyper=ScaleHyper, transform=scale_transform)
        >>> optimizer = chain(scale(scale=2.0), sgd(lr=0.25))
        >>> optimizer.update(torch.ones(1), torch.ones(1), optimizer.init(torch.ones(1)))[0]
        tensor([0.5000])
    """

    transform: Callable[..., tuple[Tensor, Any]]
    measure: Callable[[Tensor], Tensor] | None = None
    measure_each: Callable[[list[Tensor]], Tensor] | None = None
    transform_each_: Callable[[list[Tensor], list[Tensor], Any, Any], object] | None = None
    leads: bool = False
    raw: bool = False
    __hash__ = Stage.__hash__

    def __post_init__(self) -> None:
        """Refuse contradictions, those of any stage among them.

        Raises:
            ValueError: ``measure_each`` without ``measure``; ``transform_each_`` where no list of
                leaves is enough; or as for :class:`Stage`.
        """
        super().__post_init__()
        if self.measure_each is not None and self.measure is None:
            raise ValueError(
                f"{self.name}: measure_each needs measure, which it equals for a tensor"
            )
        if self.transform_each_ is not None and (
            self.kind != "per_matrix" or self.measure is not None or self.raw
        ):
            raise ValueError(
                f"{self.name}: transform_each_ is for a transform with kind='per_matrix' that "
                "takes neither a total nor the raw gradient"
            )


def block_size_of(stages: Iterable[Stage]) -> int:
    """A chain may be cut at multiples of so many elements of a leaf: where all its stages may."""
    return math.lcm(*(stage.granularity for stage in stages))


def in_full_blocks(count: int, block_size: int) -> int:
    """The elements of the blocks that so many elements take up, the last of them filled up."""
    return -(-count // block_size) * block_size
