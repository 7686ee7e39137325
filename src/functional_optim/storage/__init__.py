"""Storages of parameters and state between steps, for any rule."""

from functional_optim.storage.describe import (
    CHOICES,
    Comparison,
    Description,
    Row,
    compare_storages,
    describe,
)
from functional_optim.storage.param_storage import PARAM_STORAGES
from functional_optim.storage.state_files import mapped_state
from functional_optim.storage.state_storage import STATE_STORAGES
from functional_optim.storage.stored import stored

__all__ = [
    "CHOICES",
    "PARAM_STORAGES",
    "STATE_STORAGES",
    "Comparison",
    "Description",
    "Row",
    "compare_storages",
    "describe",
    "mapped_state",
    "stored",
]
