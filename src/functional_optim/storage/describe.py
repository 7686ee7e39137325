"""Tables of the memory of parameters, gradients and state, in bytes. Works on meta tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.links import state_names
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState, field_tensors
from functional_optim.core.state_init import init_like
from functional_optim.optimizer import Optimizer
from functional_optim.plan.tree import params_of
from functional_optim.storage.param_storage import PARAM_STORAGES
from functional_optim.storage.stored import stored


@dataclass(frozen=True)
class Row:
    """Row of a :class:`Description`.

    Example::

        >>> from functional_optim import adam, describe
        >>> row = describe(adam(), {"w": torch.zeros(256)}).rows[0]
        >>> row.name, row.total_bytes, row.bytes_per_parameter
        ('parameter', 1024, 4.0)
    """

    name: str
    """"parameter", "gradient", "step" (the step counts), or a field of the state."""
    dtype: str
    total_bytes: int
    bytes_per_parameter: float
    """Bytes per element of the parameters."""


@dataclass(frozen=True)
class Description:
    """Memory of parameters, gradients and state. ``print`` shows it as a table.

    Example::

        >>> from functional_optim import adam, describe
        >>> describe(adam(), {"w": torch.zeros(256)}).state_bytes
        2056
    """

    rows: tuple[Row, ...]
    numel: int
    """Number of elements of all parameters."""

    @property
    def total_bytes(self) -> int:
        """Bytes of parameters, gradients and state."""
        return sum(row.total_bytes for row in self.rows)

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes per element of the parameters."""
        return _per_element(self.total_bytes, self.numel)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state."""
        return sum(row.total_bytes for row in self.rows if row.name not in _NOT_STATE)

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
    """Descriptions of one optimizer in several storages. ``print`` shows them as a table.

    Example::

        >>> from functional_optim import adam, compare_storages
        >>> compared = compare_storages(adam(), {"w": torch.zeros(256, dtype=torch.bfloat16)})
        >>> compared.descriptions[0][0]
        'float32'
    """

    descriptions: tuple[tuple[str, Description], ...]
    """Pairs of the name of a storage, and the Description with that storage."""

    def __str__(self) -> str:
        rows = []
        for name, one in self.descriptions:
            fixed = [row.bytes_per_parameter for row in one.rows if row.name in _NOT_STATE]
            parts = (*fixed, _per_element(one.state_bytes, one.numel), one.bytes_per_parameter)
            rows.append((name, *(f"{part:.3f}" for part in parts), f"{one.total_bytes:,}"))
        return format_table(
            ("bytes for each parameter", *_NOT_STATE, "state", "total", "all bytes"), rows
        )


_NOT_STATE = ("parameter", "gradient")

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
"""Default choices of :func:`compare_storages`: arguments of ``stored``, by name."""


def describe(optimizer: Optimizer, params: Any) -> Description:
    """Return the bytes of parameters, gradients and each field of the state.

    Args:
        optimizer: any optimizer, stored or not.
        params: a pytree of parameters, on any device, such as "meta".

    Returns:
        A :class:`Description`. Print it to see a table.

    Raises:
        TypeError: a leaf that is not a tensor.
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
        state = init_like(chain.stages, chain.hypers, leaf.shape, leaf.dtype)
        for name in _NOT_STATE:
            count(name, leaf)
        count("step", state.step)
        for name, tensor in _named_tensors(chain.stages, state):
            count(name, tensor)
    rows = [
        Row(name, ", ".join(dtypes[name]), size, _per_element(size, numel))
        for name, size in sizes.items()
    ]
    return Description(tuple(rows), numel)


def compare_storages(
    optimizer: Optimizer, params: Any, choices: Mapping[str, Mapping[str, Any]] | None = None
) -> Comparison:
    """Return the bytes that an optimizer needs in several storages.

    Args:
        optimizer: an optimizer that is not stored.
        params: a pytree of parameters, on any device, such as "meta". Their dtype is ignored: each
            storage of parameters has its own dtype.
        choices: arguments of :func:`~functional_optim.storage.stored`, by name; by default
            :data:`CHOICES`.

    Returns:
        A :class:`Comparison`. Print it to see a table.

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
        kept = stored(optimizer, **arguments)
        dtype = PARAM_STORAGES[arguments.get("param", "float32")].dtype
        shadows = [
            None if leaf is None else torch.empty_like(leaf, dtype=dtype, device="meta")
            for leaf in leaves
        ]
        found.append((name, describe(kept, spec.unflatten(shadows))))
    return Comparison(tuple(found))


def _named_tensors(stages: Sequence[Stage], state: LeafState) -> list[tuple[str, Tensor]]:
    """Return all tensors of a state with their field names; ``stage.field`` if not unique."""
    return [
        (name, tensor)
        for names, one in zip(state_names(stages), state.stages, strict=True)
        for name, value in zip(names, one, strict=True)
        for tensor in field_tensors(value)
    ]


def _per_element(size: int, numel: int) -> float:
    return size / numel if numel else 0.0


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as columns of text. Columns of numbers are aligned right."""
    columns = list(zip(heads, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_text = [not column[-1][:1].isdigit() for column in columns]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(row, widths, is_text, strict=True)
        ).rstrip()
        for row in (heads, *rows)
    )
