"""A byte-level GPT: pre-norm decoder blocks (Radford et al., "Language Models are Unsupervised Multitask
Learners", section 2.3) with dropout, so that a resumed run matches only if the random generators do too."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from tiercheck.demo.training.model_size import VOCABULARY

__all__ = ["GPT", "Block", "Embedding", "Head", "cross_entropy", "initialise"]


class Block(nn.Module):
    """Causal self-attention, then a four times wider perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron_in = nn.Linear(width, 4 * width)
        self.perceptron_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(batch, sequence, width)`` to the same shape."""
        hidden = hidden + self.dropout(self.attend(self.attention_norm(hidden)))
        inner = functional.gelu(self.perceptron_in(self.perceptron_norm(hidden)))
        output: torch.Tensor = hidden + self.dropout(self.perceptron_out(inner))
        return output

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = hidden.shape
        queries, keys, values = (
            part.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for part in self.attention_in(hidden).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output: torch.Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return output


class Embedding(nn.Module):
    """Of bytes and their places."""

    def __init__(self, width: int, sequence: int, dropout: float) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(sequence, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Int64 of shape ``(batch, sequence)`` to ``(batch, sequence, width)``."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        hidden: torch.Tensor = self.dropout(self.bytes(inputs) + self.positions(places))
        return hidden


class Head(nn.Module):
    """The scores of the next byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``(batch, sequence, width)`` to float32 logits of shape ``(batch, sequence, 256)``."""
        logits: torch.Tensor = self.scores(self.norm(hidden)).float()
        return logits


class GPT(nn.Module):
    """Bytes in, the mean cross-entropy of the next byte out."""

    def __init__(self, *, width: int, layers: int, heads: int, sequence: int, dropout: float) -> None:
        super().__init__()
        self.embedding = Embedding(width, sequence, dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.head = Head(width)
        initialise(self, layers)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Inputs and targets are int64 of shape ``(batch, sequence)``; the loss is a float32 scalar, in nats."""
        hidden = self.embedding(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return cross_entropy(self.head(hidden), targets)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def initialise(model: nn.Module, layers: int) -> None:
    """``layers``: the blocks of the whole model, also if this is a part of it."""
    model.apply(initialise_weights)
    # The variance of the residual stream would otherwise grow with the depth.
    for name, parameter in model.named_parameters():
        if name.endswith(("attention_out.weight", "perceptron_out.weight")):
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))


def initialise_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
