"""Print what each strategy communicates in a step, and what its host waits for.

python tests/fake_gpu/table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fake_gpu.checks import collectives_per_step, job_of
from fake_gpu.guard import missing_requirement
from fake_gpu.process import answers, result_of
from fake_gpu.strategies import STRATEGIES


def main() -> None:
    reason = missing_requirement()
    if reason:
        sys.exit(reason)
    print("| strategy | collectives of a step | KiB | host waits in a step |\n|---|---|---|---|")
    found = answers([job_of(case) for case in STRATEGIES.values()])
    for name, answer in zip(STRATEGIES, found, strict=True):
        result = result_of(answer)
        sent = collectives_per_step(result)
        counts = ", ".join(f"{count} {kind}" for kind, (count, _) in sent.items())
        size = sum(size for _, size in sent.values()) / 1024
        print(f"| {name} | {counts} | {size:,.0f} | {sum(result['waits']['steps'].values())} |")


if __name__ == "__main__":
    main()
