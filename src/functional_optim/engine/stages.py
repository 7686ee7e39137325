"""Stages of chains, and what they need: totals, whole tensors, blocks of elements."""

from functional_optim.core.blocks import MatrixBlocks
from functional_optim.core.chain import require_gradients_alone, require_one_chain
from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.links import has_gates, has_shared_state, hyper_positions
from functional_optim.core.stage import Kind, Link, Stage, block_size_of
from functional_optim.kernels import EXECUTORS, is_measured, needs_total
from functional_optim.optimizer.explain import explain_chains
from functional_optim.optimizer.flops import step_flops
