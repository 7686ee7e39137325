"""Common functions of rules for whole matrices: one matrix, or several of one shape stacked.

A stack has one dimension more, in front. Each function gives for every matrix of a stack what it
gives for that matrix alone; to the bit where torch's batched product rounds as its plain one.
"""

import torch
from torch import Tensor

from functional_optim._torch import foreach_norm


def require_matrix(name: str, param: Tensor) -> None:
    """Refuse a parameter that is no matrix.

    Args:
        name: of the rule.
        param: a parameter, or the real view of a complex one.

    Raises:
        ValueError: it has another number of dimensions than two.
    """
    if param.dim() != 2:
        raise ValueError(
            f"{name} steps real matrices, which have 2 dimensions, got a parameter of shape "
            f"{tuple(param.shape)} (a complex one counts by its real view); partition the "
            "parameters, and step this one by another optimizer, such as adamw"
        )


def norms(x: Tensor) -> Tensor:
    """The Frobenius norm of each matrix: a 0-d tensor, or of a stack one of shape (n, 1, 1)."""
    if x.dim() == 2:
        norm: Tensor = torch.linalg.vector_norm(x)
        return norm
    # One by one: a sum of all elements is shared out among threads otherwise than several sums.
    one_by_one = foreach_norm(list(x.unbind(0)))
    return torch.stack(one_by_one).reshape(-1, 1, 1)


def symmetric_eigen(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues in ascending order and eigenvectors, both constants for derivatives.

    Computed in float64 and rounded to the factor's dtype: in float32 LAPACK's eigh fails, or
    returns NaN, for about one in ten factors of rank far below their size, such as those of the
    gradients of an embedding.

    A factor that is not finite is replaced by the identity: there is no other answer, and LAPACK
    would stop the steps of all other parameters.
    """
    known = factor.detach().to(torch.float64)
    finite = known.isfinite().flatten(-2).all(-1)[..., None, None]
    identity = torch.eye(known.size(-1), dtype=known.dtype, device=known.device)
    values, vectors = torch.linalg.eigh(torch.where(finite, known, identity))
    return values.to(factor.dtype), vectors.to(factor.dtype)
