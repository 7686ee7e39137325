"""A step is planned once and made many times.

A *plan* (:class:`StepPlan`) holds all that a step of certain leaves does not change: where their
tensors lie, which of them are stepped by one call of a kernel (a *chunk*), and the *guard* that
sees whether all of that still holds. What is new at each step, the numbers and the gradients, is
handed to it. A plan that does not hold changes nothing, and another one is made.
"""

from functional_optim.plan.chunks import Chunk
from functional_optim.plan.counts import Counts
from functional_optim.plan.gradients import GradientAddresses
from functional_optim.plan.step_plan import Memory, StepPlan

__all__ = ["Chunk", "Counts", "GradientAddresses", "Memory", "StepPlan"]
