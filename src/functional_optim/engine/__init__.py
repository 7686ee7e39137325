"""Facade of the engine, for packages that build front-ends.

``functional_optim.remote``, ``sharding`` and ``hooks`` import nothing else of the engine, which a
contract of import-linter checks. Functions and classes are documented where they are defined.

A front-end that steps parameter groups does this:

1. ``recipes``: it reads the optimizer that the caller named, and gets a chain for each group.
2. ``options``: it checks the options of each group, and reads them at each step.
3. ``states``: it creates state, and reads and writes it in the form of torch's state dicts.
4. ``groups``: it gives parameters, gradients and state to :class:`GroupSteps`, which steps them by
   plans.
5. ``gradients``: it may clip or unscale gradients first.

``stages`` tells what a chain needs, ``tensors`` checks tensors, ``calls`` and ``messages`` are for
all of them.
"""
