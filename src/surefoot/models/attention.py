"""The part of attention where places of a sequence meet, as modules without parameters.

They are modules so that a layout can exchange what goes in and out where ranks hold parts of each
sequence. They know no ranks.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class AttentionCore(nn.Module):
    """Causal scaled dot product attention, from projected heads to mixed heads.

    Args:
        grouped: there are fewer key and value heads than query heads.
        dropout: probability, on the attention weights.
    """

    def __init__(self, grouped: bool, dropout: float) -> None:
        super().__init__()
        self.grouped = grouped
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[B, H, S, head_dim] of each to [B, H, S, head_dim].

        Args:
            mask: bool [B, 1, S, S], true where a place may look; None: at itself and before.
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
    """Where a place may look: at its own document, not ahead."""

    def forward(self, document_ids: Tensor) -> Tensor:
        """[B, S] to bool [B, 1, S, S]."""
        same = document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
        return same.tril().unsqueeze(1)
