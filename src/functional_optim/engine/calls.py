"""Calls that torch.compile does not trace, or that an interrupt does not divide; callers."""

from functional_optim.core.callers import is_called_by
from functional_optim.core.dynamo import disable_compile
from functional_optim.core.interrupts import defer_interrupts
