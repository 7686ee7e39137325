"""Base class of objects that cannot be copied, since workers have their state."""

from typing import NoReturn, SupportsIndex


class NotCopied:
    """Base class whose objects raise an error in ``copy`` and ``pickle``."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, since its state is on its "
            "workers: save its state_dict(), make another one of other parameters, and load it"
        )
