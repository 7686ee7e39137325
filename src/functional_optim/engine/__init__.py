"""Facade of the engine, for packages that build front-ends.

``functional_optim.remote``, ``sharding`` and ``hooks`` import nothing else of the engine, which a
contract of import-linter checks. Functions and classes are documented where they are defined.

A front-end that steps parameter groups does this:

1. ``recipes``: it reads the optimizer that the caller named, as a recipe.
2. ``groups``: it gives the recipe and the groups to :class:`ExplicitGradients`, and steps all
   parameters, or some of them, by the gradients that it passes.
3. ``options``: it may check and change the options of groups.
4. ``states``: it may read and write state in the form of torch's state dicts.
5. ``gradients``: it may clip or unscale gradients first.

``stages`` tells what a chain needs, ``tensors`` checks tensors, ``calls`` and ``messages`` are for
all of them.
"""
