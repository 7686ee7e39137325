"""The sign of each element: Bernstein, Wang, Azizzadenesheli & Anandkumar 2018, algorithm 1.

u = sign(u)
"""

from torch import Tensor

from functional_optim.core.stage import Link, NoHyper, NoState, Transform, rows_of_sparse


def scale_by_sign_transform(
    grad: Tensor, param: Tensor, state: NoState, c: NoHyper
) -> tuple[Tensor, NoState]:
    return grad.sign(), state


SCALE_BY_SIGN = Transform(
    name="scale_by_sign",
    hyper=NoHyper,
    transform=scale_by_sign_transform,
    sparse=rows_of_sparse,
)


def scale_by_sign() -> Link:
    """Replace each element by its sign: 1, -1 or 0.

    Before :func:`~functional_optim.descend` this is signSGD. After :func:`~functional_optim.trace`
    it is signSGD with momentum (Signum).

    Returns:
        A link for :func:`~functional_optim.chain`.

    Example::

        >>> import torch
        >>> from functional_optim import chain, descend
        >>> optimizer = chain(scale_by_sign(), descend(lr=0.5))
        >>> params, grads = torch.ones(2), torch.tensor([3.0, -2.0])
        >>> optimizer.update(params, grads, optimizer.init(params))[0]
        tensor([0.5000, 1.5000])

    Reference:
        Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: compressed optimisation for
        non-convex problems", ICML 2018, algorithm 1.
    """
    return SCALE_BY_SIGN()
