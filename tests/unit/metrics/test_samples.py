"""samples.jsonl has each generated text once, also after a kill and a resume."""

from __future__ import annotations

from mingpt_ddp.metrics.samples import SAMPLES, append_sample, drop_samples_after, read_samples


def test_a_resume_drops_the_texts_of_later_steps(tmp_path):
    drop_samples_after(tmp_path, 0)  # the file does not exist yet
    for step, text in ((3, "a\nb\u2028c \u00fc"), (6, "old"), (9, "old")):
        append_sample(tmp_path, step, text)
    drop_samples_after(tmp_path, 5)
    append_sample(tmp_path, 6, "new")
    assert list(read_samples(tmp_path)) == [(3, "a\nb\u2028c \u00fc"), (6, "new")]


def test_lines_that_are_not_samples_are_skipped(tmp_path):
    append_sample(tmp_path, 3, "a")
    with open(tmp_path / SAMPLES, "a") as file:
        file.write('[1]\n{"step": "7", "text": ""}\n{}\n{"step": 6, "te')
    append_sample(tmp_path, 6, "new")
    assert list(read_samples(tmp_path)) == [(3, "a"), (6, "new")]


def test_if_the_file_cannot_be_written_only_the_text_is_lost(tmp_path):
    (tmp_path / SAMPLES).mkdir()
    append_sample(tmp_path, 3, "a")
    drop_samples_after(tmp_path, 0)
