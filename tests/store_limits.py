"""Shorten the time limits of object stores and leases for tests."""

from __future__ import annotations

from pathlib import Path

from launching import with_code

# Limits of mingpt_ddp.storage.remote.remote and mingpt_ddp.storage.lease, shortened for a test.
REMOTE = {
    "REQUEST_TIMEOUT_S": 2.0,
    "OPERATION_DEADLINE_S": 6.0,
    "MIN_BANDWIDTH": 32 << 20,
    "INITIAL_BACKOFF_S": 0.05,
    "MAX_BACKOFF_S": 0.5,
}
LEASE = {"HEARTBEAT_INTERVAL_S": 1.0, "LEASE_TTL_S": 3.0, "TAKEOVER_GRACE_S": 0.3}
UNAVAILABLE = (
    r"(cannot (write the snapshot of step|list snapshots at|read the snapshot of step|use s3://))"
)


def with_limits(
    directory: Path,
    remote: dict[str, float] | None = None,
    lease: dict[str, float] | None = None,
    more: str = "",
) -> str:
    """Write a sitecustomize module that sets other limits in every process. Return its PYTHONPATH.

    Args:
        directory: Where the module is written.
        remote: Limits of object stores, by the name of the constant.
        lease: Limits of leases, by the name of the constant.
        more: Code with which the module begins.
    """
    lines = [
        more,
        "from mingpt_ddp.storage import lease",
        "from mingpt_ddp.storage.remote import remote",
    ]
    for module, values in (
        ("remote", REMOTE if remote is None else remote),
        ("lease", lease or {}),
    ):
        lines += [f"{module}.{name} = {value}" for name, value in values.items()]
    return with_code(directory, "\n".join(lines) + "\n")
