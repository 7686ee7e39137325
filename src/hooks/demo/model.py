"""Decoder-only transformer, without options."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the name that torch's own examples use

TEMPERATURE = 0.6
"""Close to 0, the likeliest token is always chosen."""


class Block(nn.Module):
    """Attention, then two layers; each with layer norm before it and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.norm_layers = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, context, width) to the same shape."""
        hidden = hidden + self._attend(self.norm_attention(hidden))
        rest: Tensor = self.down(F.gelu(self.up(self.norm_layers(hidden))))
        return hidden + rest

    def _attend(self, hidden: Tensor) -> Tensor:
        batch, context, width = hidden.shape
        split = (batch, context, 3, self.heads, width // self.heads)
        query, key, value = self.query_key_value(hidden).view(split).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attended(mixed.transpose(1, 2).reshape(batch, context, width))
        return out


class Decoder(nn.Module):
    """Predicts the next token at every position. Input and output embedding are tied.

    A prediction uses at most ``context`` tokens. ``width`` must be a multiple of ``heads``.
    """

    def __init__(
        self, tokens: int, *, context: int = 32, width: int = 192, heads: int = 6, blocks: int = 3
    ) -> None:
        super().__init__()
        self.context = context
        self.token_embedding = nn.Embedding(tokens, width)
        self.place_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.apply(_init_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length up to context) to logits (batch, length, tokens)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.place_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.token_embedding.weight)


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        # 0.05, not the usual 0.02: a short run gets past the plateau of single-letter
        # frequencies in half the steps.
        nn.init.normal_(module.weight, std=0.05)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def mean_loss(model: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy per character, in nats."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(
    model: Decoder, prompt: Sequence[int], length: int, generator: torch.Generator
) -> list[int]:
    """Return a prompt of at least one token, and ``length`` more tokens."""
    tokens = list(prompt)
    for _ in range(length):
        logits = model(torch.tensor([tokens[-model.context :]]))[0, -1]
        probabilities = torch.softmax(logits / TEMPERATURE, dim=0)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return tokens
