"""litgpt: the setup function of `litgpt pretrain`, on a given shape and characters; compiled."""

from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from litgpt.pretrain import setup
from torch.utils.data import DataLoader
from windows import STEPS, Task, Windows, task


class Characters(DataModule):
    def __init__(self, chosen: Task) -> None:
        super().__init__()
        self.batch = chosen.batch
        self.windows = Windows(chosen.text, chosen.context + 1, chosen.batch)

    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None) -> None:
        """Do nothing: the sizes are known."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.windows, batch_size=self.batch)

    val_dataloader = train_dataloader


def main() -> None:
    chosen = task()
    data = Characters(chosen)
    config = Config(
        name="characters",
        block_size=chosen.context,
        n_layer=chosen.n_layer,
        n_head=chosen.n_head,
        n_embd=chosen.n_embd,
        vocab_size=data.windows.vocab_size,
        padding_multiple=1,
        bias=False,
    )
    train = TrainArgs(
        save_interval=None,
        log_interval=chosen.log_every,
        global_batch_size=chosen.batch,
        micro_batch_size=chosen.batch,
        max_tokens=STEPS * chosen.batch * chosen.context,
        max_norm=1.0,
        lr_warmup_steps=100,
    )
    setup(
        model_name="characters",
        model_config=config,
        out_dir=chosen.out,
        data=data,
        train=train,
        eval=EvalArgs(interval=STEPS, max_iters=1),
        devices=1,
        logger_name="csv",
    )


if __name__ == "__main__":
    main()
