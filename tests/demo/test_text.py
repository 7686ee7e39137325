"""Tests of the text of the demo, and of the batches that are cut from it."""

import torch

from hooks.demo import text


def test_the_text_is_long_plain_english_without_repeated_paragraphs() -> None:
    found = text.english_text()
    paragraphs = found.split("\n")
    assert len(found) > 200_000
    assert found.isascii()
    assert " the " in found
    assert len(paragraphs) == len(set(paragraphs))


def test_the_corpus_is_the_whole_text_in_two_parts() -> None:
    corpus = text.make_corpus("abcabcabca" * 3)
    tokens = torch.cat([corpus.train, corpus.validation]).tolist()
    assert "".join(corpus.alphabet[token] for token in tokens) == "abcabcabca" * 3
    assert (len(corpus.train), len(corpus.validation)) == (27, 3)


def test_targets_are_what_follows_each_input() -> None:
    tokens = torch.arange(100)
    batch = text.random_batch(tokens, 5, 8, torch.Generator().manual_seed(1))
    assert batch.inputs.shape == batch.targets.shape == (5, 8)
    assert torch.equal(batch.inputs + 1, batch.targets)


def test_random_batches_reach_both_ends_and_nothing_beyond() -> None:
    for length in (9, 10):
        batch = text.random_batch(torch.arange(length), 200, 8, torch.Generator().manual_seed(0))
        assert set(batch.inputs[:, 0].tolist()) == set(range(length - 8))


def test_even_batches_are_the_same_every_time_and_spread_over_the_text() -> None:
    tokens = torch.arange(50)
    for size in (1, 2, 7):
        batch = text.even_batch(tokens, size, 8)
        assert torch.equal(batch.inputs, text.even_batch(tokens, size, 8).inputs)
        assert batch.inputs[0, 0] == 0
        assert size == 1 or batch.targets[-1, -1] == 49
