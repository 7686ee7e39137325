"""The account of one iteration: every parameter in one bucket, or an error that names it."""

from collections.abc import Iterable, Sequence

from functional_optim.core.brief import some


class Iteration:
    """Parameters that the buckets of the running iteration have brought.

    Args:
        names: all parameters that are to be stepped.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._seen: set[str] = set()
        self._backward = -1
        self._of_backward: set[str] = set()

    def enter(self, index: int, names: Sequence[str], backward: int = -1) -> None:
        """A bucket has arrived.

        Args:
            index: of the bucket in its module.
            names: of its parameters.
            backward: a number of the backward pass, where it is known; buckets of two modules
                that have a parameter in common come in one.

        Raises:
            RuntimeError: a parameter that already came in this iteration, or, with the first
                bucket of an iteration, one that never came in the last.
        """
        if index == 0 and self._seen:
            missing = sorted(self._names - self._seen)
            self._seen = set()
            raise RuntimeError(
                "the last iteration ended before all buckets were stepped; never stepped: "
                f"{some(missing)}. A backward pass failed or was cut short: restart from a "
                "checkpoint, since ranks may differ now"
            )
        if backward != self._backward:
            self._backward, self._of_backward = backward, set()
        of_backward = self._of_backward if backward >= 0 else set()
        for name in names:
            if name in self._seen or name in of_backward:
                self._seen = set()
                raise RuntimeError(
                    f"the parameter {name!r} came twice in one iteration and would be stepped "
                    "twice; register one step hook per parameter, on one DDP module"
                )
            self._seen.add(name)
        self._of_backward.update(names)

    def finish(self) -> None:
        """The last bucket has arrived.

        Raises:
            RuntimeError: a parameter that was in no bucket.
        """
        missing = sorted(self._names - self._seen)
        self._seen = set()
        if missing:
            raise RuntimeError(
                f"these parameters were in no bucket and were never stepped: {some(missing)}. "
                "They must require gradients when DDP wraps the module; leave others out of params="
            )
