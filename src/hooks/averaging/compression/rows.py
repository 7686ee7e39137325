"""A vector in rows of one block each."""

from torch import Tensor
from torch.nn.functional import pad


def in_rows(flat: Tensor, width: int) -> Tensor:
    """The elements in rows of a block, the last filled up with zeros: shape (blocks, width)."""
    return pad(flat, (0, -flat.numel() % width)).view(-1, width)


def blocks_of(numel: int, width: int) -> int:
    """Return how many blocks a vector has."""
    return -(-numel // width)
