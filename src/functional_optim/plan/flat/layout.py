"""FlatLayout: parameters as views of a few flat buffers, so a step is a few passes over memory.

A pointwise rule works on any range of elements. If parameters are adjacent in memory, one call
steps them all, at the speed of memory, and no Python runs per parameter.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from functional_optim._torch.tensors import DisableTorchFunction
from functional_optim.core.buffer_memory import buffer_of
from functional_optim.plan.flat.buffer import FlatBuffer, Segment, assign_segments, difference
from functional_optim.plan.flat.gradients import FlatGradients, like
from functional_optim.plan.flat.move_checks import immovable_reasons
from functional_optim.plan.guard import mark_changed

__all__ = ["FlatBuffer", "FlatLayout", "Segment"]


class FlatLayout:
    """Flat buffers with the values of parameters: one buffer per real dtype, device and key.

    The parameters stay the same objects, with the same names, ties, hooks, ``requires_grad`` and
    strides. Only their memory changes. So modules run, save, load, are copied and are wrapped by
    DistributedDataParallel as before. There are some differences:

    - A parameter that cannot be moved safely stays in its memory; ``reasons`` has the reason.
    - Tensors that already share memory with a parameter (``detach()``, ``state_dict()``) keep the
      old memory, and do not see later changes.
    - Autograd does not notice that a write to a buffer changes its parameters. Call
      :meth:`mark_changed` after a write. Then a backward pass that needs old values raises an
      error, as it does without buffers.
    - Each parameter has a separate storage, which is exactly its elements in the buffer. So
      ``torch.save``, ``pickle`` and ``safetensors`` write a parameter as they write any other.
    - Calls that give parameters new memory (``module.half()``, ``module.to(device)``,
      ``module.share_memory()``) take them out of the buffers. :meth:`check` then raises an error.

    Args:
        params: the tensors, each once. They may be plain tensors or nn.Parameters.
        names: a name for each, for errors.
        keys: a hashable value for each. Parameters with different keys are in different buffers.
        align: number of elements. Each parameter begins at a multiple of it, and the length of each
            buffer is a multiple of it. Gaps are zero.
        order: the indices of all parameters in the order of memory; None for the given order.

    Attributes:
        buffers: a tuple of :class:`FlatBuffer`; ``segment.index`` is an index in ``params``.
        apart: indices of the parameters that are in no buffer.
        reasons: for each of these indices, the reason.

    Raises:
        TypeError: a parameter is not a tensor, or a key cannot be hashed.
        ValueError: a parameter occurs twice, or was created in inference mode; the lists differ in
            length; ``align`` is below 1.

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
        self.reasons = immovable_reasons(params, names)
        self.apart = tuple(sorted(self.reasons))
        self._given = len(params)
        self._undone = False
        self._gradients: FlatGradients | None = None
        groups: dict[tuple[torch.dtype, torch.device, Hashable], list[tuple[int, str, Tensor]]] = {}
        for i in range(len(params)) if order is None else order:
            if i not in self.reasons:
                group = (params[i].dtype.to_real(), params[i].device, keys[i])
                groups.setdefault(group, []).append((i, names[i], params[i]))
        with torch.inference_mode(mode=False), torch.no_grad():
            buffers = []
            for (dtype, device, key), members in groups.items():
                placed, length = assign_segments(members, align)
                data = torch.zeros(length, dtype=dtype, device=device)
                buffers.append(FlatBuffer(data, placed, key))
            self.buffers = tuple(buffers)
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
            self._starts = [buffer.data.data_ptr() for buffer in self.buffers]
            # All values are copied first, so that nothing has changed if memory runs out.
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
    def order(self) -> Sequence[int]:
        """For each of ``params``, its index among the parameters that were given."""
        return self._order

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters in buffers, in their order there."""
        return self._params

    def check(self) -> None:
        """Raise RuntimeError if a parameter has left its buffer, or the layout was undone.

        A parameter has left its buffer if its memory, shape, strides, dtype or device has changed.
        """
        self._require_alive()
        for number, (buffer, start) in enumerate(zip(self.buffers, self._starts, strict=True)):
            if buffer.data.data_ptr() != start:
                raise RuntimeError(
                    f"flat buffer {number} ({buffer}) was given other memory, such as by "
                    "share_memory_(), so it no longer holds its parameters. Call undo() on this "
                    "layout and make a new one"
                )
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

        Call it after writing to ``buffer.data``. Then backward passes through graphs that saved old
        values raise an error, as after any change in place.

        Raises:
            RuntimeError: the layout was undone.
        """
        self._require_alive()
        mark_changed(self._params)

    def gradient_buffers(self) -> list[Tensor]:
        """Return a flat gradient for each buffer, with zeros at first; always the same tensors.

        Raises:
            RuntimeError: the layout was undone.
        """
        return self._of_gradients().buffers

    def gradient_views(self) -> list[Tensor]:
        """Return views of the gradient buffers, one for each of ``params``, like the parameters.

        Raises:
            RuntimeError: the layout was undone.
        """
        return [view.detach() for view in self._of_gradients().views]

    def attach_gradients(self) -> None:
        """Set ``.grad`` of the parameters in buffers to views of the gradient buffers.

        Autograd then adds to the buffers in place. Existing gradients are copied, and missing ones
        become zeros. So a parameter that does not affect the loss has a gradient of zeros, not
        None. Parameters that require no gradient are skipped.

        Use :meth:`zero_gradients` to clear gradients. ``zero_grad(set_to_none=True)`` detaches
        them, as do ``backward(create_graph=True)`` and DistributedDataParallel with
        ``gradient_as_bucket_view=True``: see :meth:`gradients_in_place`.

        Raises:
            ValueError: a gradient is not dense; nothing is attached.
            RuntimeError: a parameter has left its buffer, or the layout was undone.
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
            grads: one for each of ``params``, in that order. Gradients of parameters that are in no
                buffer are ignored.

        Returns:
            True if there is nothing to gather. False if any gradient is missing or in other memory.

        Raises:
            ValueError: the number of gradients is wrong.
            RuntimeError: the layout was undone.
        """
        return self._of_gradients().in_place(grads)

    def gradients_alike(self, grads: Sequence[Tensor | None]) -> bool:
        """Return True if each gradient has the layout of its parameter's view, at any address.

        Arguments and errors are those of :meth:`gradients_in_place`.
        """
        return self._of_gradients().alike(grads)

    def gather(self, grads: Sequence[Tensor | None]) -> None:
        """Copy separate gradients into the gradient buffers.

        Args:
            grads: one for each of ``params``, in that order, with any strides. Gradients of
                parameters that are in no buffer are ignored, and may be None.

        Raises:
            TypeError: a gradient is not a tensor.
            ValueError: a gradient is missing, is not dense, or has another shape, dtype or device
                than its parameter; the number of gradients is wrong. Nothing has changed.
            RuntimeError: the layout was undone.
        """
        self._of_gradients().gather(grads)

    def undo(self) -> None:
        """Move every parameter back to separate memory, with its values and strides.

        Gradients stay in their memory. Parameters that have left their buffer do not change.
        Afterwards, the buffers and all methods raise RuntimeError.

        Raises:
            RuntimeError: the layout was undone before.
        """
        self._require_alive()
        buffers = {id(buffer.data) for buffer in self.buffers}
        with torch.inference_mode(mode=False), torch.no_grad():
            here = [param for param in self._params if id(buffer_of(param)) in buffers]
            for param, values in [(param, copy_with_strides(param)) for param in here]:
                param.data = values
        for buffer in self.buffers:
            buffer.release()
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


def copy_with_strides(tensor: Tensor) -> Tensor:
    """Return a copy with the strides of the tensor, in separate memory."""
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
