"""Rules for which torch has a fused kernel.

Said here, above algorithms and executors, of which neither knows the other.
"""

from functional_optim.algorithms.adagrad import ADAGRAD
from functional_optim.algorithms.adam import ADAM
from functional_optim.algorithms.sgd import SGD
from functional_optim.kernels.fused import FUSED
from functional_optim.kernels.fused_calls import FUSED_ADAGRAD, FUSED_ADAM, FUSED_SGD

FUSED.update({SGD: FUSED_SGD, ADAM: FUSED_ADAM, ADAGRAD: FUSED_ADAGRAD})
