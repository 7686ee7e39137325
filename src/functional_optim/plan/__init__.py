"""A step is planned once and made many times.

A *plan* (:class:`StepPlan`) holds all that a step of certain leaves does not change: where their
tensors lie, which of them are stepped by one call of a kernel (a *chunk*), and the *guard* that
sees whether all of that still holds. What is new at each step, the numbers and the gradients, is
handed to it. A plan that does not hold changes nothing, and another one is made.

To read, in this order:

``engine``
    One step without a plan: an ``Item`` is a leaf with its gradient; its coefficients are made, the
    executor steps it, it is counted.
``step_plan``
    The plan. ``holds()`` asks the guard, ``prepared(gradients, hypers)`` refuses all that can be
    refused, and what it returns is made by ``make()``.
``chunk``, ``chunks``, ``ways``
    Its parts: leaves that are stepped together, with the numbers of their next step; which leaves
    those are; and the ways in which they are, of which the first that takes them makes the step.
    Where a kernel takes no leaves that lie apart, they are brought together (``kernels.packs``).
``counts``, ``totals``
    Step counts that are advanced as one; sums that measured stages need.
``guard``, ``gradients``, ``gradient_memory``
    What a guard looks at: tensors that lie where they lay, and gradients wherever they are.
``tree_plan``, with ``items``, ``tree``
    Plans of ``update_`` and ``update``, which hold no tensor: pointers are an argument of a step.
``composed/``
    The same for optimizers whose leaves differ in their stages, or that keep shared numbers.
``flat/``
    Parameters as views of flat buffers, which ``bind`` and ZeRO step by plans.
``device_numbers``, ``fed_coefficients``
    Numbers that stand on a device, or are fed to an exported program, in place of Python's.
"""

from functional_optim.plan.chunk import Chunk
from functional_optim.plan.counts import Counts
from functional_optim.plan.gradients import GradientAddresses
from functional_optim.plan.step_plan import Memory, StepPlan

__all__ = ["Chunk", "Counts", "GradientAddresses", "Memory", "StepPlan"]
