"""Jobs in which a warning is an error, as in pytest's own process."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    """Turn warnings into errors, except those of torch about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch deprecates its own TorchScript, and how its init_rpc uses a process group.
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", r"You are using a Backend <class", UserWarning)
        yield
