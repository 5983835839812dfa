"""Draw what DDP does in a backward pass, and the busbw of collectives by size.

The drawings are docs/timeline.svg and docs/busbw.svg. Two ranks with gloo train a GPT. The times of
one pass are recorded on rank 0: its start and end, when each bucket of gradients is ready, and when
its all-reduce ends; once with the all-reduce and once in `no_sync`, as before the last micro-batch
of a step. The median pass by length of PASSES is drawn. busbw is what
examples/collectives.py measures on two ranks. Needs matplotlib (`pip install -e .[dev]`).

    python benchmarks/timeline.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib
from common import ROOT, environment, parser, report

matplotlib.use("svg")
from matplotlib import pyplot as plt

PASSES, WARM_UP = 9, 3
BUCKET_MB = 1.0
OVERRIDES = ["model=gpt_mini", "data.block_size=128", "trainer.device=cpu"]
BATCH = 8
INK, BARS, GRID = "#24292f", {"backward": "#8fb3d9", "all-reduce": "#c2410c"}, "#e5e7eb"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "timeline",
    "font.size": 10,
    "axes.edgecolor": GRID,
}
SHOWN = ("broadcast", "all_reduce", "ring", "all_gather", "reduce_scatter")


def record(out: Path) -> None:
    """Record on one rank of a launcher.

    Rank 0 writes the times in ms since the start of each pass, by kind of pass.
    """
    import torch
    import torch.distributed as dist
    from common import compose_config
    from torch.nn.parallel import DistributedDataParallel

    from mingpt_ddp.models import build_model

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = compose_config(*OVERRIDES)
    model = DistributedDataParallel(
        build_model(config.model, 65, config.data.block_size), bucket_cap_mb=BUCKET_MB
    )
    events: list[dict[str, float]] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are text
        event = {"ready": time.perf_counter(), "bytes": float(bucket.buffer().nbytes)}
        events.append(event)

        def finished(future: Any) -> Any:
            event["done"] = time.perf_counter()
            return future.value()[0] / dist.get_world_size()

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(finished)

    model.register_comm_hook(None, hook)
    found: dict[str, list[dict[str, Any]]] = {"sync": [], "no_sync": []}
    x = torch.randint(65, (BATCH, config.data.block_size))
    for number in range(2 * (WARM_UP + PASSES)):
        kind = ("sync", "no_sync")[number % 2]
        loss = model(x, x) if kind == "sync" else None
        if loss is None:
            with model.no_sync():
                loss = model(x, x)
        dist.barrier()
        events.clear()
        begin = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        model.zero_grad()
        buckets = [
            {k: v if k == "bytes" else 1e3 * (v - begin) for k, v in event.items()}
            for event in events
        ]
        if number >= 2 * WARM_UP:
            found[kind].append({"end": 1e3 * (end - begin), "buckets": buckets})
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def launch(script: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        *script,
    ]
    subprocess.run(command, check=True, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)


def draw_timeline(passes: dict[str, dict[str, Any]]) -> None:
    """Draw the backward pass, and each bucket from its readiness to the end of its all-reduce."""
    figure, axes = plt.subplots(
        2, 1, figsize=(8, 4.6), sharex=True, gridspec_kw={"height_ratios": [4, 1]}
    )
    for axis, (kind, one) in zip(axes, passes.items(), strict=True):
        rows = ["backward", *(f"bucket {i + 1}" for i in range(len(one["buckets"])))]
        axis.barh(0, one["end"], color=BARS["backward"], height=0.7)
        for i, bucket in enumerate(one["buckets"], start=1):
            axis.barh(
                i,
                bucket["done"] - bucket["ready"],
                left=bucket["ready"],
                color=BARS["all-reduce"],
                height=0.7,
            )
        axis.set_yticks(range(len(rows)), rows)
        axis.invert_yaxis()
        axis.grid(axis="x", color=GRID)
        axis.set_axisbelow(True)
        title = {
            "sync": "with the all-reduce, which overlaps the pass",
            "no_sync": "no_sync: nothing is sent",
        }[kind]
        axis.set_title(title, loc="left", color=INK, fontsize=10)
    axes[-1].set_xlabel("ms since the start of the backward pass (rank 0 of 2)")
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "timeline.svg", metadata={"Date": None})


def draw_busbw(measured: list[dict[str, Any]]) -> None:
    figure, axis = plt.subplots(figsize=(8, 3.6))
    for operation in SHOWN:
        points = [
            (row["bytes"], row["busbw"] / 1e9) for row in measured if row["operation"] == operation
        ]
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=operation)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("bytes of a message")
    axis.set_ylabel("busbw, GB/s")
    axis.grid(color=GRID)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "busbw.svg", metadata={"Date": None})


def main() -> None:
    made = parser(__doc__, "timeline")
    made.add_argument("--record", type=Path, help="internal: record one rank")
    args = made.parse_args()
    if args.record:
        record(args.record)
        return
    with tempfile.TemporaryDirectory(prefix="timeline-") as scratch:
        recorded, collectives = Path(scratch, "passes.json"), Path(scratch, "collectives.json")
        launch([__file__, f"--record={recorded}"])
        settings = [f"json={collectives}", "backend=gloo", "device=cpu"]
        launch(["examples/collectives.py", *settings])
        found, measured = json.loads(recorded.read_text()), json.loads(collectives.read_text())
    passes = {
        kind: sorted(many, key=lambda one: one["end"])[len(many) // 2]
        for kind, many in found.items()
    }
    plt.rcParams.update(STYLE)
    draw_timeline(passes)
    draw_busbw(measured["results"])
    rows = []
    for kind, one in passes.items():
        sent = sum(bucket["done"] - bucket["ready"] for bucket in one["buckets"])
        exposed = max((bucket["done"] for bucket in one["buckets"]), default=0) - max(
            (bucket["ready"] for bucket in one["buckets"]), default=0
        )
        rows.append(
            [kind, f"{one['end']:.1f}", str(len(one["buckets"])), f"{sent:.1f}", f"{exposed:.1f}"]
        )
    header = [
        "backward pass",
        "ms",
        "buckets",
        "all-reduce, ms",
        "of it after the last bucket is ready, ms",
    ]
    report(args.out, {"passes": passes, "collectives": measured}, header, rows)


if __name__ == "__main__":
    main()
