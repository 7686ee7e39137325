"""Functions of one matrix, or of a batch of matrices of one shape, and their FLOP counts.

A batch has one more dimension in front. For each matrix of a batch, a function returns the result
of that matrix alone. The bits are equal if torch's batched product rounds as its plain product.

FLOPs are floating-point operations: a multiplication and an addition are two. Decompositions count
by their leading terms: Golub, Van Loan, "Matrix computations", 4th edition, sections 5.2, 8.3, 8.6.
"""

import torch
from torch import Tensor

from functional_optim._torch.operators import foreach_norm


def require_matrix(name: str, param: Tensor) -> None:
    """Raise ValueError if a parameter (or the real view of a complex one) is not a matrix."""
    if param.dim() != 2:
        raise ValueError(
            f"{name} steps real matrices, which have 2 dimensions, got a parameter of shape "
            f"{tuple(param.shape)} (a complex one counts by its real view); partition the "
            "parameters, and step this one by another optimizer, such as adamw"
        )


def norms(x: Tensor) -> Tensor:
    """Return the Frobenius norm of each matrix: a 0-d tensor, or shape (n, 1, 1) of a batch."""
    if x.dim() == 2:
        norm: Tensor = torch.linalg.vector_norm(x)
        return norm
    # One by one: torch divides a batched norm between threads, which rounds differently.
    one_by_one = foreach_norm(list(x.unbind(0)))
    return torch.stack(one_by_one).reshape(-1, 1, 1)


def symmetric_eigen(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues in ascending order and eigenvectors, both detached.

    They are computed in float64 and rounded to the factor's dtype. In float32, LAPACK's eigh fails
    or returns NaN for about one in ten factors of low rank. Gradients of an embedding have such
    factors. A factor that is not finite is replaced by the identity: an error from LAPACK would
    also stop the steps of all other parameters.
    """
    known = factor.detach().to(torch.float64)
    finite = known.isfinite().flatten(-2).all(-1)[..., None, None]
    identity = torch.eye(known.size(-1), dtype=known.dtype, device=known.device)
    values, vectors = torch.linalg.eigh(torch.where(finite, known, identity))
    return values.to(factor.dtype), vectors.to(factor.dtype)


def product_flops(rows: int, inner: int, columns: int) -> int:
    """Return the FLOPs of a product of (rows, inner) and (inner, columns)."""
    return 2 * rows * inner * columns


def eigen_flops(size: int) -> int:
    """Return the FLOPs of all eigenvalues and eigenvectors of a symmetric matrix."""
    return 9 * size**3


def qr_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of a reduced QR decomposition with its orthogonal factor."""
    most, least = max(rows, columns), min(rows, columns)
    return 4 * most * least**2 - 4 * least**3 // 3


def svd_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of a reduced singular value decomposition with both factors."""
    most, least = max(rows, columns), min(rows, columns)
    return 6 * most * least**2 + 20 * least**3


def solve_flops(size: int, columns: int) -> int:
    """Return the FLOPs of a triangular system with ``columns`` right-hand sides."""
    return size**2 * columns


def iteration_flops(rows: int, columns: int, cubic: bool) -> int:
    """Return the FLOPs of one Newton-Schulz iteration on a matrix.

    With s the shorter side and l the longer side, ``X X^T`` and its product with ``X`` take
    ``2 s^2 l`` each. A polynomial of degree 5 also squares ``X X^T``, which takes ``2 s^3``.
    """
    least, most = min(rows, columns), max(rows, columns)
    return 4 * least**2 * most + (0 if cubic else 2 * least**3)
