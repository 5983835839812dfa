"""Write 200 snapshots to a real S3 server over a faulty network, and verify each one.

Every save is hit by one to three faults at random moments, which the seed decides: errors 503 and
500, resets before, during and instead of the response, stalled uploads and connections. Every
second save is split into two shards, which two threads write as two ranks would. After a reported
commit, every byte is read back without faults and compared. After a reported failure, a reader must
find either no snapshot or one with exactly the bytes that were written. A request counts as sent
again if the same save has already sent a request with the same first line. This also happens
without faults.

The script needs the test extra: pip install -e .[test]. It starts a SeaweedFS server, or uses one
that listens on --port of this machine, with --bucket and credentials in the usual AWS_...
variables.
"""

from __future__ import annotations

import logging
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import ROOT, log, parser, report

sys.path.insert(0, str(ROOT / "tests"))  # for the S3 server and the fault proxy of the tests

import torch
from fault_proxy import Fault, FaultProxy, Rule
from s3_server import SeaweedServer

from mingpt_ddp.snapshots.format import CorruptSnapshotError, shard_name
from mingpt_ddp.snapshots.staging_buffer import encode
from mingpt_ddp.snapshots.write.store import SnapshotStore
from mingpt_ddp.storage.remote import remote

MIB = 1 << 20
# The package's defaults are 60 s and parts of 16 MiB. These limits have the same proportions, and
# the script takes minutes instead of hours.
LIMITS = {
    "REQUEST_TIMEOUT_S": 1.0,
    "OPERATION_DEADLINE_S": 4.0,
    "MIN_BANDWIDTH": 32 * MIB,
    "INITIAL_BACKOFF_S": 0.05,
    "MAX_BACKOFF_S": 0.5,
}
LIMITS["PART_BYTES"] = 5 * MIB  # the S3 minimum
KINDS = {
    "503": {"fault": Fault.STATUS, "status": 503},
    "500": {"fault": Fault.STATUS, "status": 500},
    "reset before the request": {"fault": Fault.RESET_BEFORE},
    "reset in the middle of the request": {"fault": Fault.RESET_SENDING},
    "reset instead of the answer": {"fault": Fault.RESET_UNANSWERED},
    "stall before the content": {"fault": Fault.STALL},
    "stall in the middle of the content": {"fault": Fault.STALL_SENDING},
}
# Faults that last longer than a save.
LASTING = {
    "503 for a whole save": {"fault": Fault.STATUS, "status": 503, "match": "^(PUT|POST)"},
    "no connection for the manifest": {"fault": Fault.RESET_BEFORE, "match": "PUT.*manifest"},
    "no answer for the manifest": {"fault": Fault.RESET_UNANSWERED, "match": "PUT.*manifest"},
}
MATCHES = [
    ".",
    ".",
    "^PUT",
    "^PUT",
    "^(PUT|POST)",
    "model",
    "optimizer",
    "state",
    "manifest",
    "partNumber",
    r"\?upload",
    "DELETE",
]


def main() -> None:
    args = parser(__doc__, "faulted_saves")
    args.add_argument("--saves", type=int, default=200)
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--port", type=int, help="port of a server that already runs on this machine")
    args.add_argument("--bucket", default="runs")
    args.add_argument(
        "--server",
        default="SeaweedFS",
        help="name of the server for the report (default: %(default)s)",
    )
    given = args.parse_args()
    for name, value in LIMITS.items():
        setattr(remote, name, value)
    logging.getLogger("mingpt_ddp").setLevel(logging.WARNING)
    if given.port is not None:
        result = measure(given.port, given.bucket, given.saves, given.seed)
    else:
        with tempfile.TemporaryDirectory(prefix="faulted-saves-") as directory:
            server = SeaweedServer(Path(directory))
            try:
                server.start()
                os.environ.update(server.environment())
                result = measure(
                    server.port, server.make_bucket(given.bucket), given.saves, given.seed
                )
                result["unfinished uploads left"] = len(server.unfinished_uploads(given.bucket))
            finally:
                server.kill()
    rows = [[key, str(value)] for key, value in result.items() if key != "faults"]
    rows += [[f"fault: {kind}", str(times)] for kind, times in sorted(result["faults"].items())]
    report(
        given.out,
        {"server": given.server, **result},
        ["what", "figure"],
        rows,
        readme(given.server, result),
    )
    if result["lost"] or result["silently damaged"]:
        sys.exit("a snapshot was lost or damaged")


def readme(server: str, result: dict[str, Any]) -> list[tuple[str, str]]:
    what = (
        f"{result['saves']} saves on S3 ({server}) over a failing network, "
        f"{result['saves that met a fault']} of which"
    )
    return [
        (
            f"{what} met a fault",
            f"{result['lost']} lost, {result['silently damaged']} silently damaged",
        )
    ]


def measure(server: int, bucket: str, saves: int, seed: int) -> dict[str, Any]:
    """Save under faults, and verify each snapshot.

    Args:
        server: Port of the server on this machine.
        bucket: Name of the bucket.
        saves: Number of saves.
        seed: Seed of the faults and of the contents.
    """
    generator = random.Random(seed)
    proxy = FaultProxy(server, seed)
    stores = []
    for port in (proxy.port, server):
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        stores.append(SnapshotStore(f"s3://{bucket}/run"))
        stores[-1].steps()  # connect now, before the first fault
    writing, reading = stores
    counts: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    seconds: list[float] = []
    kept: dict[int, dict[str, bytes]] = {}  # contents of the newest committed snapshots, by step
    for number in range(1, saves + 1):
        contents = make(generator, parts=1 + number % 2)
        planned = [generator.choice(list(KINDS)) for _ in range(generator.randint(1, 3))]
        if generator.random() < 0.1:
            planned[0] = generator.choice(list(LASTING))
        proxy.rules = [rule(kind, generator) for kind in planned]
        sent, begin = len(proxy.request_lines), time.monotonic()
        committed = save(writing, number, contents)
        seconds.append(time.monotonic() - begin)
        counts["requests sent again"] += sent_again(proxy.request_lines[sent:])
        for kind, planned_rule in zip(planned, proxy.rules, strict=True):
            faults[kind] += planned_rule.hits
        counts["saves that met a fault"] += any(planned_rule.hits for planned_rule in proxy.rules)
        proxy.heal()
        verdict = judge(reading, number, contents, committed)
        counts[verdict] += 1
        log(f"{number}: {', '.join(planned)}: {verdict}, {seconds[-1]:.1f} s")
        if reading.is_committed(number):
            kept[number] = contents
        # Keep two snapshots, as a run does.
        for old in sorted(kept)[:-2]:
            reading.clear(old)
            del kept[old]
        # The faults of a save must not affect other snapshots.
        for step, expected in kept.items():
            found = contents_of(reading, step)
            counts["lost" if found is None else "silently damaged"] += found != expected
    proxy.close()
    keys = (
        "committed",
        "refused",
        "refused, but whole",
        "lost",
        "silently damaged",
        "saves that met a fault",
        "requests sent again",
    )
    return {
        "saves": saves,
        "seed": seed,
        **{key: counts[key] for key in keys},
        "MB each": round(sum(map(len, contents.values())) / 1e6, 1),
        "seconds a save, median": round(sorted(seconds)[saves // 2], 2),
        "seconds a save, longest": round(max(seconds), 2),
        "faults": dict(faults),
    }


def make(generator: random.Random, parts: int) -> dict[str, bytes]:
    """Make the files of a 14 MB snapshot. The optimizer's files need multipart uploads.

    Args:
        generator: Draws the contents.
        parts: Number of shards.
    """
    torch.manual_seed(generator.randrange(1 << 30))
    contents = {"state.json": b'{"random": %d}' % generator.randrange(1 << 30)}
    for part in range(parts):
        for kind, size in (("model", 500_000), ("optimizer", 3_000_000)):
            contents[shard_name(kind, part, parts)] = bytes(
                encode({f"weight{part}": torch.randn(size // parts)})
            )
    return contents


def rule(kind: str, generator: random.Random) -> Rule:
    """Draw a rule for the proxy that injects faults of this kind."""
    if kind in LASTING:
        return Rule(**LASTING[kind], times=float("inf"))
    somewhere = {"match": generator.choice(MATCHES), "after": generator.randint(0, 200_000)}
    return Rule(
        **somewhere,
        **KINDS[kind],
        times=generator.randint(1, 4),
        probability=generator.uniform(0.3, 1),
    )


def save(store: SnapshotStore, step: int, contents: dict[str, bytes]) -> bool:
    """Save a snapshot as a run does, with a writer for each shard.

    Return True if the commit was reported.
    """
    groups: dict[str, dict[str, bytes]] = {}
    for name, content in contents.items():
        groups.setdefault("2" if "-00002-of" in name else "1", {})[name] = content
    try:
        store.clear(step)
        with ThreadPoolExecutor(len(groups)) as pool:
            parts = list(pool.map(lambda group: store.write_files(step, group), groups.values()))
        store.commit(step, parts)
    except OSError:
        return False
    return True


def sent_again(lines: list[str]) -> int:
    """Count the requests that repeat an earlier one.

    Upload ids are ignored, because a second upload of the same file has a new id.
    """
    return len(lines) - len({re.sub(r"uploadId=[^& ]+", "uploadId=", line) for line in lines})


def contents_of(store: SnapshotStore, step: int) -> dict[str, bytes] | None:
    """Read the files of a snapshot. Return None if there is none, and {} if it is damaged."""
    if not store.is_committed(step):
        return None
    try:
        store.read(step)
    except CorruptSnapshotError:
        return {}
    return {name: store.storage.read(f"step_{step:08d}/{name}") for name in store.files(step)}


def judge(store: SnapshotStore, step: int, contents: dict[str, bytes], committed: bool) -> str:
    """Compare the snapshot that a reader finds with the contents that were written.

    Args:
        store: A store without faults.
        step: Step of the snapshot.
        contents: The files that were written.
        committed: True if the commit was reported.

    Returns:
        The verdict, which names a row of the results.
    """
    found = contents_of(store, step)
    if found is None:
        return "lost" if committed else "refused"
    if committed:
        return "committed" if found == contents else "silently damaged"
    # The response to the last request was lost. The writer cannot know that the snapshot was
    # committed, but it is intact.
    return "refused, but whole" if found == contents else "silently damaged"


if __name__ == "__main__":
    main()
