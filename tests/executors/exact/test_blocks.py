"""Loops of chains that work in blocks: values per block, and blocks that are not full."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from functional_optim import Optimizer, Rule, chain

from ...choices import case, pairs
from ..support import noise
from .support import Numbers, assert_steps_are_equal, drawn, explained

BLOCK = 32


class PerBlock(NamedTuple):
    """State with one number per block."""

    scale: Tensor  # one per BLOCK elements
    kept: Tensor  # has the parameter's shape


def in_rows(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def in_line(rows: Tensor, like: Tensor) -> Tensor:
    return rows.reshape(-1)[: like.numel()].view_as(like)


def by_largest(p: Tensor, g: Tensor, s: PerBlock, c: Numbers) -> tuple[Tensor, PerBlock]:
    scale = in_rows(g).abs().amax(dim=1)
    step = in_rows(g) / (scale.unsqueeze(1) + c.a)
    return p - c.c * in_line(step, p), PerBlock(scale, s.kept + g)


def by_root(p: Tensor, g: Tensor, s: PerBlock, c: Numbers) -> tuple[Tensor, PerBlock]:
    """Take the root of a value per block and of each element."""
    scale = (s.scale * c.a + in_rows(g.square()).amax(dim=1)).sqrt()
    step = in_rows(g.abs().sqrt()) * scale.view(-1, 1)
    return p - c.c * in_line(step, p), PerBlock(scale, s.kept.abs().sqrt())


def by_smallest(p: Tensor, g: Tensor, s: PerBlock, c: Numbers) -> tuple[Tensor, PerBlock]:
    """Step by the least parameter and the largest kept value of a block."""
    low = in_rows(p * c.d).amin(dim=1)
    kept = s.kept * c.a + g
    high = in_rows(kept).amax(dim=1)
    step = (in_rows(p) - low.unsqueeze(1)) * (high - low).sign().unsqueeze(1)
    return p - c.c * in_line(step, p), PerBlock(s.scale.lerp(high, c.b), kept)


def keeps_it(p: Tensor, g: Tensor, s: PerBlock, c: Numbers) -> tuple[Tensor, PerBlock]:
    """Write and read a value per block in the same loop."""
    step = in_rows(g) * s.scale.unsqueeze(1)
    return p - in_line(step, p), PerBlock(s.scale * c.a, p)


RULES = [by_largest, by_root, by_smallest, keeps_it]


def made(rule: Callable[..., Any]) -> Optimizer:
    def init(p: Tensor, hyper: Numbers) -> PerBlock:
        return PerBlock(p.new_full((-(-p.numel() // BLOCK),), 0.5), torch.full_like(p, 0.25))

    return chain(
        Rule(
            name=rule.__name__,
            hyper=Numbers,
            state=PerBlock,
            init=init,
            rule=rule,
            granularity=BLOCK,
        )()
    )


LENGTHS = (1, 31, 32, 33, 5_001, 320)


def test_blocks() -> None:
    for one in pairs(rule=RULES, dtype=[torch.float32, torch.float64]):
        optimizer, dtype = made(one["rule"]), one["dtype"]

        def leaves(seed: int, dtype: torch.dtype = dtype) -> list[Tensor]:
            return [noise(seed + k, length, dtype=dtype) for k, length in enumerate(LENGTHS)]

        with case(**one):
            said = explained(optimizer, torch.ones(320, dtype=dtype))
            assert said.startswith("exact"), said
            assert_steps_are_equal(optimizer, leaves(0), lambda step: leaves(10 * step))
            for style in ("wide", "special"):
                assert_steps_are_equal(
                    optimizer,
                    drawn(0, 5_001, dtype, style=style),
                    lambda step, style=style, dtype=dtype: drawn(
                        step + 1, 5_001, dtype, style=style
                    ),
                )
