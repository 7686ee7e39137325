"""A step is planned once and made many times.

A *plan* (:class:`StepPlan`) stores what a step of leaves with certain layouts calls: tables of
lengths, bound kernels, positions in a list of tensors. It holds no tensor: the list is handed over
at each step. A step that a plan does not make changes nothing, and another plan is made.

To read, in this order:

``points``, ``decision``
    What a step waits for (totals, shared numbers, gates), and which stages of which leaves run.
``leaf_by_leaf``, ``engine``
    One step without a plan: all is checked, decided, and bound, then the executor steps each leaf.
``step_plan``, with ``chunks``, ``leaf_positions``, ``totals``
    The plan of one run. ``prepared(tensors, hypers)`` refuses all that can be refused, and what it
    returns is made by ``make()``.
``list_layout``, ``python_loops``, ``guard``, ``step_counts``
    Layouts, addresses and step counts of tensors, looked at without the native loops; layouts of
    tensors that somebody else holds.
``planned_steps``, with ``plain_steps``, ``planned_runs``, ``count_classes``
    The plans of all steps that certain leaves have made. A step of a chain that waits for nothing
    is ``plain``: nothing is decided.
``tree_steps``, with ``tree``, ``items``
    The planned steps of ``update_`` and ``update``.
``flat/``
    Parameters as views of flat buffers, which ``bind`` steps by plans.
``device_numbers``, ``fed_coefficients``
    Numbers that stand on a device, or are fed to an exported program, in place of Python's.
"""

from functional_optim.plan.step_plan import StepPlan

__all__ = ["StepPlan"]
