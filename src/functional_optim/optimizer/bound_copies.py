"""BoundCopies: copies and pickles of bound optimizers, bound to the copied parameters."""

from typing import Any, NoReturn

from functional_optim.core.chain import Chain
from functional_optim.core.one_at_a_time import one_at_a_time
from functional_optim.core.state import State


class BoundCopies:
    """Base class that lets ``copy.deepcopy`` and pickles bind copied parameters.

    The copy has the optimizer, the values of parameters and state, and flat buffers of its own.
    The contents of gradient buffers are not copied. ``copy.deepcopy((model, bound))`` binds the
    copy to the parameters of the copied model.
    """

    _optimizer: Chain
    _state: State
    params: Any

    @one_at_a_time
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._optimizer, self.params, self._state)

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"copy.copy of a {type(self).__name__} would step the same parameters by a second "
            "state: use copy.deepcopy((params, bound)), which copies the parameters too"
        )
