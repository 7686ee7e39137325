"""Parameters as views of a few flat buffers, so that a step is a few passes over memory.

A pointwise rule may be run on any stretch of elements. If parameters lie end to end, one call
steps them all, at the speed of memory, and no Python runs per parameter.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from functional_optim._torch import DisableTorchFunction
from functional_optim.core.buffer_memory import buffer_of
from functional_optim.plan.flat.apart import reasons_apart
from functional_optim.plan.flat.buffer import (
    FlatBuffer,
    ParamToPlace,
    Segment,
    difference,
    place,
)
from functional_optim.plan.flat.gradients import FlatGradients, like
from functional_optim.plan.guard import MemoryGuard, mark_changed

__all__ = ["FlatBuffer", "FlatLayout", "Segment"]


class FlatLayout:
    """Moves parameters into flat buffers: one per real dtype, device and key.

    The parameters stay the objects that they are: names, ties, hooks, ``requires_grad``, strides,
    and what other optimizers keep by parameter hold. Only their memory is another. So modules
    run, save, load, are copied and are wrapped by DistributedDataParallel as before. To know:

    - A parameter that cannot be moved unnoticed stays where it is; ``reasons`` says why.
    - Tensors that were made of a parameter before (``detach()``, ``state_dict()``) keep the
      old memory, and no longer follow it.
    - Autograd counts what is written to each tensor. It does not see that writing to a buffer
      changes the parameters in it: call :meth:`mark_changed` afterwards, and a backward pass that
      needs older values raises, as it does without buffers.
    - Each parameter has a storage of its own, which is exactly its elements in the buffer. So
      ``torch.save``, ``pickle`` and ``safetensors`` write a parameter as they write any other.
    - What gives parameters new memory (``module.half()``, ``module.to(device)``,
      ``module.share_memory()``) takes them out of the buffers: :meth:`check` says so.

    Args:
        params: the tensors, each once. Plain tensors will do as well as nn.Parameters.
        names: a name for each, for errors.
        keys: a hashable value for each; parameters of different keys are in different buffers.
        align: each parameter begins at a multiple of so many elements, and each buffer ends at one.
            Gaps hold zeros.
        order: the places of all parameters in the order in which they are to stand; None for the
            order given.

    Attributes:
        buffers: a tuple of :class:`FlatBuffer`; ``segment.index`` is the place in ``params``.
        apart: places of the parameters that stay where they are.
        reasons: for each of those, why.

    Raises:
        TypeError: something that is no tensor, or a key that cannot be hashed.
        ValueError: a parameter twice, or made in inference mode; lists of unequal length; an
            ``align`` below 1.

    Example::

        >>> import torch
        >>> from functional_optim.plan.flat.layout import FlatLayout
        >>> model = torch.nn.Linear(3, 2)
        >>> names, params = zip(*model.named_parameters())
        >>> layout = FlatLayout(params, names)
        >>> layout.attach_gradients()
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> with torch.no_grad():
        ...     for buffer, grad in zip(layout.buffers, layout.gradient_buffers()):
        ...         _ = buffer.data.sub_(grad, alpha=0.1)
        >>> layout.mark_changed()
        >>> layout.gradient_buffers()
        [tensor([1., 1., 1., 1., 1., 1., 1., 1.])]
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        *,
        keys: Sequence[Hashable] | None = None,
        align: int = 1,
        order: Sequence[int] | None = None,
    ) -> None:
        params, names = list(params), list(names)
        keys = [None] * len(params) if keys is None else list(keys)
        _check_arguments(params, names, keys, align)
        self.reasons = reasons_apart(params, names)
        self.apart = tuple(sorted(self.reasons))
        self._given = len(params)
        self._undone = False
        self._gradients: FlatGradients | None = None
        groups: dict[tuple[torch.dtype, torch.device, Hashable], list[ParamToPlace]] = {}
        for i in range(len(params)) if order is None else order:
            if i not in self.reasons:
                group = (params[i].dtype.to_real(), params[i].device, keys[i])
                groups.setdefault(group, []).append(ParamToPlace(i, names[i], params[i]))
        with torch.inference_mode(mode=False), torch.no_grad():
            self.buffers = tuple(
                _new_buffer(dtype, device, key, members, align)
                for (dtype, device, key), members in groups.items()
            )
            segments = [segment for buffer in self.buffers for segment in buffer.segments]
            self._order = [segment.index for segment in segments]
            self._names = [segment.name for segment in segments]
            self._params = [params[i] for i in self._order]
            views = [view for buffer in self.buffers for view in buffer.views(buffer.data)]
            owners = [buffer for buffer in self.buffers for _ in buffer.segments]
            self._views = [
                like(param, view).detach() for param, view in zip(self._params, views, strict=True)
            ]
            parts = [buffer.part(view) for buffer, view in zip(owners, self._views, strict=True)]
            self._guard = MemoryGuard(self._views)
            self._starts = [buffer.data.data_ptr() for buffer in self.buffers]
            # All values first: nothing has changed if memory runs out.
            for param, view in zip(self._params, self._views, strict=True):
                view.copy_(param)
            for param, part in zip(self._params, parts, strict=True):
                param.data = part

    def __repr__(self) -> str:
        return f"FlatLayout({list(self.buffers)}, {len(self.apart)} parameters apart)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a FlatLayout belongs to the parameters whose memory it holds, so it cannot be copied "
            "or pickled; make a new one of the copied parameters"
        )

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters in buffers, in their order there."""
        return self._params

    def check(self) -> None:
        """Make sure that every parameter still lives in its buffer as it did.

        It takes one pass in C over the parameters, with no Python for each.

        Raises:
            RuntimeError: one has other memory, shape, strides, dtype or device; it is named. Or
                the layout was undone.
        """
        self._require_alive()
        for number, (buffer, start) in enumerate(zip(self.buffers, self._starts, strict=True)):
            if buffer.data.data_ptr() != start:
                raise RuntimeError(
                    f"flat buffer {number} ({buffer}) was given other memory, such as by "
                    "share_memory_(), so it no longer holds its parameters. Call undo() on this "
                    "layout and make a new one"
                )
        if self._guard.hold(self._params):
            return
        for param, view, name in zip(self._params, self._views, self._names, strict=True):
            what = difference(param, view)
            if what is not None:
                raise RuntimeError(
                    f"the parameter at {name!r} has left its flat buffer: {what}; something gave "
                    "it other memory (module.half(), module.to(), module.share_memory(), an "
                    "assignment to .data). Call undo() on this layout and make a new one"
                )

    def mark_changed(self) -> None:
        """Tell autograd that all parameters in buffers were changed in place.

        Call it after writing to ``buffer.data``: backward passes through graphs that saved the
        values of before then raise, as after any change in place, and do not go wrong.

        Raises:
            RuntimeError: the layout was undone.
        """
        self._require_alive()
        mark_changed(self._params)

    def gradient_buffers(self) -> list[Tensor]:
        """Return a flat gradient for each buffer, zeros at first; the same tensors at every call.

        Raises:
            RuntimeError: the layout was undone.
        """
        return self._of_gradients().buffers

    def attach_gradients(self) -> None:
        """Make views of the gradient buffers the ``.grad`` of the parameters in buffers.

        Autograd then adds to the buffers in place. A gradient that was there is copied, a missing
        one becomes zeros; so a parameter that the loss does not depend on has a gradient of
        zeros, not None. Parameters that require no gradient are left as they are. To start anew,
        call :meth:`zero_gradients`; ``zero_grad(set_to_none=True)`` takes the gradients away, as
        do ``backward(create_graph=True)`` and DistributedDataParallel with
        ``gradient_as_bucket_view=True``: see :meth:`gradients_in_place`.

        Raises:
            ValueError: a gradient that is not dense; nothing is attached then.
            RuntimeError: a parameter that has left its buffer, or the layout was undone.
        """
        self.check()
        self._of_gradients().attach()

    def zero_gradients(self) -> None:
        """Fill the gradient buffers, and so all attached gradients, with zeros.

        Raises:
            RuntimeError: the layout was undone.
        """
        self._of_gradients().zero()

    def gradients_in_place(self, grads: Sequence[Tensor | None]) -> bool:
        """Return True if each gradient is its parameter's view of the gradient buffers.

        Args:
            grads: one per parameter given, in that order. Those of parameters apart do not count.

        Returns:
            True if there is nothing to gather. False if any is missing or elsewhere.

        Raises:
            ValueError: another number of gradients.
            RuntimeError: the layout was undone.
        """
        return self._of_gradients().in_place(grads)

    def gather(self, grads: Sequence[Tensor | None]) -> None:
        """Copy separate gradients into the gradient buffers.

        Args:
            grads: one per parameter given, in that order, in any strides. Those of parameters
                apart are not looked at, and may be None.

        Raises:
            TypeError: a gradient that is no tensor.
            ValueError: one that is missing, not dense, or of another shape, dtype or device than
                its parameter; another number of gradients. Nothing is written then.
            RuntimeError: the layout was undone.
        """
        self._of_gradients().gather(grads)

    def gather_at_once(self, grads: Sequence[Any]) -> bool:
        """:meth:`gather`, where the loops in C++ are there and can do it.

        Returns:
            Whether it was done: then no gradient is missing, and all that were copied belong to
            their parameters. If not, nothing was written.

        Raises:
            ValueError: another number of gradients.
            RuntimeError: the layout was undone.
        """
        return self._of_gradients().gather_at_once(grads)

    def undo(self) -> None:
        """Give every parameter memory of its own again, with its values and strides.

        Gradients stay as they are, in the memory where they are. Parameters that have left their
        buffer are left alone. The buffers, and all methods, raise RuntimeError from then on.

        Raises:
            RuntimeError: the layout was undone before.
        """
        self._require_alive()
        buffers = {id(buffer.data) for buffer in self.buffers}
        with torch.inference_mode(mode=False), torch.no_grad():
            here = [param for param in self._params if id(buffer_of(param)) in buffers]
            for param, values in [(param, own_copy(param)) for param in here]:
                param.data = values
        for buffer in self.buffers:
            buffer.retire()
        self._undone = True
        self._gradients = None
        self._views = []

    def _of_gradients(self) -> FlatGradients:
        self._require_alive()
        if self._gradients is None:
            self._gradients = FlatGradients(self.buffers, self._params, self._order, self._given)
        return self._gradients

    def _require_alive(self) -> None:
        if self._undone:
            raise RuntimeError(
                "this layout was undone, and its parameters have memory of their own; make a new "
                "FlatLayout of them"
            )


def _new_buffer(
    dtype: torch.dtype, device: torch.device, key: Hashable, members: list[ParamToPlace], align: int
) -> FlatBuffer:
    segments, length = place(members, align)
    return FlatBuffer(torch.zeros(length, dtype=dtype, device=device), segments, key)


def own_copy(tensor: Tensor) -> Tensor:
    """Return a copy with the strides of the tensor, in memory of its own."""
    empty = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return empty.copy_(tensor)


def _check_arguments(params: list[Any], names: list[Any], keys: list[Any], align: Any) -> None:
    if not len(params) == len(names) == len(keys):
        raise ValueError(
            "params, names and keys must be equally many, got "
            f"{len(params)}, {len(names)} and {len(keys)}"
        )
    if not isinstance(align, int) or isinstance(align, bool):
        raise TypeError(f"align must be a whole number of elements, got {align!r}")
    if align < 1:
        raise ValueError(f"align must be at least 1, got {align}")
    seen: dict[int, Any] = {}
    for param, name, key in zip(params, names, keys, strict=True):
        if not isinstance(param, Tensor):
            raise TypeError(
                f"the parameter at {name!r} must be a tensor, got {type(param).__name__}"
            )
        try:
            hash(key)
        except TypeError as error:
            raise TypeError(f"the key of {name!r} must be hashable, got {key!r}") from error
        if id(param) in seen:
            raise ValueError(
                f"the parameter at {name!r} is also at {seen[id(param)]!r}: give it once, and "
                "every module that holds it sees it move"
            )
        seen[id(param)] = name
        with DisableTorchFunction():
            made_in_inference = param.is_inference()
        if made_in_inference:
            raise ValueError(
                f"the parameter at {name!r} was made in inference mode, so it cannot be trained; "
                "clone() it outside of inference mode"
            )
