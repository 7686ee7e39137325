"""Rule and Transform: the mathematics of an optimizer for one tensor, and its requirements.

Both are frozen records of pure functions, which do not depend on trees, ranks or devices. Executors
follow their declarations, such as ``kind``, ``measure`` and ``sparse``.
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
from functional_optim.core.constructor_calls import format_link
from functional_optim.core.gate import Gate
from functional_optim.core.hyper import build
from functional_optim.core.leaf_input import LeafInput, require_fields
from functional_optim.core.stage_defaults import (
    RESERVED_HYPER,
    RESERVED_STATE,
    NoHyper,
    NoState,
    Sparse,
    ZeroInit,
    no_check,
    no_init,
    no_shared,
    refuse_sparse,
    require_free,
    rows_of_sparse,
    same_coefficients,
    takes_dense,
)

__all__ = [
    "Kind",
    "Link",
    "NoHyper",
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
    """Stage with its hyper-parameters: an argument of ``chain``.

    Example::

        >>> from functional_optim import clip_by_value
        >>> link = clip_by_value(1.0)
        >>> link.stage.name, link.hyper
        ('clip_by_value', ClipByValueHyper(clip_value=1.0))
    """

    stage: "Stage"
    hyper: Any
    where: Any = None
    """The leaves on which it acts, as for :meth:`Optimizer.override`; None for all leaves."""
    label: str = ""
    """The label of its part of a :func:`~functional_optim.partition`."""

    def __repr__(self) -> str:
        return format_link(self)


@dataclass(frozen=True, kw_only=True, repr=False)
class Stage:
    """Base class of :class:`Rule` and :class:`Transform`.

    Call it with its hyper-parameters, by name, to get a :class:`Link` for ``chain``.

    Args:
        name: a short name, for errors and ``optimizer.hyper``.
        hyper: a NamedTuple class. Fields annotated ``float`` (or a tuple of floats) take a number,
            a 0-d tensor or a schedule; fields annotated ``bool`` are static. These names are
            reserved: ``params``, ``param_names``, ``initial_lr``, ``decoupled_weight_decay`` and
            ``step``.
        state: a NamedTuple class, or :data:`NoState`. A field is a tensor, or ``list[Tensor]`` if
            only some options or shapes need it: ``[]`` or ``[tensor]``, or one tensor for each side
            of a matrix. The name ``step`` is reserved.
        init: ``init(param, hyper) -> state``. By default, each tensor is zeros like the parameter,
            and each list is empty.
        state_depends_on: the hyper-parameters on which the existence, shapes and dtypes of state
            tensors depend. By default all: ``init`` is called for each new value.
        coefficients: ``coefficients(step, hyper)`` returns the scalars of a step that are the same
            for all elements: a NamedTuple of a few numbers, in float64, computed once per step.
            ``step`` counts from 1. By default ``hyper``.
        bounds: pairs (field, interval) of valid values.
        check: raises ValueError if hyper-parameters contradict each other.
        kind: "pointwise" (each element independently: a tensor may be split anywhere) or
            "per_matrix" (needs the whole tensor).
        granularity: a pointwise stage may be split only at multiples of this many elements.
        dtypes: the valid dtypes of parameters; empty for all floating and complex dtypes.
        differentiable: True if torch.func and autograd can differentiate the stage.
        as_gradient: state fields that a step sees with the strides of the gradient: in torch.optim,
            they are copies of the first gradient, and in 16 bits, rounding in torch's kernels
            depends on the strides of all operands.
        state_device: the device type of the state; None for the device of the parameter.
        stacked: for a per_matrix stage, True if it also takes a batch of tensors of one shape, with
            one more dimension in front, also in its state. Each result must equal that of the
            tensor alone, up to the rounding of torch's batched products.
        takes_dtensors: for a per_matrix stage, True if torch's operators on DTensors give the
            result of the whole tensors, as for a norm; products of matrices round differently.
            Otherwise, DTensors are refused.
        blocks: for a per_matrix stage, how its hyper-parameters divide a parameter into matrices.
        flops: ``flops(shape, hyper)``: floating-point operations of a step of one matrix of this
            shape, on average over steps. None: the operations on each element are counted.
        sparse: ``sparse(hyper)`` says how a sparse gradient is handled: "rows" (only its stored
            rows change), "dense" (it is converted), or "refuse".
        dense: ``dense(hyper)`` is False if dense gradients are refused, with a RuntimeError.
        shared: a NamedTuple class of scalars that belong to no leaf (an estimated distance, a sum
            of weights, a count of skipped steps), or :data:`NoState`. ``State.shared`` has them in
            float64.
        shared_by: the hyper-parameters that ``init_shared`` and ``combine`` read, by default all.
            They must be equal for all leaves of the stage.
        init_shared: ``init_shared(hyper) -> shared``: before the first step.
        reduce: ``reduce(param, grad, state, coefficients)`` returns 0-d tensors, which are summed
            in float64 over all tensors, shards and ranks. ``grad`` is the gradient after the
            earlier stages, and ``coefficients`` belong to the shared scalars before this step.
        totals: the number of sums of ``reduce``.
        reduce_each: ``reduce`` for several tensors at once, with the same bits. Arguments are lists
            of dense tensors of one device; ``state`` has a list in place of each tensor. It returns
            for each total a 1-D float64 tensor with a number for each tensor, or None if the
            tensors must be reduced one by one.
        combine: ``combine(shared, totals, hyper) -> shared``, once per step. ``totals`` has the
            sums of ``reduce``, or is ``()``. With ``combine``, ``coefficients`` gets the new shared
            scalars as a third argument. Scalars are floats, or 0-d tensors with a derivative.
        gate: decides if the stages after this one run; see :class:`Gate`. The ``step`` argument of
            a gate's ``coefficients`` counts from the last time that the gate was open.
        view: ``view(param, state, hyper)`` returns the parameter to evaluate with.
        extra: names of scalar inputs of each step (such as "loss"), which ``combine`` takes by
            name. A stage after a closed gate does not run, and needs no inputs.
        inputs: inputs that are one tensor for each leaf; see :class:`LeafInput`.
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
    stateful: ClassVar[bool]
    """True if the stage has state."""
    sharing: ClassVar[bool]
    """True if the stage has shared scalars."""
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
        """Check the declarations, and let torch.load read the state with its safe defaults."""
        require_free(self.name, "a field of state", self.state, RESERVED_STATE)
        require_free(self.name, "a hyper-parameter", self.hyper, RESERVED_HYPER)
        require_fields(self.name, self.state, self.inputs)
        # Computed once, since torch.compile compares no generic aliases.
        object.__setattr__(self, "stateful", self.state != NoState)
        object.__setattr__(self, "state_class", self.state if self.stateful else tuple)
        object.__setattr__(self, "sharing", self.shared != NoState)
        if self.stateful and self.init is no_init:
            object.__setattr__(self, "init", ZeroInit(self.state))
            object.__setattr__(self, "state_depends_on", ())
        if self.stateful:
            torch.serialization.add_safe_globals([self.state])
        if self.sharing:
            torch.serialization.add_safe_globals([self.shared])
        if self.combine is None and (self.sharing or self.reduce or self.extra):
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
        """Check that a declaration only names hyper-parameters."""
        known = getattr(self.hyper, "_fields", ())
        unknown = [one for one in getattr(self, declared) or () if one not in known]
        if unknown:
            raise ValueError(
                f"{self.name}: {declared} must name hyper-parameters, got {unknown[0]!r}; use "
                f"{', '.join(known)}"
            )

    def __hash__(self) -> int:
        """Return the hash of the fields, which is cached since stages are keys of caches."""
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            found = hash((type(self), *(getattr(self, one.name) for one in fields(self))))
            object.__setattr__(self, "_hash", found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without the hash, which differs between processes."""
        return {key: value for key, value in self.__dict__.items() if key != "_hash"}

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.name}({', '.join(getattr(self.hyper, '_fields', ()))})"

    def made_of(self, hyper: Any) -> tuple[str, tuple[Link, ...], dict[str, Any]] | None:
        """Return the call that built a stage of other links, for ``repr``: name, links, options.

        None for a stage that was not built of other links.
        """
        return None

    def parts(self) -> "tuple[Stage, ...]":
        """Return the stages whose functions a step calls: itself, or the stages inside of it."""
        return (self,)

    def __call__(self, **hyper: Any) -> Link:
        return Link(self, build(self.name, self.hyper, self.bounds, self.check, hyper))


S = TypeVar("S", bound=Stage)


def _add_stage_arguments(cls: type[S]) -> type[S]:
    """Append the arguments of Stage to the docstring of a subclass."""
    if cls.__doc__ is not None and Stage.__doc__ is not None:  # python -OO removes docstrings
        inherited = inspect.cleandoc(Stage.__doc__).partition("Args:\n")[2]
        own, example, rest = inspect.cleandoc(cls.__doc__).partition("\n\nExample::")
        cls.__doc__ = f"{own}\n{inherited}{example}{rest}"
    return cls


@_add_stage_arguments
@dataclass(frozen=True, kw_only=True, repr=False)
class Rule(Stage):
    """A step on one parameter: ``rule(param, grad, state, coefficients) -> (param, state)``.

    The function is pure: no side effect, no ``.item()``, no branch on data. It must be a
    module-level function with annotations that TorchScript can compile. The helpers in
    :mod:`functional_optim.numeric` take each coefficient as a number or as a 0-d tensor.

    A rule may read its arguments, functions, modules, classes, and constants (numbers, strings,
    tuples of them). If a constant or a helper is replaced, the step is compiled again. A rule that
    reads anything else, such as a dict, a list or a tensor of its module, a closure or a default,
    is not compiled: ``explain`` names it, and the reference executor steps.

    A pointwise rule gets flat pieces of a parameter. If it reads ``ndim``, ``dim()``, ``stride()``
    or ``len(param.shape)``, or branches on a size, compiling raises an error: use a hyper-parameter
    instead, or declare ``kind="per_matrix"``. The same holds for transforms.

    Args:
        rule: ``rule(param, grad, state, coefficients) -> (param, state)``. State tensors have the
            shapes of ``init``. ``coefficients`` is the result of the function ``coefficients``.
        uses_gradient: True if the rule reads the gradient. False for a rule on the parameter only,
            such as an average or a decay. A chain needs a rule that reads the gradient, and a
            transform after the last such rule is an error.

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


@_add_stage_arguments
@dataclass(frozen=True, kw_only=True, repr=False)
class Transform(Stage):
    """A step on one gradient: ``transform(grad, param, state, coefficients) -> (grad, state)``.

    The function has the same restrictions as for :class:`Rule`.

    Args:
        transform: ``transform(grad, param, state, coefficients) -> (grad, state)``. With
            ``measure``, it takes the total as a fifth argument. With ``raw``, its last argument is
            the raw gradient.
        measure: for a transform that needs a sum over *all* gradients: ``measure(grad)`` returns a
            0-d float64 tensor. The total is the sum over all tensors, shards and ranks.
        measure_each: ``measure`` for a list of dense tensors of one device, with the same bits. It
            returns a 1-D float64 tensor with a number for each tensor.
        transform_each_: ``transform`` for several leaves at once, in place and with the same bits,
            for a per_matrix transform without ``measure`` and ``raw``.
            ``transform_each_(grads, params, state, coefficients)`` writes the new gradients to
            ``grads`` and the new state to ``state``. Arguments are lists of plain, contiguous
            tensors on the CPU; ``state`` has a list in place of each tensor. With it, the pointwise
            stages before and after the transform run as loops over all leaves.
        leads: True if the transform runs before all other stages, at any position in the chain.
        raw: True if ``transform`` also takes the raw gradient: the gradient of the chain after
            leading transforms and the last gate before this stage.

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
        """Check the declarations.

        Raises:
            ValueError: ``measure_each`` without ``measure``; ``transform_each_`` of a transform
                that cannot have it; or as for :class:`Stage`.
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
    """Return the number of elements at whose multiples all stages may be split."""
    return math.lcm(*(stage.granularity for stage in stages))


def in_full_blocks(count: int, block_size: int) -> int:
    """Round a number of elements up to a multiple of the block size."""
    return -(-count // block_size) * block_size
