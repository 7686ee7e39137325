"""Norms, clipping and unscaling of gradients."""

from functional_optim.frontends.gradient_norms import addend, addends, clip, combine_addends, scale_
from functional_optim.frontends.loss_scale import Scaling, check_and_unscale_, record_unscale
from functional_optim.kernels.totals import sum_in_order
