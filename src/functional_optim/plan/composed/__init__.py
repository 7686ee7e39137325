"""Steps of what is composed: leaves differ in their stages, or something is kept for all of them.

``decided`` goes through the links once and says what a step does; ``one_step`` does that leaf by
leaf; ``steps`` and ``plans`` keep StepPlans for it over leaves that stay, ``trees`` over trees that
are stepped in place again.
"""
