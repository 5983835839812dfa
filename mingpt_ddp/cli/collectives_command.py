"""Check and time the communication between the ranks of a cluster, before training on it.

    torchrun --nproc_per_node=3 -m mingpt_ddp.collectives backend=gloo max_bytes=1048576 json=collectives.json
    python -m mingpt_ddp.collectives all_reduce ring nproc_per_node=3

operations        broadcast, all_reduce, reduce, gather, all_gather, scatter, reduce_scatter, all_to_all, send_recv,
                  ring (an all-reduce written by hand), barrier (all)
backend           auto (the default: NCCL on GPUs, else gloo), gloo, nccl or mpi
device            auto (the default: the GPU if there is one), cpu or cuda
min_bytes         the smallest message, rounded to whole numbers of 4 bytes per rank (8)
max_bytes         the largest (16777216)
factor            between two sizes (8)
repetitions       of every operation and size (20)
timeout_s         how long a rank waits for the others (120)
plot, json        files to write: a page with the curves (it needs plotly), and the numbers
nproc_per_node    start this many local processes with torchrun

Every result is checked; a wrong one ends the command with exit code 1. latency: the median over the repetitions, on
the slowest rank. algbw: bytes over latency. busbw: algbw times 2(n-1)/n for all_reduce and ring, (n-1)/n for gather,
all_gather, scatter, reduce_scatter and all_to_all, 1 for the others, as nccl-tests defines it.
"""  # noqa: E501

import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from mingpt_ddp.cli.arguments import run_command
from mingpt_ddp.config.fields import PositiveInt
from mingpt_ddp.config.schema import DDPConfig
from mingpt_ddp.config.trainer_config import TrainerConfig
from mingpt_ddp.config.validation import check, hint_at
from mingpt_ddp.distributed.env import DistEnv, read_env
from mingpt_ddp.distributed.exit import FAILURE, ProcessExit, echo, echo_error, exit_process
from mingpt_ddp.distributed.machine import MIN_RANK_BYTES, check_processes
from mingpt_ddp.errors import RunError, UserError
from mingpt_ddp.metrics.text_table import columns
from mingpt_ddp.storage.storage import atomic_write

if TYPE_CHECKING:
    from mingpt_ddp.distributed.collective_checks import Measurement

OPERATIONS = [
    "broadcast",
    "all_reduce",
    "reduce",
    "gather",
    "all_gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
    "ring",
    "barrier",
]
TENSORS = 4  # of a message's size, which a rank needs at a time
HEADINGS = ("operation", "bytes", "latency (us)", "algbw (GB/s)", "busbw (GB/s)")
WIDTHS = (-14, 11, 12, 12, 12)


@dataclass(frozen=True)
class CollectivesConfig:
    """The keys of the command line, as the usage above describes them."""

    operations: list[str] = field(default_factory=list)
    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    min_bytes: PositiveInt = 8
    max_bytes: PositiveInt = 16 << 20
    factor: Annotated[int, Field(ge=2)] = 8
    repetitions: PositiveInt = 20
    timeout_s: Annotated[float, Field(ge=1, le=1e7)] = 120.0
    plot: str | None = None
    json: str | None = None
    nproc_per_node: PositiveInt | None = None

    def __post_init__(self) -> None:
        smallest = self.min_bytes
        largest = self.max_bytes
        check(smallest <= largest, f"min_bytes={smallest} must be at most max_bytes={largest}")
        for name in self.operations:
            check(name in OPERATIONS, f"{name} is not an operation; {hint_at(name, OPERATIONS)}")
        check_processes("nproc_per_node", self.nproc_per_node or 1, min_bytes=MIN_RANK_BYTES)
        for key, path in (("plot", self.plot), ("json", self.json)):
            is_file = path is None or (bool(path.strip()) and "://" not in path)
            check(is_file, f"{key}={path} must be a local file")
        check(
            not self.plot or self.plot.endswith(".html"),
            f"plot={self.plot} is a page; give it a name with .html",
        )
        check(
            not self.plot or find_spec("plotly") is not None,
            "plot needs plotly; pip install 'mingpt_ddp[report]'",
        )

    def check_files(self) -> None:
        """Refuse files that cannot be written, before anything is measured; called on one rank."""
        for key, path in (("plot", self.plot), ("json", self.json)):
            parents = Path(path).absolute().parents if path is not None else []
            existing = next((parent for parent in parents if parent.exists()), None)
            if existing is not None and not (existing.is_dir() and os.access(existing, os.W_OK)):
                raise RunError(
                    f"{key}={path} cannot be written, because of {existing}; name another file"
                )

    def sizes(self) -> Iterator[int]:
        """Yield the message sizes in bytes, before they are rounded."""
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size *= self.factor


def main() -> None:
    """Run `python -m mingpt_ddp.collectives`."""
    run_command(__doc__, _command, needs_arguments=False)


def _command(config: CollectivesConfig) -> int:
    exits = ProcessExit()
    env = read_env()
    if env.is_standalone and config.nproc_per_node is not None and config.nproc_per_node > 1:
        from mingpt_ddp.distributed.launcher import run_under_torchrun

        config.check_files()
        run_under_torchrun("mingpt_ddp.collectives", config.nproc_per_node, sys.argv[1:])
    start = (
        "start it with torchrun --nproc_per_node=3 -m mingpt_ddp.collectives, or set "
        "nproc_per_node=3"
    )
    check(env.world_size > 1, f"collectives needs several ranks; {start}")
    try:
        code = _exercise(config, env, exits)
    except UserError:
        raise
    except Exception as error:
        exits.failure(error)
    exit_process(None, code)  # as train: at a normal end a thread of torch sometimes aborts


def _exercise(config: CollectivesConfig, env: DistEnv, exits: ProcessExit) -> int:
    # torch takes a second to import: only after the keys are validated.
    from mingpt_ddp.distributed.collective_checks import measure, rounded
    from mingpt_ddp.distributed.device import first_device_of_rank, set_up_device, total_memory
    from mingpt_ddp.distributed.process_group import ProcessGroup

    ddp = DDPConfig(backend=config.backend, timeout_s=config.timeout_s)
    device = first_device_of_rank(TrainerConfig(device=config.device), ddp, env)
    set_up_device(device, deterministic=False)
    if device.type == "cpu" and config.backend == "auto":  # not shared memory
        ddp = replace(ddp, backend="gloo")
    memory = total_memory([device])
    check(
        TENSORS * config.max_bytes <= memory,
        f"max_bytes={config.max_bytes} does not fit into {memory} bytes of memory",
    )
    group = exits.group = ProcessGroup(env, ddp, job=0)
    group.connect([device], ddp)
    group.run_on_rank_zero(config.check_files)
    hosts = len(set(group.all_gather(socket.gethostname())))
    about = {
        "ranks": group.world_size,
        "hosts": hosts,
        "backend": group.transport,
        "device": device.type,
    }
    title = ", ".join(f"{key} {value}" for key, value in about.items())
    env.call_on_rank_zero(lambda: echo(f"{title}\n{columns(HEADINGS, WIDTHS, gap=' ')}"))
    rows: list[Measurement] = []
    sizes = dict.fromkeys(rounded(size, group.world_size) for size in config.sizes())
    for name in dict.fromkeys(config.operations or OPERATIONS):
        for size in [0] if name == "barrier" else sizes:
            row = measure(group, device, name, size, config.repetitions)
            rows.append(row)
            env.call_on_rank_zero(partial(echo, _line(row, group.transport)))
            if row.fault is not None:
                env.call_on_rank_zero(partial(echo_error, f"error: {row.fault}"))
                group.close()
                return FAILURE
            if row.latency_s is None:
                break
    content = {**about, "results": [asdict(row) for row in rows]}
    group.run_on_rank_zero(lambda: _write(config, title, content))
    env.call_on_rank_zero(lambda: echo("every result is correct"))
    group.close()
    return 0


def _line(row: "Measurement", backend: str) -> str:
    cells = [row.operation, str(row.bytes)]
    if row.latency_s is None:
        cells.append(f" not supported by {backend}")
    else:
        cells += [f"{row.latency_s * 1e6:.1f}", f"{row.algbw / 1e9:.3f}", f"{row.busbw / 1e9:.3f}"]
    return columns(cells, WIDTHS, gap=" ")


def _write(config: CollectivesConfig, title: str, content: dict[str, Any]) -> None:
    """Write the files that the command line names; called on one rank."""
    try:
        if config.json is not None:
            atomic_write(Path(config.json), json.dumps(content, indent=1).encode())
        if config.plot is not None:
            atomic_write(Path(config.plot), _page(title, content["results"]).encode())
    except OSError as error:
        raise RunError(f"cannot write the plot or the json file: {error}") from error


def _page(title: str, rows: list[dict[str, Any]]) -> str:
    """Return an HTML page with the bus bandwidth of every operation over the message size."""
    import plotly.io

    curves = []
    for name in dict.fromkeys(row["operation"] for row in rows if row["busbw"]):
        points = [row for row in rows if row["operation"] == name]
        x = [row["bytes"] for row in points]
        y = [row["busbw"] / 1e9 for row in points]
        curves.append({"name": name, "x": x, "y": y})
    layout = {
        "title": {"text": title},
        "xaxis": {"type": "log", "title": {"text": "message (bytes)"}},
        "yaxis": {"type": "log", "title": {"text": "busbw (GB/s)"}},
    }
    figure = {"data": curves, "layout": layout}
    return str(plotly.io.to_html(figure, include_plotlyjs=True))
