"""Ray, imported when it is asked for."""

from importlib import import_module
from typing import Any


def ray_or_error() -> Any:
    """The package ``ray``, connected to a cluster.

    Raises:
        ImportError: it is not installed.
        RuntimeError: ``ray.init`` was not called.
    """
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise ImportError(
            "workers that are Ray actors need Ray, which is not installed: pip install "
            '"functional-optim[ray]"; DistributedOptimizer.over_threads does without it'
        ) from error
    if not ray.is_initialized():
        raise RuntimeError(
            "workers that are Ray actors need a cluster, and this process has none: call "
            'ray.init() first, or ray.init(address="auto") for one that runs already'
        )
    return ray
