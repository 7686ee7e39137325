"""The first state of a large stored parameter is computed piece by piece."""

import optree
import pytest
import torch

from functional_optim import adagrad, adamw, chain, clip_by_global_norm, ema, lion, stored
from functional_optim.storage import pieces

from ..choices import case
from ..executors.support import noise
from ..steady import made_by

STORED = {
    "int8": stored(lion(0.1), param="bfloat16", state="int8"),
    "master": stored(adamw(0.1), param="bfloat16+master", state="int8"),
    "kahan": stored(chain(adamw(0.1), ema(0.9)), param="bfloat16+kahan", state="int8"),
    "nonzero": stored(adagrad(0.1, initial_accumulator_value=0.3), state="int8"),
    "clipped": stored(chain(clip_by_global_norm(1.0), adamw(0.1)), state="bfloat16"),
    "option": stored(adamw(0.1, amsgrad=True), state="int8"),
}


@pytest.mark.parametrize("name", STORED)
def test_pieces_make_the_state_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes end inside a block, inside a piece, or at the end of a piece."""
    optimizer = STORED[name]
    dtype = next((stage.dtypes[0] for stage in optimizer.stages if stage.dtypes), torch.float32)
    for shape in ((1025,), (3072,), (5, 1000), (1024 + 256,)):
        param = noise(1, *shape, dtype=dtype)
        monkeypatch.setattr(pieces, "PIECE", 1 << 20)
        whole = optimizer.init(param)
        monkeypatch.setattr(pieces, "PIECE", 1024)
        cut = optimizer.init(param)
        pairs = zip(optree.tree_leaves(cut), optree.tree_leaves(whole), strict=True)
        with case(shape=shape):
            for one, other in pairs:
                assert one.shape == other.shape
                assert one.dtype == other.dtype
                assert torch.equal(one, other)


def test_a_large_parameter_needs_little_more_memory_than_its_state() -> None:
    """Float32 values and the encoding of the whole would take 40 bytes for each element."""
    param = torch.zeros(4 * pieces.PIECE, dtype=torch.bfloat16)
    made = made_by(lambda: STORED["int8"].init(param))
    assert made.largest <= 8 * pieces.PIECE  # 64-bit words of one piece


def test_what_is_not_contiguous_or_needs_its_whole_tensor_is_not_cut() -> None:
    param = torch.zeros(4, pieces.PIECE)
    assert pieces.can_init_in_pieces(param)
    assert not pieces.can_init_in_pieces(param.T)
    assert not pieces.can_init_in_pieces(param[0])
    assert not pieces.can_init_in_pieces(torch.empty_like(param, device="meta"))
