"""Stages over encoded tensors: decode, run them in float32, encode, on one tensor, pure."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from functional_optim.bounds import Interval
from functional_optim.core.calling import called
from functional_optim.core.hyper import build, field_types
from functional_optim.core.initial import fields_depend_on
from functional_optim.core.stage import Link, Stage, Transform, block_size_of
from functional_optim.storage.noise import Noise, salt
from functional_optim.storage.param_storage import ParamStorage
from functional_optim.storage.pieces import can_init_in_pieces, init_in_pieces
from functional_optim.storage.records import record_class, state_class
from functional_optim.storage.state_storage import StateStorage

PLAIN = "float32"
"""The storage that keeps numbers as they are."""

SALT = "salt"
"""The coefficient from which random bits are made."""


def field_name(name: str) -> str:
    """Return a stored rule's name of a field: ``stage.field`` without the dot."""
    return name.replace(".", "_")


class KeptField(NamedTuple):
    """Field of one stage's state, and its storage."""

    name: str
    """Its name among all fields that are kept."""
    many: bool
    """Whether it is a list of tensors, or of none."""
    storage: StateStorage
    stream: int
    """The stream of its random bits."""


class LayoutSource(NamedTuple):
    """Source of a layout."""

    stages: tuple[Stage, ...]
    """They run on float32, one after the other; either one transform, or as far as the rule."""
    names: tuple[tuple[str, ...], ...]
    """For each stage, the name of each of its hyper-parameters."""
    param: ParamStorage
    kept: tuple[tuple[KeptField, ...], ...]
    """For each stage, each field of its state."""
    seed: int
    device: str | None
    """Where the state is kept; None is with the parameter."""


class Layout:
    """The functions of a stage whose tensors are encoded.

    There is one for each plan, so that stages with the same plan are equal.
    """

    def __init__(self, plan: LayoutSource) -> None:
        self.plan = plan

    def __reduce__(self) -> Any:
        return layout_of, (self.plan,)

    @property
    def transforms(self) -> bool:
        """Return True if this is a transform's, which has no say over the parameter."""
        return isinstance(self.plan.stages[-1], Transform)

    @cached_property
    def extras(self) -> tuple[str, ...]:
        """The fields that the parameter keeps in the state."""
        return () if self.transforms else self.plan.param.extras

    @cached_property
    def state(self) -> Any:
        """The class of states; ``()`` where there is nothing to keep."""
        fields = [(name, False) for name in self.extras]
        for one in self._all_kept():
            fields += [(one.name + suffix, one.many) for suffix in one.storage.suffixes]
        return state_class(fields) if fields else tuple[()]

    @cached_property
    def hyper(self) -> Any:
        """The class of hyper-parameters: those of every stage, each name once."""
        kinds: dict[str, Any] = {}
        for stage, names in zip(self.plan.stages, self.plan.names, strict=True):
            kinds.update(zip(names, field_types(stage.hyper).values(), strict=True))
        return record_class(
            "StoredHyper",
            list(kinds),
            list(kinds.values()),
            self.plan,
            __reduce__=lambda hyper: (_hyper, (self, tuple(hyper))),
        )

    @cached_property
    def bounds(self) -> tuple[tuple[str, Interval], ...]:
        """The bounds of every hyper-parameter, under its name here."""
        return tuple(
            {
                name: dict(stage.bounds)[field]
                for stage, names in zip(self.plan.stages, self.plan.names, strict=True)
                for field, name in zip(field_types(stage.hyper), names, strict=True)
                if field in dict(stage.bounds)
            }.items()
        )

    @cached_property
    def state_depends_on(self) -> tuple[str, ...]:
        """The hyper-parameters that decide which fields the states of the stages have."""
        found: dict[str, None] = {}
        for stage, names in zip(self.plan.stages, self.plan.names, strict=True):
            own = dict(zip(field_types(stage.hyper), names, strict=True))
            found.update(dict.fromkeys(own[field] for field in fields_depend_on(stage)))
        return tuple(found)

    def hypers(self, hyper: Any) -> list[Any]:
        """The Hyper of each stage."""
        return [
            stage.hyper(*(getattr(hyper, name) for name in names))
            for stage, names in zip(self.plan.stages, self.plan.names, strict=True)
        ]

    def made_of(self, hyper: Any) -> tuple[tuple[Link, ...], dict[str, Any]]:
        """The links that were stored, and what ``stored`` was told that is not its default."""
        plan = self.plan
        links = tuple(map(Link, plan.stages, self.hypers(hyper)))
        kept = {one.name: one.storage.name for one in self._all_kept()}
        told = {
            "param": plan.param.name,
            "seed": plan.seed,
            "state_device": plan.device,
            "state": {name: storage for name, storage in kept.items() if storage != PLAIN},
        }
        return links, {name: one for name, one in told.items() if one and one != PLAIN}

    def check(self, hyper: Any) -> None:
        """Each stage checks its own: a name that stages share has the bounds of all."""
        for stage, one in zip(self.plan.stages, self.hypers(hyper), strict=True):
            build(stage.name, stage.hyper, stage.bounds, stage.check, one._asdict())

    @cached_property
    def block_size(self) -> int:
        """The number of elements of a block. A parameter may be cut only between blocks.

        Raises:
            ValueError: blocks of 8-bit state and blocks of a stage that do not fit together.
        """
        own = block_size_of(self.plan.stages)
        blocks = math.lcm(*(one.storage.granularity for one in self._all_kept()))
        if blocks > 1 and blocks % own != 0:
            raise ValueError(
                f"{self.plan.stages[-1].name}: its stages work in blocks of {own} elements, which "
                f"are no divisor of the {blocks} elements of a block of 8-bit state; keep this "
                "state in float32 or bfloat16"
            )
        return math.lcm(blocks, own)

    @cached_property
    def stochastic(self) -> bool:
        """Return True if anything is rounded by random bits."""
        fields = any(one.storage.stochastic for one in self._all_kept())
        return fields or (self.plan.param.stochastic and not self.transforms)

    def coefficients(self, step: float, hyper: Any) -> Any:
        """The coefficients of every stage, one after the other, and the salt of the step."""
        made = [
            stage.coefficients(step, one)
            for stage, one in zip(self.plan.stages, self.hypers(hyper), strict=True)
        ]
        cls = _coefficients_class(tuple(type(one) for one in made), self.stochastic)
        values = [value for one in made for value in one]
        return cls(*values, *([salt(step, self.plan.seed)] if self.stochastic else []))

    def init(self, param: Tensor, hyper: Any) -> Any:
        """Return the encoded state before the first step."""
        first = partial(self._first, hypers=self.hypers(hyper))
        is_cut = all(one.kind == "pointwise" for one in self.plan.stages)
        with torch.no_grad():
            if is_cut and can_init_in_pieces(param):
                made = init_in_pieces(first, param, self.block_size)
            else:
                made = first(param)
            # Of a state without memory, nothing can be moved.
            return made if param.device.type == "meta" else self._at_home(made)

    def _first(self, param: Tensor, hypers: Sequence[Any]) -> Any:
        """Return the encoded state of a parameter, or of some of its elements."""
        wide = param.to(torch.float32)
        extras = self.plan.param.encode(wide, None)[1] if self.extras else ()
        pairs = zip(self.plan.stages, hypers, strict=True)
        states = [stage.init(wide, one) for stage, one in pairs]
        self._require_shapes(states, wide)
        return self._encoded(extras, states, None)

    def kept(self, extras: Sequence[Tensor], states: Sequence[Any], param: Tensor) -> Any:
        """States of the stages as they are kept, rounded to nearest.

        Args:
            extras: what is kept of the parameter.
            states: of each stage, in float32.
            param: in float32.
        """
        with torch.no_grad():
            self._require_shapes(states, param)
            return self._at_home(self._encoded(extras, states, None))

    def decoded(self, values: Sequence[Any]) -> list[Any]:
        """The inverse of :meth:`kept`: the states of the stages, in float32.

        Args:
            values: the fields of a state, those of the parameter first.
        """
        left = iter(values[len(self.extras) :])
        states: list[Any] = []
        for stage, fields in zip(self.plan.stages, self.plan.kept, strict=True):
            decoded: list[Any] = []
            for one in fields:
                parts = [next(left) for _ in one.storage.suffixes]
                if one.many:
                    decoded.append([one.storage.decode(p) for p in zip(*parts, strict=True)])
                else:
                    decoded.append(one.storage.decode(tuple(parts)))
            states.append(stage.state(*decoded) if stage.stateful else ())
        return states

    def rule(self, param: Tensor, grad: Tensor, state: Any, c: Any) -> tuple[Tensor, Any]:
        """Step all stages."""
        with torch.no_grad():
            values = self._on(param.device, state)
            wide = self.plan.param.decode(param, tuple(values[: len(self.extras)]))
            start = grad = raw = grad.to(torch.float32)
            states = []
            parts = zip(self.plan.stages, self.decoded(values), c.split(c), strict=True)
            for stage, before, own in parts:
                wide, grad, after = called(stage, wide, grad, before, own, raw=raw)
                states.append(after)
            noise = Noise.of(start, getattr(c, SALT)) if self.stochastic else None
            made, extras = self.plan.param.encode(wide, noise)
            return made, self._at_home(self._encoded(extras, states, noise))

    def view(self, param: Tensor, state: Any, hyper: Any) -> Tensor:
        """The view of the last stage that has one, in the parameter's dtype."""
        with torch.no_grad():
            values = self._on(param.device, state)
            wide = self.plan.param.decode(param, tuple(values[: len(self.extras)]))
            parts = zip(self.plan.stages, self.decoded(values), self.hypers(hyper), strict=True)
            stage, own, one = [part for part in parts if part[0].view is not None][-1]
            assert stage.view is not None
            return stage.view(wide, own, one).to(param.dtype)

    def transform(
        self, grad: Tensor, param: Tensor, state: Any, c: Any, *given: Tensor
    ) -> tuple[Tensor, Any]:
        """Run the transform, given its total and the raw gradient if it takes them.

        One that leads hands the gradient on in its own dtype: stages that are not stored may stand
        between it and the others, and a sign costs no digits.
        """
        (stage,) = self.plan.stages
        assert isinstance(stage, Transform)
        with torch.no_grad():
            start = grad.to(torch.float32)
            seen: Any = Withheld(stage.name) if self.plan.param.extras else param.to(torch.float32)
            (one,) = self.decoded(self._on(param.device, state))
            *total, raw = given if stage.raw else (*given, None)
            wide = None if raw is None else raw.to(torch.float32)
            _, made, one = called(stage, seen, start, one, c.split(c)[0], total, wide)
            if stage.leads:
                made = made.to(grad.dtype)
            noise = Noise.of(start, getattr(c, SALT)) if self.stochastic else None
            return made, self._at_home(self._encoded((), [one], noise))

    def measure(self, grad: Tensor) -> Tensor:
        """Measure the gradient in float32, by the one transform."""
        (stage,) = self.plan.stages
        assert isinstance(stage, Transform)
        assert stage.measure is not None
        return stage.measure(grad.to(torch.float32))

    def _all_kept(self) -> Iterator[KeptField]:
        for fields in self.plan.kept:
            yield from fields

    def _on(self, device: torch.device, state: Any) -> list[Any]:
        """The values of a state, on the device of the parameter."""
        if self.plan.device is None:
            return list(state)
        return [_moved(value, device) for value in state]

    def _at_home(self, state: Any) -> Any:
        """A state on the device where it is kept."""
        if self.plan.device is None or state == ():
            return state
        return self.state(*(_moved(value, torch.device(self.plan.device)) for value in state))

    def _encoded(self, extras: Sequence[Tensor], states: Sequence[Any], noise: Noise | None) -> Any:
        """The inverse of :meth:`decoded`, as one State."""
        values: list[Any] = list(extras)
        for fields, state in zip(self.plan.kept, states, strict=True):
            for one, value in zip(fields, state, strict=True):
                encode, stream = one.storage.encode, one.stream
                if one.many:
                    rows = [encode(tensor, noise, stream) for tensor in value]
                    values += [[row[i] for row in rows] for i in range(len(one.storage.suffixes))]
                else:
                    values += encode(value, noise, stream)
        return self.state(*values) if values else ()

    def _require_shapes(self, states: Sequence[Any], param: Tensor) -> None:
        """A field that is encoded has the parameter's shape.

        Raises:
            ValueError: names the field of an option that has not.
        """
        for stage, fields, state in zip(self.plan.stages, self.plan.kept, states, strict=True):
            for one, value in zip(fields, state, strict=True):
                for tensor in value if one.many else []:
                    if one.storage.name != "float32" and tensor.shape != param.shape:
                        raise ValueError(
                            f"{stage.name}: {one.name} has shape {tuple(tensor.shape)}, the "
                            f"parameter {tuple(param.shape)}; only what has its shape can be kept "
                            f"as {one.storage.name}: use state={{{one.name!r}: 'float32', ...}}"
                        )


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [tensor.to(device) for tensor in value]
    return value.to(device)


def layout_of(plan: LayoutSource) -> Layout:
    """The layout of a plan, always the same one: its methods are compared by identity."""
    # A plan is made of frozen values, and setdefault is one atomic operation.
    return _LAYOUTS.setdefault(plan, Layout(plan))


_LAYOUTS: dict[LayoutSource, Layout] = {}


def _hyper(layout: Layout, values: tuple[Any, ...]) -> Any:
    return layout.hyper(*values)


@lru_cache(maxsize=None)
def _coefficients_class(classes: tuple[Any, ...], stochastic: bool) -> Any:
    """The class of coefficients of stages whose own have these classes."""
    fields: list[str] = []
    kinds: list[Any] = []
    ends: list[tuple[Any, int, int]] = []
    for index, cls in enumerate(classes):
        own = field_types(cls)
        ends.append((cls, len(fields), len(fields) + len(own)))
        fields += [f"{field}_{index}" for field in own]
        kinds += own.values()
    if stochastic:
        fields.append(SALT)
        kinds.append(float)

    def split(values: Any) -> list[Any]:
        return [cls(*values[start:end]) for cls, start, end in ends]

    return record_class(
        "StoredCoefficients", fields, kinds, (classes, stochastic), split=staticmethod(split)
    )


class Withheld:
    """Stands for a parameter that a transform must not read, since the state has a part of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self) -> NoReturn:
        raise TypeError(
            f"{self._name} reads the parameter, and stands before a stage that measures all "
            "gradients; there, a parameter kept with a master or a compensation is not known: put "
            "it behind that stage, or choose param='bfloat16+stochastic'"
        )

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, Withheld):
                value._refuse()  # noqa: SLF001  of its own class
        raise TypeError(f"{function} got a parameter that is not known here")
