"""English text that comes with Python, as tokens: one per character."""

import re
from functools import lru_cache
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor

TRAIN_SHARE = 0.9


class Corpus(NamedTuple):
    """Text in two parts, and its alphabet."""

    alphabet: str  # the character of every token
    train: Tensor  # int64, (characters,)
    validation: Tensor  # int64, (characters,): the end of the text, never trained on


class Batch(NamedTuple):
    """Sequences of text, and the next character of each position."""

    inputs: Tensor  # int64, (size, context)
    targets: Tensor  # int64, (size, context)


def english_text() -> str:
    """Return the Python language reference, as in ``help()``: 0.35 million characters.

    Topics quote one another at length. Repeated paragraphs are removed, so that the two parts of
    the corpus have none in common.
    """
    paragraphs = (
        " ".join(re.sub(r"([*=~^-])\1{2,}", "", paragraph).split())
        for name in sorted(topics)
        for paragraph in topics[name].split("\n\n")
    )
    text = "\n".join(dict.fromkeys(paragraph for paragraph in paragraphs if paragraph))
    return text.encode("ascii", "ignore").decode()  # any terminal can show ASCII


def make_corpus(text: str) -> Corpus:
    """Convert a text to tokens, and split it."""
    alphabet = "".join(sorted(set(text)))
    number = {character: token for token, character in enumerate(alphabet)}
    tokens = torch.tensor([number[character] for character in text])
    cut = int(len(tokens) * TRAIN_SHARE)
    return Corpus(alphabet, tokens[:cut], tokens[cut:])


@lru_cache(maxsize=1)
def corpus() -> Corpus:
    return make_corpus(english_text())


def random_batch(tokens: Tensor, size: int, context: int, generator: torch.Generator) -> Batch:
    """Return sequences from random positions."""
    starts = torch.randint(len(tokens) - context, (size,), generator=generator)
    return _batch(tokens, starts, context)


def even_batch(tokens: Tensor, size: int, context: int) -> Batch:
    """Return sequences from evenly spaced positions: the same at every call."""
    starts = torch.arange(size) * (len(tokens) - context - 1) // max(size - 1, 1)
    return _batch(tokens, starts, context)


def _batch(tokens: Tensor, starts: Tensor, context: int) -> Batch:
    sequences = tokens[starts[:, None] + torch.arange(context + 1)]
    return Batch(sequences[:, :-1], sequences[:, 1:])
