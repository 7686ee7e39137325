"""Tests of the demo's transformer, such as its size and its causal attention."""

import pytest
import torch

from hooks.demo.model import Decoder, generate, mean_loss


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(11, context=8, width=12, heads=3, blocks=2)


def test_the_default_model_has_one_to_three_million_parameters() -> None:
    assert 1e6 < sum(param.numel() for param in Decoder(100).parameters()) < 3e6


def test_no_place_sees_a_later_one(model: Decoder) -> None:
    tokens = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)


def test_every_place_sees_all_earlier_ones(model: Decoder) -> None:
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for place in range(8):
        changed = tokens.clone()
        changed[0, place] = 1
        assert not torch.equal(model(changed)[0, 7], model(tokens)[0, 7])


def test_the_output_layer_is_the_token_embedding(model: Decoder) -> None:
    assert not any(name.startswith("output") for name, _ in model.named_parameters())
    assert model(torch.zeros(3, 4, dtype=torch.int64)).shape == (3, 4, 11)


def test_the_loss_of_an_untrained_model_is_near_that_of_guessing(model: Decoder) -> None:
    tokens = torch.arange(9)[None] % 11
    loss = mean_loss(model, tokens[:, :-1], tokens[:, 1:])
    assert abs(loss.item() - torch.log(torch.tensor(11.0)).item()) < 0.5


def test_every_parameter_gets_a_gradient(model: Decoder) -> None:
    tokens = torch.arange(9)[None] % 11
    torch.autograd.backward(mean_loss(model, tokens[:, :-1], tokens[:, 1:]))
    assert all(param.grad is not None for param in model.parameters())


def test_generated_text_starts_with_the_prompt_and_can_outgrow_the_context(model: Decoder) -> None:
    first = generate(model, [1, 2, 3], 20, torch.Generator().manual_seed(5))
    again = generate(model, [1, 2, 3], 20, torch.Generator().manual_seed(5))
    assert first[:3] == [1, 2, 3]
    assert len(first) == 23
    assert first == again
    assert all(0 <= token < 11 for token in first)
