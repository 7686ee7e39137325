"""Pure functions of a stored stage: decode one tensor and its state, run stages, encode."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from functional_optim.bounds import Interval
from functional_optim.core.hyper import build, field_types
from functional_optim.core.stage import Link, Stage, Transform, block_size_of
from functional_optim.core.stage_contract import call_stage
from functional_optim.core.state_init import field_hypers
from functional_optim.storage.param_storage import ParamStorage
from functional_optim.storage.pieces import can_init_in_pieces, init_in_pieces
from functional_optim.storage.records import record_class, state_class
from functional_optim.storage.rounding import Noise, salt
from functional_optim.storage.state_storage import StateStorage

PLAIN = "float32"
"""The storage without encoding."""

SALT = "salt"
"""Name of the coefficient that selects the random bits of a step."""


def field_name(name: str) -> str:
    """Return the name of a field in a stored state: ``stage.field`` without the dot."""
    return name.replace(".", "_")


class KeptField(NamedTuple):
    """Field of the state of a stage, and its storage."""

    name: str
    """The name of the field, unique in the stored state."""
    many: bool
    """True if the field is a list of tensors, which may be empty."""
    storage: StateStorage
    stream: int
    """The stream of the random bits of the field."""


@dataclass(frozen=True)
class Layout:
    """Functions of a stored stage. Equal layouts are one object: see :func:`layout_of`."""

    stages: tuple[Stage, ...]
    """Run in order, in float32: either one transform, or all stages from here on."""
    names: tuple[tuple[str, ...], ...]
    """For each stage, the names of its hyper-parameters in the stored stage."""
    param: ParamStorage
    kept: tuple[tuple[KeptField, ...], ...]
    """For each stage, the fields of its state."""
    seed: int
    device: str | None
    """Device of the state; None for the device of the parameter."""

    def __reduce__(self) -> Any:
        own = self.stages, self.names, self.param, self.kept, self.seed, self.device
        return layout_of, own

    @property
    def transforms(self) -> bool:
        """Return True if the stage is a transform, which cannot write to the parameter."""
        return isinstance(self.stages[-1], Transform)

    @cached_property
    def extras(self) -> tuple[str, ...]:
        """The fields of the state that belong to the storage of the parameter."""
        return () if self.transforms else self.param.extras

    @cached_property
    def state(self) -> Any:
        """The class of the state; ``tuple`` if the stages have no state."""
        fields = [(name, False) for name in self.extras]
        for one in self._fields():
            fields += [(one.name + suffix, one.many) for suffix in one.storage.suffixes]
        return state_class(fields) if fields else tuple[()]

    @cached_property
    def _named(self) -> list[tuple[str, Stage, str]]:
        """The name of each hyper-parameter in the stored stage, its stage, and its name there."""
        return [
            (name, stage, field)
            for stage, names in zip(self.stages, self.names, strict=True)
            for field, name in zip(field_types(stage.hyper), names, strict=True)
        ]

    @cached_property
    def hyper(self) -> Any:
        """The class of the hyper-parameters of all stages, each name once."""
        kinds = {name: field_types(stage.hyper)[field] for name, stage, field in self._named}
        return record_class(
            "StoredHyper",
            list(kinds),
            list(kinds.values()),
            self,
            __reduce__=lambda hyper: (_hyper, (self, tuple(hyper))),
        )

    @cached_property
    def bounds(self) -> tuple[tuple[str, Interval], ...]:
        """The bounds of all hyper-parameters, by their names in the stored stage."""
        found = [(name, dict(stage.bounds).get(field)) for name, stage, field in self._named]
        return tuple({name: one for name, one in found if one is not None}.items())

    @cached_property
    def state_depends_on(self) -> tuple[str, ...]:
        """The hyper-parameters on which the fields of the states depend."""
        found = [name for name, stage, field in self._named if field in field_hypers(stage)]
        return tuple(dict.fromkeys(found))

    def hypers(self, hyper: Any) -> list[Any]:
        """Return the Hyper of each stage."""
        return [
            stage.hyper(*(getattr(hyper, name) for name in names))
            for stage, names in zip(self.stages, self.names, strict=True)
        ]

    def made_of(self, hyper: Any) -> tuple[tuple[Link, ...], dict[str, Any]]:
        """Return the links that were stored, and the arguments of ``stored`` without defaults."""
        links = tuple(map(Link, self.stages, self.hypers(hyper)))
        names = {one.name: one.storage.name for one in self._fields()}
        arguments = {
            "param": self.param.name,
            "seed": self.seed,
            "state_device": self.device,
            "state": {field: name for field, name in names.items() if name != PLAIN},
        }
        return links, {name: one for name, one in arguments.items() if one and one != PLAIN}

    def check(self, hyper: Any) -> None:
        """Let each stage check its hyper-parameters. A shared name has the bounds of all stages."""
        for stage, one in zip(self.stages, self.hypers(hyper), strict=True):
            build(stage.name, stage.hyper, stage.bounds, stage.check, one._asdict())

    @cached_property
    def block_size(self) -> int:
        """The number of elements of a block. Raise ValueError if blocks do not fit together."""
        own = block_size_of(self.stages)
        blocks = math.lcm(*(one.storage.granularity for one in self._fields()))
        if blocks > 1 and blocks % own != 0:
            raise ValueError(
                f"{self.stages[-1].name}: its stages work in blocks of {own} elements, but "
                f"{own} does not divide the {blocks} elements of a block of 8-bit state; keep this "
                "state in float32 or bfloat16"
            )
        return math.lcm(blocks, own)

    @cached_property
    def stochastic(self) -> bool:
        """Return True if the parameter or a field is rounded stochastically."""
        fields = any(one.storage.stochastic for one in self._fields())
        return fields or (self.param.stochastic and not self.transforms)

    def coefficients(self, step: float, hyper: Any) -> Any:
        """Return the coefficients of all stages in order, and the salt of the step."""
        made = [
            stage.coefficients(step, one)
            for stage, one in zip(self.stages, self.hypers(hyper), strict=True)
        ]
        cls = _coefficients_class(tuple(type(one) for one in made), self.stochastic)
        values = [value for one in made for value in one]
        return cls(*values, *([salt(step, self.seed)] if self.stochastic else []))

    def init(self, param: Tensor, hyper: Any) -> Any:
        """Return the encoded state before the first step."""
        first = partial(self._first, hypers=self.hypers(hyper))
        is_cut = all(one.kind == "pointwise" for one in self.stages)
        with torch.no_grad():
            if is_cut and can_init_in_pieces(param):
                encoded = init_in_pieces(first, param, self.block_size)
            else:
                encoded = first(param)
            # Meta tensors cannot be copied to another device.
            return encoded if param.device.type == "meta" else self._to_state_device(encoded)

    def _first(self, param: Tensor, hypers: Sequence[Any]) -> Any:
        """Return the encoded state of a parameter, or of some of its elements."""
        wide = param.to(torch.float32)
        extras = self.param.encode(wide, None)[1] if self.extras else ()
        pairs = zip(self.stages, hypers, strict=True)
        states = [stage.init(wide, one) for stage, one in pairs]
        self._check_shapes(states, wide)
        return self._encode(extras, states, None)

    def encode_states(self, extras: Sequence[Tensor], states: Sequence[Any], param: Tensor) -> Any:
        """Encode the states of the stages, rounded to nearest."""
        with torch.no_grad():
            self._check_shapes(states, param)
            return self._to_state_device(self._encode(extras, states, None))

    def decode_states(self, values: Sequence[Any]) -> list[Any]:
        """Return the states of the stages in float32, from the fields of an encoded state."""
        left = iter(values[len(self.extras) :])
        states: list[Any] = []
        for stage, fields in zip(self.stages, self.kept, strict=True):
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
            wide, before_all = self._decode(param, state)
            start = grad = raw = grad.to(torch.float32)
            states = []
            parts = zip(self.stages, before_all, c.split(c), strict=True)
            for stage, before, own in parts:
                wide, grad, after = call_stage(stage, wide, grad, before, own, raw=raw)
                states.append(after)
            noise = Noise.of(start, getattr(c, SALT)) if self.stochastic else None
            made, extras = self.param.encode(wide, noise)
            return made, self._to_state_device(self._encode(extras, states, noise))

    def view(self, param: Tensor, state: Any, hyper: Any) -> Tensor:
        """Return the view of the last stage that has a view, in the dtype of the parameter."""
        with torch.no_grad():
            wide, states = self._decode(param, state)
            parts = zip(self.stages, states, self.hypers(hyper), strict=True)
            stage, own, one = [part for part in parts if part[0].view is not None][-1]
            assert stage.view is not None
            return stage.view(wide, own, one).to(param.dtype)

    def transform(
        self, grad: Tensor, param: Tensor, state: Any, c: Any, *given: Tensor
    ) -> tuple[Tensor, Any]:
        """Run the transform. It gets its total and the raw gradient, if it declares them.

        A leading transform returns the gradient in its original dtype, since stages that are not
        stored may come after it. A change of sign loses no digits.
        """
        (stage,) = self.stages
        assert isinstance(stage, Transform)
        with torch.no_grad():
            start = grad.to(torch.float32)
            seen: Any = param.to(torch.float32)
            if self.param.extras:
                seen = UnavailableParam(stage.name)
            (one,) = self.decode_states(self._to_param_device(param.device, state))
            *total, raw = given if stage.raw else (*given, None)
            wide = None if raw is None else raw.to(torch.float32)
            _, made, one = call_stage(stage, seen, start, one, c.split(c)[0], total, wide)
            if stage.leads:
                made = made.to(grad.dtype)
            noise = Noise.of(start, getattr(c, SALT)) if self.stochastic else None
            return made, self._to_state_device(self._encode((), [one], noise))

    def measure(self, grad: Tensor) -> Tensor:
        """Return what the gradient adds to the total of the transform, computed in float32."""
        (stage,) = self.stages
        assert isinstance(stage, Transform)
        assert stage.measure is not None
        return stage.measure(grad.to(torch.float32))

    def _fields(self) -> Iterator[KeptField]:
        for fields in self.kept:
            yield from fields

    def _decode(self, param: Tensor, state: Any) -> tuple[Tensor, list[Any]]:
        """Return the parameter, and the states of the stages, in float32."""
        values = self._to_param_device(param.device, state)
        wide = self.param.decode(param, tuple(values[: len(self.extras)]))
        return wide, self.decode_states(values)

    def _to_param_device(self, device: torch.device, state: Any) -> list[Any]:
        if self.device is None:
            return list(state)
        return [_to_device(value, device) for value in state]

    def _to_state_device(self, state: Any) -> Any:
        if self.device is None or state == ():
            return state
        return self.state(*(_to_device(value, torch.device(self.device)) for value in state))

    def _encode(self, extras: Sequence[Tensor], states: Sequence[Any], noise: Noise | None) -> Any:
        """Return an encoded state, from which :meth:`decode_states` returns the states."""
        values: list[Any] = list(extras)
        for fields, state in zip(self.kept, states, strict=True):
            for one, value in zip(fields, state, strict=True):
                encode, stream = one.storage.encode, one.stream
                if one.many:
                    rows = [encode(tensor, noise, stream) for tensor in value]
                    values += [[row[i] for row in rows] for i in range(len(one.storage.suffixes))]
                else:
                    values += encode(value, noise, stream)
        return self.state(*values) if values else ()

    def _check_shapes(self, states: Sequence[Any], param: Tensor) -> None:
        """Check that each encoded tensor of a list has the shape of the parameter."""
        for stage, fields, state in zip(self.stages, self.kept, states, strict=True):
            for one, value in zip(fields, state, strict=True):
                for tensor in value if one.many else []:
                    if one.storage.name != "float32" and tensor.shape != param.shape:
                        raise ValueError(
                            f"{stage.name}: {one.name} has shape {tuple(tensor.shape)}, the "
                            f"parameter {tuple(param.shape)}; only what has its shape can be kept "
                            f"as {one.storage.name}: use state={{{one.name!r}: 'float32', ...}}"
                        )


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [tensor.to(device) for tensor in value]
    return value.to(device)


def layout_of(*values: Any) -> Layout:
    """Return the only Layout with these values, since its methods are compared by identity."""
    # Layouts are immutable, and setdefault is one atomic operation, so this is thread-safe.
    made = Layout(*values)
    return _LAYOUTS.setdefault(made, made)


_LAYOUTS: dict[Layout, Layout] = {}


def _hyper(layout: Layout, values: tuple[Any, ...]) -> Any:
    return layout.hyper(*values)


@lru_cache(maxsize=None)
def _coefficients_class(classes: tuple[Any, ...], stochastic: bool) -> Any:
    """Return the class that joins coefficients of these classes, and a salt if stochastic."""
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


class UnavailableParam:
    """Stand-in for a parameter that a transform must not read: the state holds digits of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self) -> NoReturn:
        raise TypeError(
            f"{self._name} reads the parameter, and a stage after it needs a total over all "
            "gradients. Before that total, a parameter with a master copy or a compensation is not "
            f"decoded: put {self._name} after that stage, or use param='bfloat16+stochastic'"
        )

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, UnavailableParam):
                value._refuse()  # noqa: SLF001  of its own class
        raise TypeError(
            f"{function} got a parameter that is not decoded yet; put the stage after all totals"
        )
