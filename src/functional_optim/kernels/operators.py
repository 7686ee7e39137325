"""Python's operators as functions of torch, which take ``out=``."""

import operator
from typing import Any

import torch

OPERATORS: dict[Any, Any] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.div,
    operator.pow: torch.pow,
    operator.neg: torch.neg,
    operator.abs: torch.abs,
    operator.gt: torch.gt,
    operator.ge: torch.ge,
    operator.lt: torch.lt,
    operator.le: torch.le,
    operator.eq: torch.eq,
    operator.ne: torch.ne,
    operator.and_: torch.bitwise_and,
    operator.or_: torch.bitwise_or,
    operator.xor: torch.bitwise_xor,
    operator.lshift: torch.bitwise_left_shift,
    operator.rshift: torch.bitwise_right_shift,
    operator.invert: torch.bitwise_not,
}
"""The function of torch that an operator calls."""

REFLECTED: dict[Any, Any] = {
    operator.add: torch.add,
    operator.mul: torch.mul,
    operator.gt: torch.lt,
    operator.ge: torch.le,
    operator.lt: torch.gt,
    operator.le: torch.ge,
    operator.eq: torch.eq,
    operator.ne: torch.ne,
}
"""What an operator with a number on its left is: a function of the tensor, then the number.

``torch.mul(number, tensor)`` is another thing: it rounds the number to 16 bits where the tensor
has so many, and ``number * tensor`` does not.
"""
