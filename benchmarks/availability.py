"""Compute the expected goodput of a run, the fraction of time that becomes kept progress.

The result is a closed formula. All times are in seconds.

Failures are a Poisson process with an average of one failure in `mtbf_s`, also during restarts.
Training runs for an interval, stalls for `cost_s` while a snapshot is taken, and continues. A
failure loses all training since the start of the last durable snapshot. A restart takes
`restart_s`. If it fails, it begins again.
"""

from __future__ import annotations

import math


def goodput(
    interval_s: float, cost_s: float, durable_s: float, restart_s: float, mtbf_s: float
) -> float:
    """Compute the expected goodput, 0 to 1.

    Let T, C, D, R and M be the arguments in their order. After a restart, snapshot k starts at
    k(T + C) - C, and is durable a time D later. The time to the next failure is exponential, so
    snapshot k becomes durable with probability exp(-(k(T + C) - C + D) / M). Each snapshot that
    does is worth T of training. The sum over k is a geometric series. The expected progress between
    a restart and the next failure is therefore

        T exp(-(D - C) / M) / (exp((T + C) / M) - 1).

    The time until the failure is M on average. The restart, which may fail too, takes
    M(exp(R / M) - 1). Together they take M exp(R / M). Hence

        goodput = T / M * exp(-(R + D - C) / M) / (exp((T + C) / M) - 1).

    With D = C this is Daly's model of synchronous saving. D and R only appear in a factor without
    T. They cost time, but they do not change the optimal interval.

    Args:
        interval_s: Training time between the end of one snapshot's stall and the start of the next
            snapshot.
        cost_s: Time for which a snapshot stalls training.
        durable_s: Time from the start of a snapshot, before its stall, until it survives a failure.
            It is `cost_s` if saving is synchronous.
        restart_s: Time from a failure until training resumes.
        mtbf_s: Mean time between failures of the whole run.

    Raises:
        ValueError: A time is negative or not a number, `interval_s` or `mtbf_s` is 0, or snapshots
            would overlap.
    """
    if not (mtbf_s > 0 and min(cost_s, durable_s, restart_s) >= 0):
        raise ValueError(
            f"mtbf_s={mtbf_s} must be above 0, and the other times must not be negative"
        )
    period = interval_s + cost_s
    if not 0 < interval_s < math.inf or durable_s > period:
        raise ValueError(
            f"a snapshot every {period} s that is durable after {durable_s} s: the interval "
            "does not fit"
        )
    x = period / mtbf_s
    kept = x * math.exp(-x) / -math.expm1(-x) if x else 1.0
    return interval_s / period * kept * math.exp(-(restart_s + durable_s - cost_s) / mtbf_s)
