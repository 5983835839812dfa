"""`mingpt-ddp snapshots export`: the exported files, their atomic write, and the model card."""

from __future__ import annotations

import json
import resource
from dataclasses import replace

import pytest
import safetensors.torch
import torch
import yaml
from snapshot_helpers import VOCABULARY, commit, filled, model_snapshot

from mingpt_ddp.snapshots import format as format_module
from mingpt_ddp.snapshots.format import MODEL, directory_name
from mingpt_ddp.snapshots.write.store import SnapshotStore


def test_shards_are_joined(run, call, tmp_path, monkeypatch):
    monkeypatch.setattr(format_module, "MIN_SHARD_BYTES", 1)
    store, whole = SnapshotStore(f"{run}/snapshots"), model_snapshot(4)
    commit(store, whole, writers=2)
    code, out, err = call("export", run, f"to={tmp_path}/out")
    assert (code, err) == (0, "") and out.startswith("step 4 is in")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["README.md", "config.json", MODEL]
    tensors = safetensors.torch.load((tmp_path / "out" / MODEL).read_bytes())
    assert tensors.keys() == whole.model.keys()
    assert all(torch.equal(tensors[name], whole.model[name]) for name in tensors)
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["vocabulary"] == VOCABULARY and described["model"]["n_embd"] == 12
    assert (described["step"], described["block_size"], described["val_loss"]) == (4, 8, 2.25)


@pytest.mark.parametrize("form", ["safetensors", "hf"])
def test_averaged_weights_are_preferred(form, tmp_path, call):
    whole = model_snapshot(4)
    ema = {name: tensor + 1 for name, tensor in whole.model.items()}
    filled(str(tmp_path / "run"), replace(whole, ema=ema))
    assert call("export", tmp_path / "run", f"to={tmp_path}/out", f"format={form}")[0] == 0
    tensors = safetensors.torch.load((tmp_path / "out" / MODEL).read_bytes())
    name = "transformer.wte.weight" if form == "hf" else "token_embedding.weight"
    assert torch.equal(tensors[name], ema["token_embedding.weight"])


def test_a_step(run, call, tmp_path):
    store = filled(run, 4, 8)
    assert call("export", run, f"to={tmp_path}/a", "step=4")[0] == 0
    assert call("export", f"{run}/snapshots/step_00000004", f"to={tmp_path}/b")[0] == 0
    assert call("export", run, f"to={tmp_path}/c")[0] == 0
    a, b, c = ((tmp_path / name / MODEL).read_bytes() for name in "abc")
    assert a == b != c
    path = f"{directory_name(4)}/{MODEL}"
    content = store.storage.read(path)
    store.storage.write(path, content[:-1] + bytes([content[-1] ^ 1]))
    code, _, err = call("export", run, f"to={tmp_path}/d", "step=4")
    assert code == 2 and "cannot be used: model.safetensors does not have the content" in err
    assert "no snapshot with step=5" in call("export", run, f"to={tmp_path}/d", "step=5")[2]
    assert not (tmp_path / "d").exists()


def test_the_best(run, call, tmp_path):
    """The best snapshot is that of step 4, whichever steps are stored."""
    store = filled(run, 2, 4, 8)
    assert call("export", run, f"to={tmp_path}/a", "step=best")[1].startswith("step 4 is in")
    assert call("export", run, f"to={tmp_path}/b", "--step", "newest")[1].startswith("step 8 is in")
    store.clear(4)
    code, _, err = call("export", run, f"to={tmp_path}/c", "step=best")
    assert code == 2
    expected = f"there is no snapshot with step=4 at {run}; the newest one is from step 8"
    assert err == f"snapshot error: {expected}\n"


def test_nothing_is_overwritten_and_no_partial_file_stays(run, call, tmp_path):
    filled(run, 4)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("there", "link"):
        code, _, err = call("export", run, f"to={tmp_path / name}")
        assert code == 2 and "already exists" in err
    before = sorted(tmp_path.iterdir())

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # simulates a full disk
    try:
        code, _, err = call("export", run, f"to={tmp_path}/new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    assert err == f"run error: cannot write to {tmp_path}/new: File too large\n"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "to", ["run/snapshots/step_00000099", "run/snapshots/a/b", "run/step_00000099", "elsewhere/a"]
)
def test_an_export_among_snapshots_is_refused(to, tmp_path, call):
    """`list` would show the export as a snapshot, and `prune` would count it."""
    filled(str(tmp_path / "run"), 4)
    (tmp_path / "run" / "config.yaml").touch()
    commit(SnapshotStore(str(tmp_path / "elsewhere")), model_snapshot(4))
    before = sorted(tmp_path.rglob("*"))
    code, _, err = call("export", tmp_path / "run", f"to={tmp_path / to}")
    assert code == 2
    assert err.startswith(f"config error: to={tmp_path / to} is among the snapshots of a run")
    assert sorted(tmp_path.rglob("*")) == before


# The model card


@pytest.mark.parametrize("licence", ["a: b", "x\ny", "", "MIT", "a" * 51, "no"])
def test_an_invalid_licence_identifier_is_refused(licence, tmp_path, call):
    filled(str(tmp_path / "run"), 4)
    code, _, err = call("export", tmp_path / "run", f"to={tmp_path}/out", f"license={licence}")
    assert code == 2 and err.startswith("config error: license=")
    assert "identifier in lower case" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [[], ["license=apache-2.0"]], ids=len)
@pytest.mark.parametrize("form", ["safetensors", "hf"])
def test_the_card(form, words, tmp_path, call):
    """The card describes the weights and the training data, and names the chosen licence."""
    filled(str(tmp_path / "run"), 4)
    assert call("export", tmp_path / "run", f"to={tmp_path}/out", f"format={form}", *words)[0] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    lines = [line for line in card.splitlines() if line]
    assert [line for line in lines if line.startswith("license")] == (
        ["license: apache-2.0"] if words else []
    )
    assert [line for line in lines if not line.startswith("license")] == [
        "---",
        "tags: [mingpt_ddp]",
        "---",
        "# A model trained with mingpt_ddp",
        "Step 4, validation loss 2.25 nats; trained on",
        '    "builtin:python_docs"',
    ]


def test_text_from_a_snapshot_is_escaped_in_the_card(tmp_path, call):
    """Neither Markdown nor the front matter interprets it, and no password is shown."""
    honest = model_snapshot(4)
    hostile = "x\n---\nlicense: evil\n# Heading\n```\n[a](javascript:b)\u2028| c | \x1b[2J"
    hostile += " evil s3://me:secret@b/c?token=secret"
    cases = [("name", "| 1 |"), ("name", 10**400), ("path", [1]), ("path", True)]
    for number, (key, val_loss) in enumerate(cases):
        config = {**honest.state["config"], "data": {key: hostile, "block_size": 8}}
        forged = model_snapshot(4, config=config, train_state={"val_loss": val_loss})
        filled(str(tmp_path / f"run{number}"), forged)
        target = tmp_path / f"out{number}"
        code, _, err = call("export", tmp_path / f"run{number}", f"to={target}")
        assert (code, err) == (0, "")
        card = (target / "README.md").read_text()
        assert "secret" not in card and card.isascii() and "\x1b" not in card
        _, front, rest = card.split("---\n", 2)
        assert {*yaml.safe_load(front)} == {"tags"}
        plain = [line for line in rest.splitlines() if line and not line.startswith("    ")]
        assert len(plain) == 2 and plain[1] == "Step 4; trained on"
        assert json.loads(rest.splitlines()[-1])
