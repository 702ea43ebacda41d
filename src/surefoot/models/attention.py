"""The parts of attention in which positions interact, as modules without parameters.

They are modules so that a layout can exchange their inputs and outputs between ranks that hold
parts of each sequence. They know no ranks.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class AttentionCore(nn.Module):
    """Causal scaled dot product attention, from projected heads to attention output.

    Args:
        grouped: whether there are fewer key-value heads than query heads.
        dropout: probability, on the attention weights.
    """

    def __init__(self, grouped: bool, dropout: float) -> None:
        super().__init__()
        self.grouped = grouped
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[B, H, S, head_dim] each, to [B, H, S, head_dim].

        Args:
            mask: bool [B, 1, S, S], True where a position may attend; None: causal.
        """
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.grouped,
        )


class DocumentMask(nn.Module):
    """The mask of packed documents: causal, within the same document only."""

    def forward(self, document_ids: Tensor) -> Tensor:
        """[B, S] to bool [B, 1, S, S]."""
        same = document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
        return same.tril().unsqueeze(1)
