"""Steps of what is composed: leaves differ in their stages, or something is kept for all of them.

``outline`` says where a step waits, and what runs behind which gates; ``decider`` goes along it
with the numbers of a step; ``one_step`` does what was decided leaf by leaf; ``steps`` keeps
StepPlans for it, and ``trees`` finds them by the form of a tree.
"""
