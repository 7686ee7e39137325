"""Explainer: the kernels of a bound optimizer, and the reasons for them."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from functional_optim.core.chain import Chain
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.kernels import Chunks, Executor, Scalars
from functional_optim.kernels.chunks import why_not_pointwise
from functional_optim.kernels.rounding import record_rounding
from functional_optim.optimizer.bound_buffer import BoundBuffer
from functional_optim.plan.flat.layout import FlatLayout


class Explainer:
    """Explanation of the kernels of flat buffers, each as one chunk.

    Args:
        firsts: for each buffer, hyper-parameters and coefficients of its first step.
        scalars: the origin of the coefficients: the host or the device.
    """

    def __init__(
        self,
        optimizer: Chain,
        name: str,
        executor: Executor,
        buffers: Sequence[BoundBuffer],
        firsts: Sequence[tuple[tuple[Any, ...], tuple[Any, ...]]],
        scalars: Scalars,
    ) -> None:
        self._stages, self._executor, self._scalars = optimizer.stages, executor, scalars
        self._by_chunks = executor.in_chunks(self._stages)
        self._otherwise = executor.explain_leaves(self._stages, name)
        self._counts = [sum(one.numel for one in buffer.segments) for buffer in buffers]
        self._chunks = [
            buffer.whole._replace(
                hypers=hypers, coefficients=coefficients, step=1.0, scalars=scalars
            )
            for buffer, (hypers, coefficients) in zip(buffers, firsts, strict=True)
        ]

    def chunks(self) -> Chunks | None:
        """Return the stepper of chunks; None if parameters are stepped one by one."""
        if self._by_chunks is not None and self._scalars is Scalars.HOST:
            for chunk in self._chunks:
                record_rounding(self._stages, chunk)
            self._by_chunks = self._executor.in_chunks(self._stages)
        return self._by_chunks

    def compile(self) -> None:
        """Compile the kernels of the buffers, if they are not compiled yet."""
        if self._by_chunks is not None:
            for chunk in self._chunks:
                self._by_chunks.compile(self._stages, chunk)

    def can_bind_tables(self) -> bool:
        """Return True if one kernel call per buffer can step tensors at any addresses."""
        by_chunks = self._by_chunks
        if by_chunks is None:
            return False
        counts = [chunk.param.numel() for chunk in self._chunks]
        bound = map(partial(by_chunks.bind_table, self._stages), self._chunks, counts)
        return all(one is not None for one in bound)

    def lines(self) -> list[str]:
        """Return the kernel of each buffer, and why, one line for each buffer."""
        found = []
        for chunk, count in zip(self._chunks, self._counts, strict=True):
            param = chunk.param
            how = self._otherwise
            if self._by_chunks is not None:
                how = self._by_chunks.explain(self._stages, chunk)
            what = f"{count:,} elements of {param.dtype} on {param.device}"
            found.append(f"{chunk.name}: {what}: {how}")
        return found


def why_alone(
    stages: Sequence[Stage], params: Sequence[Tensor], others: Sequence[int], layout: FlatLayout
) -> list[str]:
    """Return why parameters are stepped one by one, one line for each reason.

    Args:
        others: the indices of the parameters that are stepped one by one.
    """

    def why(place: int) -> str:
        whole = why_not_pointwise(stages)
        if whole is not None:
            return whole
        if place in layout.reasons:
            return layout.reasons[place]
        if block_size_of(stages) > 1 and not params[place].is_contiguous():
            return (
                "its elements do not lie in the order of its shape, and the chain works in blocks"
            )
        return "its state has another shape"

    counts = Counter(map(why, others))
    return [
        f"{count} {'parameters are' if count > 1 else 'parameter is'} stepped one by one: {reason}"
        for reason, count in counts.items()
    ]
