"""A step is planned once and made many times.

A *plan* (:class:`StepPlan`) stores what a step of leaves with certain layouts calls: tables of
lengths, bound kernels, positions in a list of tensors. It holds no tensor: the list is handed over
at each step. A step that a plan does not make changes nothing, and another plan is made.

To read, in this order:

``engine``
    One step without a plan: an ``Item`` is a leaf with its gradient; its coefficients are made, the
    executor steps it, it is counted.
``step_plan``
    The plan. ``prepared(tensors, hypers)`` refuses all that can be refused, and what it returns is
    made by ``make()``. ``PlannedLeaves`` are leaves that a caller keeps, with their plan.
``chunks``, ``leaf_positions``, ``totals``
    Leaves that are stepped together, and how kernels are bound to them; sums that measured stages
    need.
``list_layout``, ``python_loops``, ``guard``, ``step_counts``
    Layouts, addresses and step counts of tensors, looked at without the native loops; layouts of
    tensors that somebody else holds.
``tree_plan``, with ``items``, ``tree``
    Plans of ``update_`` and ``update``.
``composed/``
    The same plans for optimizers whose leaves differ in their stages, or that keep shared numbers.
``flat/``
    Parameters as views of flat buffers, which ``bind`` and ZeRO step by plans.
``device_numbers``, ``fed_coefficients``
    Numbers that stand on a device, or are fed to an exported program, in place of Python's.
"""

from functional_optim.plan.step_plan import PlannedLeaves, StepPlan

__all__ = ["PlannedLeaves", "StepPlan"]
