"""Names that the definition of most algorithms needs."""

from functional_optim.composition import chain
from functional_optim.core.constructor import constructor
from functional_optim.core.hyper import Scalar
from functional_optim.core.stage import Link, Rule
from functional_optim.optimizer import Optimizer
from functional_optim.transforms.maximize import maximized

__all__ = ["Link", "Optimizer", "Rule", "Scalar", "chain", "constructor", "maximized"]
