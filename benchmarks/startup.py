"""Measure the time from a command to its first optimizer step, and of commands without torch.

The clock starts with the command. It stops when its line `the first step was done after ...`
arrives, which rank 0 logs after the update of the weights. CPU time is measured over all processes
of the command until then. The model is the one of `experiment=shakespeare_char_cpu`. An earlier run
has encoded its text, as for every start but the first. Each process has one thread.

For comparison, minimal scripts (floors) import torch and take one step of a small model. The script
for two ranks is started by torchrun. It also joins a gloo group and wraps the model in
DistributedDataParallel. Both import the compiler, because torch's optimizers do.

A command that does not need torch is timed to its end, with the CPU time of its process. The report
and the list of snapshots belong to a run of one step. The commands alternate.

    MINGPT_SHAKESPEARE=input.txt python benchmarks/startup.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from common import ROOT, alternate, cell, corpus_path, environment, parser, report, spread
from stopwatch import cpu_seconds, process_tree

FLOOR = """
import os, torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
model(torch.randn(12, 64)).sum().backward()
optimizer.step()
print("the first step", flush=True)
os._exit(0)
"""
FLOOR_OF_TWO = """
import os, torch
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel
init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
model(torch.randn(12, 64)).sum().backward()
optimizer.step()
if os.environ["RANK"] == "0":
    print("the first step", flush=True)
os._exit(0)
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
MAIN = str(ROOT / "main.py")
# The overrides keep the rest of the run short.
RUN = [
    "experiment=shakespeare_char_cpu",
    "trainer.device=cpu",
    "trainer.max_steps=1",
    "data.truncate=0.05",
    "run.resume=never",
]
WAYS = {
    "`torchrun --nproc_per_node=2 main.py`": [*TORCHRUN, MAIN, *RUN],
    "`python main.py ddp.nproc_per_node=2`": [sys.executable, MAIN, "ddp.nproc_per_node=2", *RUN],
    "`python main.py`": [sys.executable, MAIN, *RUN],
}
FLOORS = {"floor: torchrun": (TORCHRUN, FLOOR_OF_TWO), "floor: python": ([sys.executable], FLOOR)}
DONE = "the first step"  # beginning of the log line that stops the clock
# Commands with their exit codes. {run} stands for a run directory.
WITHOUT_TORCH: dict[str, tuple[list[str], int]] = {
    "`main.py --help`": ([MAIN, "--help"], 0),
    "`plan --help`": (["-m", "mingpt_ddp", "plan", "--help"], 0),
    "`plan --version`": (["-m", "mingpt_ddp", "plan", "--version"], 0),
    "`report RUN`": (["-m", "mingpt_ddp", "report", "{run}"], 0),
    "`snapshots list RUN`": (["-m", "mingpt_ddp", "snapshots", "list", "{run}"], 0),
    "`main.py trainer.max_epoch=5`, an error": ([MAIN, "trainer.max_epoch=5"], 2),
    "the same with `ddp.nproc_per_node=2`": (
        [MAIN, "trainer.max_epoch=5", "ddp.nproc_per_node=2"],
        2,
    ),
}
HEADER = [
    "to the end of the first step, or of the command",
    "seconds",
    "CPU seconds, all processes",
]


def time_to_first_step(command: list[str], cwd: Path) -> tuple[float, float]:
    """Measure the wall and CPU seconds of a command until its first step is done."""
    paths = {**environment(), "PYTHONPATH": str(ROOT)}
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=cwd, env=paths, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        output.append(line)
        if line.startswith(DONE):
            wall = time.perf_counter() - begin
            cpu = sum(map(cpu_seconds, process_tree(process.pid)))
            break
    output.extend(process.stdout)
    if process.wait() != 0 or not any(line.startswith(DONE) for line in output):
        sys.exit(f"{' '.join(command)} failed:\n{''.join(output[-20:])}")
    return float(f"{wall:.4g}"), float(f"{cpu:.4g}")


def time_to_end(command: list[str], code: int, cwd: Path) -> tuple[float, float]:
    """Measure the wall and CPU seconds of a whole command, which must exit with `code`."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=cwd, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != code:
        sys.exit(f"{' '.join(command)} exited with {process.returncode}")
    return float(f"{wall:.4g}"), float(f"{usage.ru_utime + usage.ru_stime:.4g}")


def main() -> None:
    options = parser(__doc__, "startup")
    options.add_argument(
        "--repetitions", type=int, default=7, help="runs of each command (default: %(default)s)"
    )
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="startup-") as scratch:
        root = Path(scratch)
        data = [f"data.path={corpus_path()}", f"data.cache_dir={root / 'cache'}"]
        commands = {way: [*command, *data] for way, command in WAYS.items()}
        for way, (command, code) in FLOORS.items():
            script = root / f"{way.rpartition(' ')[2]}.py"
            script.write_text(code)
            commands[way] = [*command, str(script)]
        candidates = {
            way: partial(time_to_first_step, command, root) for way, command in commands.items()
        }
        for measure in candidates.values():
            measure()  # warm up the disk cache, and encode the text
        run = str(next((root / "outputs").iterdir()))
        for way, (words, code) in WITHOUT_TORCH.items():
            commands[way] = [sys.executable, *(word.format(run=run) for word in words)]
            candidates[way] = partial(time_to_end, commands[way], code, ROOT)
        values = alternate("start", candidates, chosen.repetitions)
    walls = {way: spread([wall for wall, _ in pairs]) for way, pairs in values.items()}
    cpus = {way: spread([cpu for _, cpu in pairs]) for way, pairs in values.items()}
    ways = {
        way: {
            "command": " ".join(commands[way][1:4]).replace(f"{ROOT}/", "").replace(f"{root}/", ""),
            "wall": walls[way],
            "cpu": cpus[way],
        }
        for way in values
    }
    rows = [[way, cell(walls[way], ".2f"), cell(cpus[way], ".2f")] for way in values]
    readme = []
    for way in WAYS:
        floor = walls["floor: torchrun" if "nproc" in way else "floor: python"]
        ratio = walls[way]["median"] / floor["median"]
        figure = f"{cell(walls[way], '.2f')} s, {ratio:.2f} of a minimal script"
        readme.append((f"start to the end of the first step, {way}", figure))
    readme += [(f"start to end, {way}", f"{cell(walls[way], '.2f')} s") for way in WITHOUT_TORCH]
    report(chosen.out, {"ways": ways, "threads": 1}, HEADER, rows, readme)


if __name__ == "__main__":
    main()
