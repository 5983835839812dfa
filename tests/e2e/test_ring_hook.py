"""Check examples/ring_hook.py in training, and the error of `ddp.comm_hook=ring` without it."""

from __future__ import annotations

import json

from example_files import EXAMPLES, command_of, run_in_shell
from launching import ROOT, TINY, call, hashes, python_main
from runs import succeed, tool

EXAMPLE = EXAMPLES / "ring_hook.py"
REFUSAL = "config error: ddp.comm_hook=ring must be one of none, fp16, bf16"


def test_the_command_of_the_example(tmp_path):
    done = run_in_shell(command_of(EXAMPLE), tmp_path)
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / "outputs" / "ring" / "result.json").read_text())
    assert (result["status"], result["step"], result["world_size"]) == ("complete", 20, 3)


def test_a_recorded_run_continues_only_with_the_example(tmp_path):
    """Without the example, the same command and `again` are refused and write nothing."""
    run = [
        *TINY,
        "trainer.device=cpu",
        "ddp.comm_hook=ring",
        "ddp.nproc_per_node=3",
        "run.name=run",
    ]
    command = [*python_main(), *run]
    example = f"+data.code={EXAMPLE}"
    succeed([*command, example], tmp_path)
    before = hashes(tmp_path)
    more = "trainer.max_steps=16"
    again = tool("again", "outputs/run")
    for refused, line in (
        (command, REFUSAL),
        (again, f"add them to the command line: data.code={EXAMPLE}"),
    ):
        done = call([*refused, more], tmp_path, separate=True, PYTHONPATH=str(ROOT))
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].endswith(line)
    assert hashes(tmp_path) == before
    text = succeed([*command, more, example], tmp_path)
    assert "resuming from the snapshot of step 12 " in text
