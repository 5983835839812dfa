"""Suggestions for unknown keys."""

from __future__ import annotations

import dataclasses

import pytest

from mingpt_ddp.config.hints import NANOGPT_KEYS, suggest
from mingpt_ddp.config.keys.schema import GROUPS
from mingpt_ddp.config.keys.trainer_config import TrainerConfig
from mingpt_ddp.config.validation import build
from mingpt_ddp.errors import ConfigError

KEYS = {
    f"{group}.{field.name}"
    for group, (_, classes) in GROUPS.items()
    for cls in classes.values()
    for field in dataclasses.fields(cls)
}


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("learning_rate", "; did you mean optimizer.lr?"),
        ("optimizer.learning_rate", "; did you mean optimizer.lr?"),
        ("learing_rate", "; did you mean optimizer.lr?"),
        ("optimizer.weigth_decay", "; did you mean optimizer.weight_decay?"),
        (
            "gradient_accumulation_steps",
            "; did you mean trainer.micro_batch_size = trainer.batch_size / "
            "(ranks x gradient_accumulation_steps)?",
        ),
        ("trainer.epochs", "; did you mean trainer.max_epochs?"),
        ("max_epoch", "; did you mean trainer.max_epochs?"),
        ("min_lr", "; did you mean optimizer.min_lr_ratio = min_lr / optimizer.lr?"),
        ("dataset", "; did you mean data.dataset?"),
        ("modle.n_head", "; did you mean model.n_head?"),
        ("seed", "; did you mean run.seed?"),
        ("trainer.lr", "; did you mean optimizer.lr?"),
        ("trainer.max_epoch", "; did you mean trainer.max_epochs?"),
        ("model.activation", " of the chosen model"),
        ("nosuch", ""),
        ("callbacks", ""),
        ("callbacks.x", ""),
        ("logger.name", ""),
        ("modle.name", "; did you mean model.name?"),
        ("extras", ""),
        ("maxsteps", "; did you mean trainer.max_steps?"),
        ("init_from", "; did you mean run.init_from?"),
        ("wandb_log", "; did you mean tracker?"),
        ("tokenizer", "; did you mean data.tokenizer?"),
    ],
)
def test_hints(key, hint):
    assert suggest(key) == hint


def test_a_group_has_the_keys_of_the_chosen_class():
    assert suggest("model.n_hiden", ["n_hidden", "width"]) == "; did you mean model.n_hidden?"
    assert suggest("model.qqq", ["n_hidden", "width"]) == "; use one of n_hidden, width"
    assert suggest("trainer.qqq").startswith("; use one of max_epochs, max_steps, ")


@pytest.mark.parametrize(("theirs", "ours"), NANOGPT_KEYS.items())
def test_a_name_of_nanogpt_has_a_key_of_ours(theirs, ours):
    assert ours.partition(" = ")[0] in KEYS | GROUPS.keys()
    # nanoGPT's dtype has another meaning than data.dtype.
    own = {key.split(".")[1] for key in KEYS} - {"dtype"}
    assert theirs not in own, "an existing key needs no hint"


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("float16", "fp16"),
        ("bfloat16", "bf16"),
        ("16-mixed", "fp16"),
        ("FP32", None),
        ("fp61", "fp16"),
        ("tf", None),
    ],
)
def test_a_value_of_another_program(value, meant):
    with pytest.raises(ConfigError) as refused:
        build(TrainerConfig, {"precision": value}, "trainer")
    hint = f"; did you mean {meant}?" if meant else ""
    assert str(refused.value).endswith(f"={value!r} must be 'auto', 'fp32', 'bf16' or 'fp16'{hint}")
