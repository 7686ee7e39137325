"""QK-clip: Kimi Team 2025 (Kimi K2, MuonClip), section 2.1 and algorithm 1.

After the step, for the rows of a query or key projection that belong to head h:

    W_h = W_h * min(1, tau / S_h)^a

S_h is the largest attention logit of head h in this step's batch. With a = 1/2, query and key each
get the root of the factor. The paper sets tau = 100.
"""

import math
from typing import NamedTuple

from torch import Tensor

from functional_optim.bounds import FINITE_POSITIVE, UNIT
from functional_optim.core.hyper import Scalar
from functional_optim.core.leaf_input import LeafInput
from functional_optim.core.stage import Link, Rule
from functional_optim.numeric import clamp, div, power


class QkClipState(NamedTuple):
    max_logit: list[Tensor]  # [S] of the parameter's shape and dtype, if the step gets S; else []


class QkClipHyper(NamedTuple):
    tau: float
    exponent: float  # a


def qk_clip_rule(
    param: Tensor, grad: Tensor, state: QkClipState, c: QkClipHyper
) -> tuple[Tensor, QkClipState]:
    for logit in state.max_logit:
        excess = clamp(div(logit, c.tau), 1.0, math.inf)
        param = param / power(excess, c.exponent)
    return param, state


QK_CLIP = Rule(
    name="qk_clip",
    hyper=QkClipHyper,
    state=QkClipState,
    rule=qk_clip_rule,
    uses_gradient=False,
    bounds=(("tau", FINITE_POSITIVE), ("exponent", UNIT)),
    inputs=(LeafInput("max_logit", required=False),),
)


def qk_clip(tau: Scalar = 100.0, exponent: Scalar = 0.5) -> Link:
    """Scale down query and key projections after the step, if attention logits are too large.

    ``W_h = W_h * min(1, tau / max_logit_h)**exponent`` for the rows of each head ``h``. The weights
    of heads whose largest logit is at most ``tau`` do not change.

    Pass ``extra={"max_logit": ...}`` to a step: a tensor of the parameter's shape for each
    parameter that this link acts on. Each row contains the largest logit of its head in this batch.
    It may be an expanded view::

        heads, size = logits.shape[0], weight.shape[0] // logits.shape[0]
        max_logit = logits.repeat_interleave(size)[:, None].expand_as(weight)

    A step without ``max_logit`` clips nothing. Restrict the link to the projections with
    :func:`~functional_optim.masked`; all other parameters have None in the tree of ``max_logit``.
    After :func:`~functional_optim.accumulate`, pass the largest logits of all micro-batches at the
    call that makes the step. With grouped queries, a key head has the largest logit of its group.
    In multi-head latent attention the paper scales the heads' compressed query and key parts with
    exponent 1/2, the heads' rotary query with exponent 1, and does not scale the shared rotary key.

    Cost: three element-wise operations in a step with logits; no state between steps.

    Args:
        tau: the largest logit that passes unscaled, a finite number > 0.
        exponent: a number in [0, 1]: this parameter's share of the factor.

    Returns:
        A link for :func:`~functional_optim.chain`. Put it after a rule. After
        :func:`~functional_optim.muon` it is MuonClip.

    Raises:
        ValueError: a value outside the bounds above.

    Example::

        >>> import torch
        >>> from functional_optim import chain, sgd
        >>> optimizer = chain(sgd(lr=0.0), qk_clip(tau=100.0))
        >>> query = torch.ones(2, 2)  # two heads with one row each
        >>> max_logit = torch.tensor([50.0, 400.0])[:, None].expand_as(query)
        >>> optimizer.update(query, torch.zeros(2, 2), optimizer.init(query),
        ...                  extra={"max_logit": max_logit})[0]
        tensor([[1.0000, 1.0000],
                [0.5000, 0.5000]])

    Reference:
        Kimi Team, "Kimi K2: open agentic intelligence", 2025 (arXiv 2507.20534), section 2.1 and
        algorithm 1.
    """
    return QK_CLIP(tau=tau, exponent=exponent)
