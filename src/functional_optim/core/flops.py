"""Floating-point operations of products and decompositions of matrices.

A multiplication and an addition count as two operations. Decompositions count by their leading
terms: Golub, Van Loan, "Matrix computations", 4th edition, sections 5.2, 8.3 and 8.6.
"""


def product_flops(rows: int, inner: int, columns: int) -> int:
    """Return the operations of a product of (rows, inner) and (inner, columns)."""
    return 2 * rows * inner * columns


def eigen_flops(size: int) -> int:
    """Return the operations of all eigenvalues and eigenvectors of a symmetric matrix."""
    return 9 * size**3


def qr_flops(rows: int, columns: int) -> int:
    """Return the operations of a reduced QR decomposition with its orthogonal factor."""
    most, least = max(rows, columns), min(rows, columns)
    return 4 * most * least**2 - 4 * least**3 // 3


def svd_flops(rows: int, columns: int) -> int:
    """Return the operations of a reduced singular value decomposition with both factors."""
    most, least = max(rows, columns), min(rows, columns)
    return 6 * most * least**2 + 20 * least**3


def solve_flops(size: int, columns: int) -> int:
    """Return the operations of a triangular system with that many right-hand sides."""
    return size**2 * columns


def iteration_flops(rows: int, columns: int, cubic: bool) -> int:
    """Return the operations of one Newton-Schulz iteration on a matrix.

    With s the shorter side and l the longer: ``X X^T`` and the product with ``X`` take ``2 s^2 l``
    each. A polynomial of degree 5 also squares ``X X^T``: ``2 s^3``.
    """
    least, most = min(rows, columns), max(rows, columns)
    return 4 * least**2 * most + (0 if cubic else 2 * least**3)
