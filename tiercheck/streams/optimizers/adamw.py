"""torch's AdamW: Adam, whose weight decay is decoupled unless its options say otherwise."""

from __future__ import annotations

from tiercheck.streams.optimizers.adam import Adam

__all__ = ["AdamW"]


class AdamW(Adam):
    """AdamW, as :class:`~tiercheck.streams.optimizers.adam.Adam`."""

    kind = "torch.optim.adamw.AdamW"
    decoupled = True
