"""A decoder-only transformer, written plainly."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the name that torch's own examples use


class Block(nn.Module):
    """Attention, then two layers; each normalised before, and added to what came in."""

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
        """(batch, context, width) to the same shape."""
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
    """Predicts the next token at every place. The output layer is the token embedding (tied).

    Args:
        tokens: how many different tokens there are.
        context: how many tokens it can look back on, its own place included.
        width: length of the hidden vectors; a multiple of ``heads``.
        heads: attention heads of each block.
        blocks: how many blocks.
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
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, length up to context) to logits (batch, length, tokens)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.place_embedding(places)
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.token_embedding.weight)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        # 0.05, not the usual 0.02: a short run gets past the plateau of single-letter
        # frequencies in half the steps.
        nn.init.normal_(module.weight, std=0.05)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def mean_loss(model: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy per character, in nats."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: Sequence[int],
    length: int,
    generator: torch.Generator,
    temperature: float = 0.6,
) -> list[int]:
    """Go on from ``prompt``, one token at a time.

    Args:
        model: a trained model.
        prompt: at least one token.
        length: how many tokens to add.
        generator: the source of chance.
        temperature: > 0; towards 0 the likeliest token is always taken.

    Returns:
        The prompt and what follows it.
    """
    tokens = list(prompt)
    for _ in range(length):
        logits = model(torch.tensor([tokens[-model.context :]]))[0, -1]
        chances = torch.softmax(logits / temperature, dim=0)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return tokens
