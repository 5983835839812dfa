"""lightning: a GPT of torch's own layers, as a LightningModule in its Trainer."""

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from windows import STEPS, Task, Windows, task


class GPT(lightning.LightningModule):
    def __init__(self, chosen: Task, vocab_size: int) -> None:
        super().__init__()
        C = chosen.n_embd
        self.embed, self.position = nn.Embedding(vocab_size, C), nn.Embedding(chosen.context, C)
        layer = nn.TransformerEncoderLayer(
            C,
            chosen.n_head,
            4 * C,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
            bias=False,
        )
        self.blocks = nn.TransformerEncoder(
            layer, chosen.n_layer, nn.LayerNorm(C, bias=False), enable_nested_tensor=False
        )
        self.head = nn.Linear(C, vocab_size, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(chosen.context))

    def training_step(self, tokens: Tensor) -> Tensor:
        """tokens: (B, T + 1)."""
        x, y = tokens[:, :-1], tokens[:, 1:]
        hidden = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.blocks(hidden, mask=self.mask, is_causal=True))
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)


class Report(lightning.Callback):
    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_batch_end(self, trainer: lightning.Trainer, *_) -> None:
        if trainer.global_step % self.every == 0:
            print("step", trainer.global_step, flush=True)


def main() -> None:
    chosen = task()
    windows = Windows(chosen.text, chosen.context + 1, chosen.batch)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        log_every_n_steps=chosen.log_every,
        default_root_dir=chosen.out,
        enable_progress_bar=False,
        enable_checkpointing=False,
        callbacks=[Report(chosen.log_every)],
    )
    trainer.fit(GPT(chosen, windows.vocab_size), DataLoader(windows, batch_size=chosen.batch))


if __name__ == "__main__":
    main()
