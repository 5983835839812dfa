"""Expected goodput, the fraction of time that becomes kept progress, in closed form.

All times are in seconds.

Failures are a Poisson process with one in `mtbf_s` on average, during restarts as well. Training
runs for an interval, stalls for `cost_s` while a snapshot is taken, and continues. A failure loses
the training since the start of the last durable snapshot. A restart takes `restart_s`, and begins
again if it fails.
"""

from __future__ import annotations

import math


def goodput(
    interval_s: float, cost_s: float, durable_s: float, restart_s: float, mtbf_s: float
) -> float:
    """Return the expected goodput, 0 to 1.

    With T, C, D, R, M for the arguments in order: after a restart, snapshot k starts at k(T + C) -
    C and is durable D later. The time to the next failure is exponential, so snapshot k lasts with
    probability exp(-(k(T + C) - C + D) / M); each that lasts is worth T. The sum over k is a
    geometric series, and a life yields

        T exp(-(D - C) / M) / (exp((T + C) / M) - 1).

    It takes M until it fails, and a restart that may fail too takes M(exp(R / M) - 1): M exp(R / M)
    together. Hence

        goodput = T / M * exp(-(R + D - C) / M) / (exp((T + C) / M) - 1).

    With D = C this is Daly's model of synchronous saving. D and R are in a factor without T: they
    cost time, but do not change the optimal interval.

    Args:
        interval_s: training between the end of one snapshot's stall and the start of the next
            snapshot.
        cost_s: the stall.
        durable_s: from the start of a snapshot, before its stall, until it survives a failure;
            `cost_s` if synchronous.
        restart_s: from a failure until training resumes.
        mtbf_s: mean time between failures of the whole run.

    Raises:
        ValueError: a time is negative or not a number, `interval_s` or `mtbf_s` is 0, or snapshots
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
