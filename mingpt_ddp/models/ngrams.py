"""Vectors for the runs of two to five tokens that end at each token.

Shapes: B sequences, T tokens, C = n_embd.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.models.kv_cache import CachePosition

LENGTHS = (2, 3, 4, 5)  # of the n-grams
HISTORY = max(LENGTHS) - 1  # tokens before the newest
# The polynomial hash of the ids: h <- (h * FACTOR + id) mod PRIME, below 2^62 before the modulus.
PRIME = (1 << 31) - 1
FACTOR = 1_103_515_245


class NGramEmbedding(nn.Module):
    """A vector of C / 4 for each n-gram that ends at a token, n = 2 .. 5, side by side.

    An n-gram has the row of the table that its hash names; those that collide share it.

    Sources: Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask Learning"
    (arXiv:0902.2206); bigrams as an input of a transformer: Jordan et al. 2024, "modded-nanogpt".
    """

    def __init__(self, rows: int, n_embd: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, n_embd // len(LENGTHS))

    def forward(self, tokens: Tensor, last: Tensor | None, start: CachePosition) -> Tensor:
        """
        Args:
            tokens: (B, T).
            last: (B, HISTORY) ids of the tokens before, ignored if `start` is 0; overwritten with
                the newest ids.

        Returns:
            (B, T, C)
        """
        T = tokens.shape[1]
        ids = tokens + 1  # 0 is before the text
        is_first = isinstance(start, int) and start == 0
        if last is None or is_first:
            known = F.pad(ids, (HISTORY, 0))
        else:
            known = torch.cat([last, ids], dim=1)  # (B, HISTORY + T)
        if last is not None:
            last.copy_(known[:, -HISTORY:])

        hashed = ids
        rows = []
        for n in LENGTHS:
            first = HISTORY + 1 - n
            oldest = known[:, first : first + T]  # of each n-gram
            hashed = (hashed * FACTOR + oldest) % PRIME
            rows.append(hashed % self.table.num_embeddings)
        vectors: Tensor = self.table(torch.stack(rows, dim=-1))  # (B, T, 4, C / 4)
        return vectors.flatten(2)
