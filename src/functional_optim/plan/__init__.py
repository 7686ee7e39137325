"""Plans of steps: a step is planned once and run many times.

A *plan* (:class:`StepPlan`) stores what a step of leaves with certain layouts calls: tables of
lengths, bound kernels, positions in a list of tensors. A plan holds no tensor: the list is an
argument of each step. If a plan does not fit a step, nothing changes, and a new plan is built.

Read the modules in this order:

``points``, ``decision``
    The points at which a step waits (totals, shared scalars, gates), and the runs that follow.
``leaf_by_leaf``, ``item_steps``
    A step without a plan: check, decide and bind everything, then step leaf by leaf.
``step_plan``, with ``chunks``, ``leaf_positions``, ``totals``
    The plan of one run. ``prepare(tensors, hypers)`` raises all errors, and returns a bound step;
    ``run()`` runs the step.
``list_layout``, ``python_loops``, ``guard``, ``step_counts``
    Layouts, addresses and step counts of tensors. ``python_loops`` replaces the native loops.
``planned_steps``, with ``plain_steps``, ``decided_steps``, ``planned_runs``, ``addend_rows``
    The plans of all steps of certain leaves, by missing gradients. A chain that waits for nothing
    is *plain*: its steps need no decision.
``tree_steps``, with ``tree``
    The planned steps of ``update_`` and ``update``.
``flat/``
    Parameters as views of flat buffers, which ``bind`` steps by plans.
``device_numbers``, ``fed_coefficients``
    Coefficients computed on a device, or from the inputs of an exported program.
"""

from functional_optim.plan.step_plan import StepPlan

__all__ = ["StepPlan"]
