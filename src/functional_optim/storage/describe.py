"""Memory that an optimizer keeps for a tree of parameters, in bytes. Works on meta tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.initial import init_leaf
from functional_optim.core.links import state_names
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState, field_tensors
from functional_optim.optimizer import Optimizer
from functional_optim.plan.items import params_of
from functional_optim.storage.param_storage import PARAM_STORAGES
from functional_optim.storage.stored import stored


@dataclass(frozen=True)
class Row:
    """Row of the table."""

    name: str
    """"parameter", "gradient", "step" (the count of each leaf), or a field of state."""
    dtype: str
    total_bytes: int
    bytes_per_parameter: float
    """Bytes for each element of the parameters."""


@dataclass(frozen=True)
class Description:
    """Memory that is kept for a tree of parameters. ``print`` shows it as a table."""

    rows: tuple[Row, ...]
    numel: int
    """Elements of all parameters together."""

    @property
    def total_bytes(self) -> int:
        """Parameters, gradients and state together."""
        return sum(row.total_bytes for row in self.rows)

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes for each element of the parameters."""
        return _share(self.total_bytes, self.numel)

    @property
    def state_bytes(self) -> int:
        """The state alone."""
        return sum(row.total_bytes for row in self.rows if row.name not in _GIVEN)

    def __str__(self) -> str:
        rows = [
            (row.name, row.dtype, f"{row.bytes_per_parameter:.3f}", f"{row.total_bytes:,}")
            for row in self.rows
        ]
        total = ("total", "", f"{self.bytes_per_parameter:.3f}", f"{self.total_bytes:,}")
        heads = (f"{self.numel:,} parameters", "dtype", "bytes each", "bytes")
        return format_table(heads, [*rows, total])


@dataclass(frozen=True)
class Comparison:
    """Descriptions of one optimizer under several storages. ``print`` shows them as a table."""

    descriptions: tuple[tuple[str, Description], ...]
    """Pairs (what was chosen, what is then kept)."""

    def __str__(self) -> str:
        rows = []
        for name, one in self.descriptions:
            given = {row.name: row.bytes_per_parameter for row in one.rows if row.name in _GIVEN}
            parts = (*given.values(), _share(one.state_bytes, one.numel), one.bytes_per_parameter)
            rows.append((name, *(f"{part:.3f}" for part in parts), f"{one.total_bytes:,}"))
        return format_table(
            ("bytes for each parameter", *_GIVEN, "state", "total", "all bytes"), rows
        )


_GIVEN = ("parameter", "gradient")

CHOICES: dict[str, dict[str, str]] = {
    "float32": {},
    "float32, state bfloat16+stochastic": {"state": "bfloat16+stochastic"},
    "float32, state int8+stochastic": {"state": "int8+stochastic"},
    "bfloat16+master": {"param": "bfloat16+master"},
    "bfloat16+kahan": {"param": "bfloat16+kahan"},
    "bfloat16+stochastic": {"param": "bfloat16+stochastic"},
    "bfloat16+kahan, state int8+stochastic": {
        "param": "bfloat16+kahan",
        "state": "int8+stochastic",
    },
    "bfloat16+stochastic, state int8+stochastic": {
        "param": "bfloat16+stochastic",
        "state": "int8+stochastic",
    },
}
"""What :func:`compare_storages` compares unless told: arguments of ``stored``, by name."""


def describe(optimizer: Optimizer, params: Any) -> Description:
    """Return the bytes of parameters, gradients and each field of state.

    Args:
        optimizer: any, stored or not.
        params: a pytree of parameters, on any device; "meta" will do.

    Returns:
        A :class:`Description`, to be printed.

    Raises:
        TypeError: a leaf that is no tensor.
        ValueError: params that ``init`` refuses.

    Example::

        >>> import torch
        >>> from functional_optim import adamw
        >>> print(describe(adamw(), torch.empty(10, 100, device="meta")))
        1,000 parameters  dtype    bytes each   bytes
        parameter         float32       4.000   4,000
        gradient          float32       4.000   4,000
        step              int64         0.008       8
        exp_avg           float32       4.000   4,000
        exp_avg_sq        float32       4.000   4,000
        total                          16.008  16,008
    """
    leaves, _, _ = params_of(optimizer, params)
    sizes: dict[str, int] = {}
    dtypes: dict[str, list[str]] = {}
    numel = 0

    def count(name: str, tensor: Tensor) -> None:
        sizes[name] = sizes.get(name, 0) + tensor.numel() * tensor.element_size()
        known = dtypes.setdefault(name, [])
        known += [dtype for dtype in [str(tensor.dtype)[6:]] if dtype not in known]

    for leaf, chain in zip(leaves, optimizer.chains_for(params), strict=True):
        if leaf is None:
            continue
        numel += leaf.numel()
        with torch.no_grad():
            shadow = torch.empty_like(leaf, device="meta")
            state = init_leaf(chain.stages, chain.hypers, shadow)
        for name, tensor in (*zip(_GIVEN, (shadow, shadow), strict=True), ("step", state.step)):
            count(name, tensor)
        for name, tensor in _fields(chain.stages, state):
            count(name, tensor)
    rows = [
        Row(name, ", ".join(dtypes[name]), size, _share(size, numel))
        for name, size in sizes.items()
    ]
    return Description(tuple(rows), numel)


def compare_storages(
    optimizer: Optimizer,
    params: Any,
    choices: Mapping[str, Mapping[str, Any]] | None = None,
) -> Comparison:
    """Return the bytes that an optimizer takes under several storages.

    Args:
        optimizer: not stored yet.
        params: a pytree of parameters, on any device; "meta" will do. Their dtype is taken to be
            the one that each storage wants.
        choices: arguments of :func:`~functional_optim.storage.stored`, by name; by default
            :data:`CHOICES`.

    Returns:
        A :class:`Comparison`, to be printed.

    Raises:
        ValueError: arguments that ``stored`` refuses.

    Example::

        >>> import torch
        >>> from functional_optim import adamw
        >>> params = torch.empty(1024, 1024, device="meta")
        >>> print(compare_storages(adamw(), params, {
        ...     "float32": {},
        ...     "bfloat16": {"param": "bfloat16+stochastic", "state": "int8+stochastic"}}))
        bytes for each parameter  parameter  gradient  state   total   all bytes
        float32                       4.000     4.000  8.000  16.000  16,777,224
        bfloat16                      2.000     2.000  2.031   6.031   6,324,232
    """
    leaves, spec, _ = params_of(optimizer, params)
    found = []
    for name, arguments in (CHOICES if choices is None else choices).items():
        made = stored(optimizer, **arguments)
        dtype = PARAM_STORAGES[arguments.get("param", "float32")].dtype
        shadows = [
            None if leaf is None else torch.empty_like(leaf, dtype=dtype, device="meta")
            for leaf in leaves
        ]
        found.append((name, describe(made, spec.unflatten(shadows))))
    return Comparison(tuple(found))


def _fields(stages: Sequence[Stage], state: LeafState) -> list[tuple[str, Tensor]]:
    """Every tensor of a state, by the name of its field, or ``stage.field`` if there are two."""
    return [
        (name, tensor)
        for names, one in zip(state_names(stages), state.stages, strict=True)
        for name, value in zip(names, one, strict=True)
        for tensor in field_tensors(value)
    ]


def _share(size: int, numel: int) -> float:
    return size / numel if numel else 0.0


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as columns of text; those that hold numbers are flush right."""
    columns = list(zip(heads, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    left = [not column[-1][:1].isdigit() for column in columns]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if flush else cell.rjust(width)
            for cell, width, flush in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in (heads, *rows)
    )
