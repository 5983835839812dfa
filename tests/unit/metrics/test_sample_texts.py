"""samples.jsonl: what a restart reads."""

from __future__ import annotations

from mingpt_ddp.metrics.trackers.sample_texts import NAME, append_sample, read_samples


def test_the_last_text_of_each_step(tmp_path):
    assert read_samples(tmp_path) == {}
    append_sample(tmp_path, 3, "a\nb\u2028c \u00fc")
    append_sample(tmp_path, 6, "old")
    with open(tmp_path / NAME, "a") as file:
        file.write('[1]\n{"step": "7", "text": ""}\n{}\n{"step": 6, "te')
    assert read_samples(tmp_path) == {3: "a\nb\u2028c \u00fc", 6: "old"}
    append_sample(tmp_path, 6, "new")
    assert read_samples(tmp_path)[6] == "new"


def test_a_full_disk_costs_the_text(tmp_path):
    (tmp_path / NAME).mkdir()
    append_sample(tmp_path, 3, "a")
    assert read_samples(tmp_path) == {}
