"""The commands that the benchmarks run use existing keys and presets, and the intended ones."""

import sys

import pytest
from benchmarking import ROOT, modules
from hydra import compose, initialize_config_dir

from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
from mingpt_ddp.config.config import from_mapping, to_plain


@pytest.fixture(scope="module")
def trainers():
    for loaded in modules("trainers"):
        yield loaded.trainers


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("recipe", ["PLAIN", "PLAIN_FP32", "MODERN"])
def test_a_benchmark_trains_the_model_that_it_describes(trainers, tmp_path, recipe, device):
    setting = trainers.SETTINGS[trainers.ON[device][1]]
    program, script, *overrides = trainers.ours(
        setting, tmp_path / "text", tmp_path, getattr(trainers, recipe), device
    )
    assert (program, script) == (sys.executable, str(ROOT / "main.py"))
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        config = from_mapping(to_plain(compose("config", overrides)))
    model, trainer = config.model, config.trainer
    shape = (model.n_layer, model.n_head, model.n_embd, config.data.block_size, trainer.batch_size)
    assert shape == (
        setting.n_layer,
        setting.n_head,
        setting.n_embd,
        setting.context,
        setting.batch,
    )
    assert (model.architecture, config.optimizer.name) == (
        ("modern", "muon") if recipe == "MODERN" else ("gpt", "adamw")
    )
    assert trainer.precision == ("fp32" if recipe == "PLAIN_FP32" else "auto")
    assert (trainer.device, trainer.compile) == (device, device == "cuda")
    assert trainer.eval_every is None and config.snapshot.every_steps is None and model.dropout == 0
