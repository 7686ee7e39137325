"""``stored``: an optimizer whose parameters and state are encoded between steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from functional_optim.core.chain import require_one_chain
from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.format import format_value
from functional_optim.core.hyper import field_types
from functional_optim.core.leaf import is_measured
from functional_optim.core.links import Change, Links, hyper_positions, stage_labels, state_names
from functional_optim.core.stage import Kind, Link, Rule, Stage, Transform
from functional_optim.core.state import field_tensors
from functional_optim.optimizer import Optimizer
from functional_optim.storage.layout import (
    PLAIN,
    KeptField,
    Layout,
    field_name,
    layout_of,
)
from functional_optim.storage.param_storage import PARAM_STORAGES, PARAM_STREAM, ParamStorage
from functional_optim.storage.state_storage import STATE_STORAGES, StateStorage

_T = TypeVar("_T")

REST = "*"
"""Key of ``state`` for all fields that are not named."""


class Stored:
    """Stage of a stored chain: decodes, runs its stages in float32, and encodes."""

    layout: Layout

    def __reduce__(self) -> Any:
        return _stored_stage, (self.layout,)

    def made_of(self, hyper: Any) -> tuple[str, tuple[Link, ...], dict[str, Any]]:
        return "stored", *self.layout.made_of(hyper)

    def parts(self) -> tuple[Stage, ...]:
        return self.layout.stages


@dataclass(frozen=True, kw_only=True, repr=False)
class StoredRule(Stored, Rule):
    """Rule of a stored chain, which runs all stages from the last measured transform on."""

    layout: Layout


@dataclass(frozen=True, kw_only=True, repr=False)
class StoredTransform(Stored, Transform):
    """Transform that must be a stage of its own, before the stored rule."""

    layout: Layout


def stored(
    optimizer: Optimizer,
    *,
    param: str = PLAIN,
    state: str | Mapping[str, str] = PLAIN,
    seed: int = 0,
    state_device: str | None = None,
) -> Optimizer:
    """Return the optimizer with parameters and state kept in fewer bytes, or on another device.

    A step decodes to float32, runs the whole chain, and encodes, element by element. So any rule
    can be stored, and the result works with every executor, hook and checkpoint. Gradients have the
    dtype of the parameters, and are converted to float32 first. A stored step raises if a
    derivative is requested. It takes no complex parameters and no sparse gradients, and TorchScript
    cannot run it.

    Storages of the parameter:

    - ``"float32"``: unchanged.
    - ``"bfloat16"``: rounded to nearest. Updates below 2^-9 of the parameter are lost.
    - ``"bfloat16+master"``: the state has a float32 ``master``, and the parameter is its rounding.
      Steps of the master equal those of float32 parameters bit for bit. Elements of the parameter
      that were written to since the last step replace those of the master.
    - ``"bfloat16+kahan"``: the state has the rounding error (``compensation``, bfloat16). Parameter
      and compensation together are within 2^-17 of the float32 result.
    - ``"bfloat16+stochastic"``: rounded up or down at random, so that the mean is exact.

    Storages of a field of the state:

    - ``"float32"``: unchanged.
    - ``"bfloat16"``: rounded to nearest. An average whose changes are below 2^-9 of it stops
      changing, such as Adam's ``exp_avg_sq``.
    - ``"bfloat16+stochastic"``: rounded up or down at random.
    - ``"int8"`` and ``"int8+stochastic"``: 8 bits per element, and a scale for each block of 256.
      The error is at most 1/16 (stochastic: 1/8) of the value, or 2^-19 (2^-18) of the largest
      value in the block, or 2^-34 of it in a block without a negative number. A value that is not
      finite makes its whole block not finite.

    Random bits are a function of ``seed``, the step, and the value and gradient of the element. So
    they do not depend on splits of the tensors, ranks or restarts. Elements with equal value and
    gradient get the same bits.

    Args:
        optimizer: any optimizer. Its hyper-parameters keep their names.
        param: storage of the parameters. They must have its dtype.
        state: one storage for all fields of the state, or storages by field name (``"exp_avg"``, or
            ``"stage.field"``), with ``"*"`` for all other fields. A field that is not float32, or
            not of the shape of the parameter, is kept unchanged.
        seed: of the random bits, a whole number >= 0.
        state_device: ``"cpu"`` keeps the state on the CPU, while parameters are on another device.

    Returns:
        An :class:`~functional_optim.Optimizer`: all transforms up to the last one that measures
        all gradients, then one rule. The same optimizer if all storages are the defaults.

    Raises:
        TypeError: ``optimizer`` is not an Optimizer, or its leaves have different stages or shared
            scalars.
        ValueError: an unknown storage, field or device; a field that cannot be encoded; a chain
            that is already stored, or that has a rule before a measured transform, or a transform
            with the raw gradient after it.

    Example::

        >>> import torch
        >>> from functional_optim import adamw
        >>> optimizer = stored(
        ...     adamw(lr=0.1), param="bfloat16+kahan",
        ...     state={"exp_avg": "int8", "exp_avg_sq": "int8+stochastic"})
        >>> params = torch.ones(300, dtype=torch.bfloat16)
        >>> state = optimizer.init(params)
        >>> params, state = optimizer.update(params, torch.ones_like(params), state)
        >>> state.leaves.stages[-1].exp_avg.dtype, state.leaves.stages[-1].exp_avg_scale.shape
        (torch.uint8, torch.Size([2]))
        >>> optimizer.replace(lr=0.2).hyper["lr"]
        0.2

    Reference:
        Zamirai, Zhang, Aberger, De Sa, "Revisiting BFloat16 training", 2020 (Kahan summation and
        stochastic rounding); Micikevicius et al., "Mixed precision training", ICLR 2018 (master
        parameters); Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit optimizers via block-wise
        quantization", ICLR 2022.
    """
    refuse_closure(optimizer, "stored")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"stored takes an Optimizer, such as adamw(lr=1e-3), got {format_value(optimizer)}"
        )
    last = optimizer.stages[-1]
    if isinstance(last, StoredRule):
        raise ValueError(f"{last.name} is stored already; pass the optimizer without storage")
    if type(seed) is not int or seed < 0:
        raise ValueError(f"seed must be a whole number >= 0, got {seed!r}")
    if state_device not in (None, "cpu"):
        raise ValueError(f"state_device must be None or 'cpu', got {state_device!r}")
    kept_param = _lookup("param", param, PARAM_STORAGES)
    storages = _state_storages(optimizer, state)
    plain = param == PLAIN and state_device is None
    if plain and all(one.name == PLAIN for fields in storages for one in fields):
        return optimizer
    require_one_chain(optimizer, "stored")
    before = _count_separate(optimizer.stages)
    names = _hyper_names(optimizer)
    groups = [range(i, i + 1) for i in range(before)] + [range(before, len(optimizer.links))]
    layouts = [
        _layout(optimizer, group, names, storages, kept_param, seed, state_device)
        for group in groups
    ]
    links = tuple(
        _link(layout, [optimizer.links[i] for i in group])
        for layout, group in zip(layouts, groups, strict=True)
    )
    overrides = tuple(
        (where, tuple(_move(change, optimizer.links, names, before) for change in changes))
        for where, changes in optimizer.overrides
    )
    return replace(optimizer, links=links, overrides=overrides)


def _lookup(what: str, name: Any, table: Mapping[str, _T]) -> _T:
    if name not in table:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, table))}, got {name!r}")
    return table[name]


def _count_separate(stages: Sequence[Stage]) -> int:
    """Return the number of stages that stay separate. All later stages become one stored rule.

    A measured stage needs the gradients of all leaves. A leading stage must stay first, if another
    chain is put before it.
    """
    leading = [i for i, one in enumerate(stages) if isinstance(one, Transform) and one.leads]
    measured = [i for i, one in enumerate(stages) if is_measured(one)]
    count = max([*leading, *measured, -1]) + 1
    for stage in stages[:count]:
        if isinstance(stage, Rule):
            raise ValueError(
                f"{stage.name} changes the parameter before {stages[count - 1].name}, which needs "
                "a total over all gradients, but a stored step changes a parameter only after all "
                f"totals: put {stage.name} after {stages[count - 1].name}"
            )
    for stage in stages[count:]:
        if measured and isinstance(stage, Transform) and stage.raw:
            raise ValueError(
                f"{stage.name} reads the gradient that the chain was given, but comes after "
                f"{stages[max(measured)].name}, which needs a total over all gradients, and a "
                f"stored step has only the later gradient: put {stage.name} before "
                f"{stages[max(measured)].name}, or store another chain"
            )
    return count


def _hyper_names(optimizer: Optimizer) -> list[tuple[str, ...]]:
    """Return the names that the chain has for the hyper-parameters of each stage."""
    found: dict[tuple[int, str], str] = {}
    for name, places in hyper_positions(optimizer.links).items():
        found.update(dict.fromkeys(places, name))
        first, *others = [getattr(optimizer.links[i].hyper, field) for i, field in places]
        for (i, _), value in zip(places[1:], others, strict=True):
            if not (value is first or (not isinstance(value, Tensor) and value == first)):
                raise ValueError(
                    f"{optimizer.stages[i].name} has {name}={value!r}, and "
                    f"{optimizer.stages[places[0][0]].name} has {name}={first!r}: a stored rule "
                    f"has one; give both the same, with replace({name}=...)"
                )
    return [
        tuple(found[index, field] for field in link.hyper._fields)
        for index, link in enumerate(optimizer.links)
    ]


def _fields(stage: Stage) -> tuple[str, ...]:
    return tuple(stage.state._fields) if stage.stateful else ()


def _state_storages(
    optimizer: Optimizer, state: str | Mapping[str, str]
) -> list[tuple[StateStorage, ...]]:
    """Return the storages of the state fields of each stage."""
    asked = {REST: state} if isinstance(state, str) else dict(state)
    chosen = {name: _lookup(f"state[{name!r}]", one, STATE_STORAGES) for name, one in asked.items()}
    rest = chosen.pop(REST, STATE_STORAGES[PLAIN])
    addressed = [
        [(name, f"{label}.{field}") for name, field in zip(names, _fields(stage), strict=True)]
        for stage, label, names in zip(
            optimizer.stages,
            stage_labels(optimizer.stages),
            state_names(optimizer.stages),
            strict=True,
        )
    ]
    known = {name for own in addressed for both in own for name in both}
    for name in chosen:
        if name not in known:
            fields = f"its state has {', '.join(sorted(known))}" if known else "it keeps no state"
            raise ValueError(f"this chain has no field of state {name!r}; {fields}")
    found = []
    for link, names in zip(optimizer.links, addressed, strict=True):
        own = []
        for field, (name, full) in zip(_fields(link.stage), names, strict=True):
            named = chosen.get(name, chosen.get(full))
            storage = rest if named is None else named
            reason = _why_not_encoded(link, field) if storage.name != PLAIN else None
            if reason is not None and named is not None:
                raise ValueError(
                    f"{link.stage.name}: {field} {reason}, so it cannot be kept as {storage.name}; "
                    "leave it out"
                )
            own.append(storage if reason is None else STATE_STORAGES[PLAIN])
        found.append(tuple(own))
    return found


def _why_not_encoded(link: Link, field: str) -> str | None:
    """Return why a state field cannot be encoded, from the state of a matrix; None if it can."""
    param = torch.zeros(2, 3, device="cpu")
    value = getattr(link.stage.init(param, link.hyper), field)
    for tensor in field_tensors(value):
        if tensor.shape != param.shape:
            return f"has shape {tuple(tensor.shape)} for a parameter of {tuple(param.shape)}"
        if tensor.dtype != param.dtype:
            return f"has dtype {tensor.dtype}"
    return None


def _layout(
    optimizer: Optimizer,
    group: range,
    names: Sequence[tuple[str, ...]],
    storages: Sequence[tuple[StateStorage, ...]],
    param: ParamStorage,
    seed: int,
    device: str | None,
) -> Layout:
    stages = tuple(optimizer.stages[i] for i in group)
    known = state_names(optimizer.stages)
    stream = PARAM_STREAM
    kept = []
    for index in group:
        own = []
        stage = optimizer.stages[index]
        rows = zip(_fields(stage), known[index], storages[index], strict=True)
        for field, name, storage in rows:
            stream += 1
            many = field_types(stage.state)[field] is not Tensor
            own.append(KeptField(field_name(name), many, storage, stream))
        kept.append(tuple(own))
    layout = layout_of(stages, tuple(names[i] for i in group), param, tuple(kept), seed, device)
    parts = [*layout.extras]
    parts += [one.name + suffix for row in kept for one in row for suffix in one.storage.suffixes]
    twice = [name for name in parts if parts.count(name) > 1]
    if twice:
        raise ValueError(
            f"{stages[-1].name}: two parts of the stored state would be named {twice[0]!r}; rename "
            "that field of the state"
        )
    return layout


def _stored_stage(layout: Layout) -> Stage:
    last = layout.stages[-1]
    kinds: list[Kind] = [stage.kind for stage in layout.stages]
    common: dict[str, Any] = {
        "name": f"stored_{last.name}",
        "hyper": layout.hyper,
        "state": layout.state,
        "init": layout.init,
        "state_depends_on": layout.state_depends_on,
        "coefficients": layout.coefficients,
        "bounds": layout.bounds,
        "check": layout.check,
        "kind": "per_matrix" if "per_matrix" in kinds else "pointwise",
        "takes_dtensors": all(
            one.takes_dtensors for one in layout.stages if one.kind != "pointwise"
        ),
        "granularity": layout.block_size,
        "dtypes": (layout.param.dtype,),
        "differentiable": False,
        "state_device": layout.device,
        "layout": layout,
    }
    if isinstance(last, Rule):
        has_view = any(stage.view is not None for stage in layout.stages)
        return StoredRule(rule=layout.rule, view=layout.view if has_view else None, **common)
    assert isinstance(last, Transform)
    measure: Callable[[Tensor], Tensor] | None = layout.measure if is_measured(last) else None
    return StoredTransform(
        transform=layout.transform, measure=measure, leads=last.leads, raw=last.raw, **common
    )


def _link(layout: Layout, links: Sequence[Link]) -> Link:
    pairs = zip(layout.names, links, strict=True)
    return _stored_stage(layout)(
        **{k: v for names, link in pairs for k, v in zip(names, link.hyper, strict=True)}
    )


def _move(change: Change, links: Links, names: Sequence[tuple[str, ...]], before: int) -> Change:
    """Return a change of an override, with the index and the name that it has when stored."""
    place, field, value = change
    if isinstance(place, str):
        return change
    name = names[place][links[place].hyper._fields.index(field)]
    return min(place, before), name, value
