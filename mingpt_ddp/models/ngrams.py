"""An embedding of n-grams: the sequences of two to five tokens that end at each token.

Shapes: B sequences, T tokens, C = n_embd.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt_ddp.models.kv_cache import CachePosition

NGRAM_LENGTHS = (2, 3, 4, 5)
HISTORY_LENGTH = max(NGRAM_LENGTHS) - 1  # number of tokens before the newest one of an n-gram
# Polynomial hash of token ids: h <- (h * FACTOR + id) mod PRIME. The value before the modulus is
# below 2^62, so that int64 holds it.
PRIME = (1 << 31) - 1
FACTOR = 1_103_515_245


class NGramEmbedding(nn.Module):
    """For each token, the vectors of the four n-grams that end at it, side by side.

    Each vector has C / 4 channels. The hash of an n-gram is the row of its vector in the table.
    N-grams whose hashes collide share a row.

    Sources: Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask Learning"
    (arXiv:0902.2206); bigrams as an input of a transformer: Jordan et al. 2024, "modded-nanogpt".
    """

    def __init__(self, rows: int, n_embd: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, n_embd // len(NGRAM_LENGTHS))

    def forward(self, tokens: Tensor, last: Tensor | None, start: CachePosition) -> Tensor:
        """
        Args:
            tokens: Token ids of the positions from `start` on, (B, T).
            last: Ids of the tokens before `tokens`, (B, HISTORY_LENGTH), ignored if `start` is 0.
                They are overwritten with the newest ids. None in training.

        Returns:
            (B, T, C)
        """
        T = tokens.shape[1]
        ids = tokens + 1  # 0 stands for the positions before the text
        is_first = isinstance(start, int) and start == 0
        if last is None or is_first:
            known = F.pad(ids, (HISTORY_LENGTH, 0))
        else:
            known = torch.cat([last, ids], dim=1)  # (B, HISTORY_LENGTH + T)
        if last is not None:
            last.copy_(known[:, -HISTORY_LENGTH:])

        hashed = ids
        rows = []
        for n in NGRAM_LENGTHS:
            first = HISTORY_LENGTH + 1 - n
            oldest = known[:, first : first + T]  # oldest token of each n-gram
            hashed = (hashed * FACTOR + oldest) % PRIME
            rows.append(hashed % self.table.num_embeddings)
        vectors: Tensor = self.table(torch.stack(rows, dim=-1))  # (B, T, 4, C / 4)
        return vectors.flatten(2)
