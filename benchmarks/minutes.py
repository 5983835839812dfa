"""How long a run with trainer.max_minutes really takes, on a quiet and on a busy machine.

The number of steps is fixed after a tenth of the minutes, so a machine that becomes slower after
that takes longer. Three ways alternate: nothing else runs; a busy loop on each core runs beside the
whole run; the loops begin in the middle of the minutes. The script starts the loops and ends them.
Other programs on the machine count as well: look at the load that it prints first.

    MINGPT_SHAKESPEARE=input.txt python benchmarks/minutes.py
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from common import ROOT, alternate, cell, corpus_path, environment, log, parser, report, spread

COMMAND = [sys.executable, str(ROOT / "main.py"), "experiment=shakespeare_char_cpu"]
SETTINGS = ["trainer.device=cpu", "trainer.eval_every=null", "run.name=run", "run.resume=never"]
# A run is ended if it takes this many times its minutes, and this many seconds for its start.
LONGEST = 20.0
START_S = 120.0
# It ends with the script, however that ends.
LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
QUIET = "nothing beside it"
BUSY = "a busy loop on each core"
LATER = "the loops begin in the middle"


@contextlib.contextmanager
def busy_loops(after_s: float) -> Iterator[None]:
    """Keep all cores busy in this context, beginning after some seconds."""
    loops: list[subprocess.Popen[bytes]] = []
    has_ended = threading.Event()

    def begin() -> None:
        if not has_ended.wait(after_s):
            for _ in range(os.cpu_count() or 1):
                loops.append(subprocess.Popen([sys.executable, "-c", LOOP]))

    thread = threading.Thread(target=begin)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        for loop in loops:
            loop.kill()
            loop.wait()


def minutes_taken(minutes: float, busy_after_s: float | None, cwd: Path, threads: int) -> float:
    """Return the minutes that a run has recorded.

    Args:
        busy_after_s: Seconds after which the busy loops begin. None: they do not.
    """
    with tempfile.TemporaryDirectory(dir=cwd) as root:
        data = [f"data.path={corpus_path()}", f"data.cache_dir={cwd / 'cache'}"]
        limit = [f"trainer.max_minutes={minutes:g}", f"run.root={root}"]
        loops = contextlib.nullcontext() if busy_after_s is None else busy_loops(busy_after_s)
        with loops:
            done = subprocess.run(
                [*COMMAND, *SETTINGS, *data, *limit],
                cwd=cwd,
                env=environment(threads),
                capture_output=True,
                text=True,
                timeout=LONGEST * 60 * minutes + START_S,
            )
        if done.returncode:
            sys.exit(f"the run failed:\n{done.stderr[-2000:]}")
        return float(json.loads((Path(root) / "run" / "result.json").read_text())["minutes"])


def main() -> None:
    options = parser(__doc__, "minutes")
    options.add_argument(
        "--minutes", type=float, default=0.5, help="trainer.max_minutes (default: %(default)s)"
    )
    options.add_argument(
        "--repetitions", type=int, default=5, help="of each way (default: %(default)s)"
    )
    options.add_argument("--threads", type=int, default=1, help="of a run (default: %(default)s)")
    chosen = options.parse_args()
    load = os.getloadavg()[0]
    log(f"other programs: load {load:.2f} on {os.cpu_count()} cores")
    begins = {QUIET: None, BUSY: 0.0, LATER: 30 * chosen.minutes}
    with tempfile.TemporaryDirectory(prefix="minutes-") as scratch:
        cwd = Path(scratch)
        minutes_taken(0.01, None, cwd, chosen.threads)  # encodes the text
        ways = {
            way: partial(minutes_taken, chosen.minutes, begin, cwd, chosen.threads)
            for way, begin in begins.items()
        }
        values = alternate("minutes", ways, chosen.repetitions)
    shares = {way: spread([each / chosen.minutes for each in values[way]]) for way in ways}
    rows = [[way, cell(shares[way], ".3f")] for way in ways]
    what = f"minutes taken over `trainer.max_minutes={chosen.minutes:g}`, load {load:.1f} before"
    readme = [(f"{what}: {way}", f"{cell(shares[way], '.3f')} times") for way in ways]
    settings = {"minutes": chosen.minutes, "threads": chosen.threads, "load_before": load}
    report(chosen.out, {"shares": shares, **settings}, ["beside the run", what], rows, readme)


if __name__ == "__main__":
    main()
