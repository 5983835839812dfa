"""transformers: GPT2LMHeadModel in its Trainer, with defaults except for what is compared."""

from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from windows import STEPS, Windows, task


class Examples(Dataset):
    """Windows as inputs and labels: the model shifts the labels itself."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict:
        tokens = self.windows[index]
        return {"input_ids": tokens, "labels": tokens}


class Report(TrainerCallback):
    def on_log(self, args, state, control, **_) -> None:
        print("step", state.global_step, flush=True)


def main() -> None:
    chosen = task()
    windows = Windows(chosen.text, chosen.context, chosen.batch)
    config = GPT2Config(
        vocab_size=windows.vocab_size,
        n_positions=chosen.context,
        n_layer=chosen.n_layer,
        n_head=chosen.n_head,
        n_embd=chosen.n_embd,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    arguments = TrainingArguments(
        output_dir=str(chosen.out),
        max_steps=STEPS,
        per_device_train_batch_size=chosen.batch,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        logging_steps=chosen.log_every,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(
        GPT2LMHeadModel(config), arguments, train_dataset=Examples(windows), callbacks=[Report()]
    ).train()


if __name__ == "__main__":
    main()
