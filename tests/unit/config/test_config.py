"""Every YAML file composes to a typed and checked configuration.

Also the names of runs, and the values that are refused.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir

from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
from mingpt_ddp.config.compose.resolve import to_job
from mingpt_ddp.config.config import OMITTED_IF_NULL, Config, from_mapping, to_plain
from mingpt_ddp.config.job import run_name
from mingpt_ddp.config.keys.schema import GROUPS, DDPConfig, selected
from mingpt_ddp.config.keys.trainer_config import TrainerConfig
from mingpt_ddp.config.recorded import without_unknown
from mingpt_ddp.errors import ConfigError

CONF = config_directory()


def plain(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        return to_plain(compose("config", list(overrides)))


def composed(*overrides: str) -> Config:
    return from_mapping(plain(*overrides))


def started(*overrides: str) -> Config:
    """Compose a configuration as main.py does."""
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        node = SimpleNamespace(runtime=SimpleNamespace(config_sources=[], choices={}))
        return to_job(compose("config", list(overrides)), node, overrides).config


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def changed(config: Config, key: str, value: object) -> Config:
    """Return the configuration with one value changed. It is validated again."""
    group, name = key.split(".")
    values = config.to_dict()
    values[group][name] = value
    return from_mapping(values)


@pytest.fixture(scope="module")
def default() -> Config:
    return composed()


# Composition


@pytest.mark.parametrize(
    ("overrides", "limits"),
    [
        ([], (4, None, None)),
        (["trainer.max_steps=2000"], (None, 2000, None)),
        (["experiment=demo", "trainer.max_epochs=2"], (2, None, None)),
        (["trainer.max_steps=2000", "trainer.max_epochs=3"], (3, 2000, None)),
        (["experiment=demo", "++trainer.max_steps=7"], (None, 7, None)),
        (["trainer.max_steps=null"], (4, None, None)),
        (["experiment=demo", "trainer.max_minutes=0.5"], (None, None, 0.5)),
        (["trainer.max_steps=9", "trainer.max_minutes=0.5"], (None, 9, 0.5)),
    ],
)
def test_a_limit_on_the_command_line_is_the_only_one(overrides, limits):
    trainer = started(*overrides).trainer
    assert (trainer.max_epochs, trainer.max_steps, trainer.max_minutes) == limits


def test_every_folder_of_conf_is_a_known_group():
    """The tests below compose every file; a new folder needs a test of its own."""
    folders = {path.name for path in CONF.iterdir() if path.is_dir() and any(path.glob("*.yaml"))}
    groups = {group for group, _ in presets()}
    assert folders - {"sweep", "hydra"} == groups | {"tracker", "experiment"}


@pytest.mark.integration
def test_sweep_in_slurm():
    """The preset uses only options that the launcher, a Hydra plugin, has."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    with initialize_config_dir(str(CONF), **VERSION_BASE):
        launcher = compose("config", ["sweep=slurm"], return_hydra_config=True).hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert "scontrol requeue" in launcher.setup[0]


def presets() -> list[tuple[str, str]]:
    groups = ("task", "model", "optimizer", "data", "ddp", "trainer", "snapshot")
    return [(group, name) for group in groups for name in choices(group)]


@pytest.mark.parametrize(("group", "preset"), presets())
def test_a_preset_composes_to_every_key_of_its_class(group, preset):
    """A preset lists only keys that differ from the defaults.

    Hydra adds the others from the schema, so that every key can be overridden.
    """
    values = plain(f"{group}={preset}", "data.path=x.txt")
    cls = GROUPS[group][1][selected(group, values[group])[1]]
    keys = {field.name for field in dataclasses.fields(cls)}
    assert values[group].keys() == keys - {*OMITTED_IF_NULL}
    config = from_mapping(values)
    assert type(getattr(config, group)) is cls
    if group == "ddp":
        assert config.ddp == dataclasses.replace(DDPConfig(), backend=preset)
    elif group in ("task", "model", "optimizer"):
        assert getattr(config, group).name == preset


@pytest.mark.parametrize("name", choices("tracker"))
def test_a_list_switches_on_several_trackers(name):
    values = vars(composed(f"tracker=[{name},mlflow]").tracker)
    assert {key for key, value in values.items() if value is True} == {name, "mlflow"}


@pytest.mark.parametrize("name", choices("experiment"))
def test_the_command_line_wins_over_an_experiment(name):
    assert composed(f"experiment={name}", "trainer.max_steps=7").trainer.max_steps == 7


def picked(config: Config, *keys: str) -> dict[str, object]:
    return {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in keys}


def test_shakespeare_char_has_the_gpu_settings_of_nanogpt():
    """They are in nanoGPT's config/train_shakespeare_char.py."""
    expected = {
        "data.name": "shakespeare",
        "data.block_size": 256,
        "data.train_split": 0.9,
        "trainer.batch_size": 64,
        "trainer.max_steps": 5000,
        "trainer.eval_every": 250,
        "trainer.grad_norm_clip": 1.0,
        "model.n_layer": 6,
        "model.n_head": 6,
        "model.n_embd": 384,
        "model.dropout": 0.2,
        "model.bias": False,
        "optimizer.name": "adamw",
        "optimizer.lr": 1e-3,
        "optimizer.min_lr_ratio": 0.1,
        "optimizer.betas": (0.9, 0.99),
        "optimizer.weight_decay": 0.1,
        "optimizer.schedule": "cosine",
        "optimizer.warmup_steps": 100,
    }
    assert picked(composed("experiment=shakespeare_char"), *expected) == expected


def test_shakespeare_char_cpu_has_the_cpu_settings_of_nanogpt():
    """They are in nanoGPT's README.md, section "I only have a macbook"."""
    expected = {
        "data.name": "shakespeare",
        "data.block_size": 64,
        "trainer.batch_size": 12,
        "trainer.max_steps": 2000,
        "model.n_layer": 4,
        "model.n_head": 4,
        "model.n_embd": 128,
        "model.dropout": 0.0,
        "model.bias": False,
    }
    assert picked(composed("experiment=shakespeare_char_cpu"), *expected) == expected


# The run's name


def test_the_name_is_data_model_and_8_hex_digits(default):
    assert run_name(changed(default, "run.name", "big-1")) == "big-1"
    data, model, digest = run_name(default).split("-")
    assert (data, model) == ("python_docs", "gpt_micro")
    assert len(digest) == 8 and int(digest, 16) >= 0


def test_the_name_is_stable(default):
    """The process, a resumed run and the order of the keys do not change the name."""
    backwards = {
        group: dict(reversed(keys.items())) for group, keys in reversed(default.to_dict().items())
    }
    assert run_name(composed()) == run_name(default) == run_name(from_mapping(backwards))


IN_THE_NAME = {
    "run.seed": 7,
    "optimizer.lr": 5e-4,
    "optimizer.warmup_steps": 7,
    "model.n_layer": 7,
    "model.dropout": 0.5,
    "data.block_size": 7,
    "data.path": "other.txt",
    "data.truncate": 0.5,
    "trainer.batch_size": 7,
    "trainer.micro_batch_size": 6,
    "trainer.precision": "bf16",
    "ddp.reduction": "canonical",
}
NOT_IN_THE_NAME = {
    "run.root": "elsewhere",
    "run.resume": "never",
    "trainer.max_epochs": 7,
    "trainer.max_steps": 7,
    "trainer.log_every": 7,
    "trainer.eval_every": 7,
    "trainer.sample_every": 7,
    "data.cache_dir": "elsewhere",
    "trainer.activation_checkpointing": True,
    "snapshot.path": "memory://snapshots",
    "snapshot.every_steps": 7,
    "snapshot.keep_last": 7,
    "ddp.backend": "gloo",
    "ddp.nproc_per_node": 7,
    "ddp.timeout_s": 7.0,
}


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        (["data.path=texts/my.book.txt"], "my.book"),
        (["data.path='https://host/a/input.txt?x=1'"], "input"),
        (["data.path='simplecache::s3://bucket/b.gz'"], "b"),
        (["data.path=/"], "text"),
        (["data.path=my.txt", "data.name=label"], "label"),
        (["data=text_file", "data.path=my.txt"], "text_file"),
        ([], "python_docs"),
    ],
)
def test_a_text_is_labelled_by_its_file(overrides, label):
    assert composed(*overrides).data.label == label


def test_a_path_without_a_preset_is_not_labelled_as_the_preset():
    assert run_name(composed("data.path=my.txt")).startswith("my-gpt_micro-")


@dataclasses.dataclass(frozen=True)
class Later(TrainerConfig):
    """The trainer group with a key that a later version adds."""

    newer: int = 3


def test_a_key_at_its_default_or_added_later_renames_no_run(default, monkeypatch):
    explicit = changed(default, "trainer.batch_size", TrainerConfig().batch_size)
    assert run_name(explicit) == run_name(default)
    monkeypatch.setitem(GROUPS, "trainer", ((), {None: Later}))
    later = from_mapping(default.to_dict())
    assert later.to_dict()["trainer"]["newer"] == 3
    assert run_name(later) == run_name(default)
    assert run_name(changed(later, "trainer.newer", 4)) != run_name(default)


@pytest.mark.parametrize(("key", "value"), IN_THE_NAME.items())
def test_keys_that_determine_the_training_change_the_name(key, value, default):
    assert run_name(changed(default, key, value)) != run_name(default)


@pytest.mark.parametrize(("key", "value"), NOT_IN_THE_NAME.items())
def test_location_limits_display_ddp_and_snapshots_do_not_change_the_name(key, value, default):
    assert changed(default, key, value) != default
    assert run_name(changed(default, key, value)) == run_name(default)


def test_a_name_is_one_safe_directory_for_any_label(default):
    for label in ("../../etc", "a/b", "-rf", "ä ö", "x" * 200):
        name = run_name(changed(default, "data.name", label))
        assert Path(name).parts == (name,)
        assert name.isascii() and len(name) <= 150 and ".." not in name
        assert " " not in name


# To plain values and back


@pytest.mark.parametrize(
    "overrides", [(), ("optimizer=sgd",), ("experiment=shakespeare_char", "ddp=gloo")]
)
def test_plain_values_round_trip(overrides):
    config = composed(*overrides)
    assert from_mapping(config.to_dict()) == config
    assert from_mapping(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config


@pytest.mark.parametrize("group", ["model", "optimizer", "data", "ddp", "trainer", "snapshot"])
def test_no_preset_repeats_a_default(group):
    """A new key is added to the schema, and to the presets that differ from its default.

    A ddp preset is only the key `backend`.
    """
    for path in (CONF / group).glob("*.yaml"):
        values = yaml.safe_load(path.read_text())
        (node,) = values.pop("defaults", ["/schema"])
        preset = node.removesuffix("@_here_").split("/")[-1]
        _, classes = GROUPS[group]
        name = preset if node.startswith("/schema/") and preset != "text" else None
        fields = {field.name: field.default for field in dataclasses.fields(classes[name])}
        repeated = [
            key
            for key, value in values.items()
            if fields[key] == value and (group, key) != ("ddp", "backend")
        ]
        assert not repeated, path


def test_a_user_preset_based_on_a_built_in_one(tmp_path):
    for group, base in (("optimizer", "muon"), ("model", "gpt_mini"), ("trainer", "default")):
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_text(f"defaults: [{base}]\n")
    (tmp_path / "trainer" / "mine.yaml").write_text("batch_size: 24\n")
    search = f"hydra.searchpath=[{tmp_path}]"
    keys = ["optimizer.eps=1e-9", "trainer.log_every=7"]
    mine = composed(search, "optimizer=mine", "model=mine", "trainer=mine", *keys)
    ours = composed("optimizer=muon", "model=gpt_mini", "trainer.batch_size=24", *keys)
    assert mine == ours


# Secrets


SECRET_URLS = [
    "https://user:hunter2@example.com/text.txt",
    "s3://key:hunter2@bucket/text.txt",
    "https://example.com/text.txt?token=hunter2",
    "https://example.com/text.txt?a=b&X-Amz-Signature=hunter2",
    "https://example.com/text.txt?password=hunter2",
    "https://account.blob.core.windows.net/container/text.txt?sv=2022-11-02&sig=hunter2",
    "https://example.com/text.txt?api_key=hunter2",
    "simplecache::https://user:hunter2@example.com/text.txt",
    "filecache::simplecache::s3://key:hunter2@bucket/text.txt",
    "ftp://me:hun,ter2@host/x",
    "ftp://me:hun ter2@host/x",
    "ftp://me@corp:hunter2@host/x",
    "sftp://me:12/34@host/y",
    "https://me,hunter2@host/x",
    "https://h/x#access_token=hunter2",
]


@pytest.mark.parametrize(
    ("key", "url"),
    [(key, SECRET_URLS[0]) for key in ("snapshot.path", "run.resume")]
    + [("data.path", url) for url in SECRET_URLS],
)
def test_credentials_are_refused_and_not_printed(key, url, default):
    with pytest.raises(ConfigError) as refused:
        changed(default, key, url)
    assert key in str(refused.value)
    assert not any(part in str(refused.value) for part in ("hunter2", "ter2", "34"))


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/@user/text.txt",
        "s3://bucket/text.txt?versionId=3",
        "s3://bucket/a, b:c@d.txt",
        "/home/a@b/text.txt",
        "http://host:8080/a@b/text.txt",
        "sftp://me@host:22/a@b",
        "hdfs://host:8020/text.txt#part",
    ],
)
def test_urls_without_credentials_are_fine(url, default):
    assert changed(default, "data.path", url).data.path == url


def test_a_batch_size_from_the_command_line_replaces_one_per_rank(tmp_path):
    """The preset has a batch size per rank."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "mine.yaml").write_text("batch_size_per_rank: 8\n")
    search = f"hydra.searchpath=[{tmp_path}]"
    config = started(search, "trainer=mine", "trainer.batch_size=24")
    assert (config.trainer.batch_size, config.trainer.batch_size_per_rank) == (24, None)
    assert started(search, "trainer=mine").trainer.batch_size_per_rank == 8


@pytest.mark.parametrize(
    ("group", "recorded", "known"),
    [
        ("run", {"seed": 1, "on_end": "true"}, {"seed": 1}),
        ("model", {"architecture": "gpt", "devices": 2}, {"architecture": "gpt"}),
        ("data", {"path": "a", "max_expansion": 9}, {"path": "a"}),
        # data.code is known: the content of its file is compared.
        ("data", {"path": "a", "code": "mine.py", "lost": 9}, {"path": "a", "code": "mine.py"}),
        ("removed_group", {"key": 1}, None),
    ],
)
def test_recorded_keys_that_the_package_does_not_know_are_dropped(group, recorded, known):
    expected = {} if known is None else {group: known}
    assert without_unknown({group: recorded}) == expected


# A user file registers "mine"; "gpt" is built in.
@pytest.mark.parametrize("architecture", ["mine", "gpt"])
def test_a_recorded_key_that_the_users_code_has_lost_stays_and_is_refused(architecture):
    model = {"code": "mine.py", "architecture": architecture, "noise": 0.1}
    assert without_unknown({"model": model}) == {"model": model}
    recorded = {"model": {**model, "code_sha256": "0" * 64}}
    if architecture == "gpt":  # code_sha256 was a key of each group with code, so it is dropped
        assert without_unknown(recorded) == {"model": model}
