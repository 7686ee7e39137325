"""Jobs in which a warning is an error, as it is in pytest's own process."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    """All but torch's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # It deprecates its own TorchScript, and how its init_rpc uses a process group.
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", r"You are using a Backend <class", UserWarning)
        yield
