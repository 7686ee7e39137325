"""QK-clip: Kimi Team 2025 (Kimi K2, MuonClip), section 2.1 and algorithm 1.

After the step, for the rows of a query or key projection that belong to head h:

    W_h = W_h * min(1, tau / S_h)^a

S_h is the largest attention logit of head h in this step's batch. Query and key share the factor by
a = 1/2 each. The paper sets tau = 100.
"""

import math
from typing import NamedTuple

from torch import Tensor

from functional_optim.bounds import UNIT, Interval
from functional_optim.core.hyper import Scalar
from functional_optim.core.leaf_input import LeafInput
from functional_optim.core.stage import Link, Rule
from functional_optim.numeric import clamp, div, power


class QkClipState(NamedTuple):
    max_logit: list[Tensor]  # [S], of the parameter's shape and dtype, in a step given it; else []


class QkClipHyper(NamedTuple):
    tau: float
    exponent: float  # a


def qk_clip_init(param: Tensor, hyper: QkClipHyper) -> QkClipState:
    return QkClipState([])


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
    init=qk_clip_init,
    state_depends_on=(),
    rule=qk_clip_rule,
    uses_gradient=False,
    bounds=(
        ("tau", Interval(low=0.0, low_open=True, finite=True)),
        ("exponent", UNIT),
    ),
    inputs=(LeafInput("max_logit", required=False),),
)


def qk_clip(tau: Scalar = 100.0, exponent: Scalar = 0.5) -> Link:
    """Scale query and key projections down, after the step, where attention logits grew too large.

    ``W_h = W_h * min(1, tau / max_logit_h)**exponent`` for the rows of each head ``h``. Heads whose
    largest logit is at most ``tau`` keep their weights bit for bit.

    Steps are given ``extra={"max_logit": ...}``: for each parameter that this link acts on, a
    tensor of the parameter's shape. Each row of it holds the largest logit of the row's head in
    this batch. It may be an expanded view::

        heads, size = logits.shape[0], weight.shape[0] // logits.shape[0]
        max_logit = logits.repeat_interleave(size)[:, None].expand_as(weight)

    A step without it clips nothing. Restrict the link to the projections with
    :func:`~functional_optim.masked`; other parameters have None in the tree of ``max_logit``.
    Behind :func:`~functional_optim.accumulate`, give the largest logits of all micro-batches at the
    call that makes the step. With grouped queries, a key head takes the largest logit of
    its group. In multi-head latent attention the paper scales the heads' compressed query and key
    parts by exponent 1/2, the heads' rotary query by exponent 1, and leaves the shared rotary key.

    Cost: three element-wise operations in a step that is given logits; no state between steps.

    Args:
        tau: the largest logit that passes unscaled, a finite number > 0.
        exponent: a number in [0, 1]: this parameter's share of the factor.

    Returns:
        A link for :func:`~functional_optim.chain`, to stand behind a rule. Behind
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
