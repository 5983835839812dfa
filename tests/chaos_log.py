"""Check the guarantees of a run that is killed repeatedly, by reading rank zero's growing log."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path

HEAD = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ "
KINDS = {
    "begin": r"run (?!error).*",
    "resumed": r"resuming from the snapshot of step (\d+) of",
    "complete": r"complete: the (?:snapshot of|newest snapshot is from the last) step,? (\d+)",
    "step": r"step (\d+)/\d+: ",
    "committed": r"snapshot of step (\d+) committed to ",
    "preempted": r"preempted at step (\d+); ",
    "too late": r"preempted at step (\d+) without time",
    "failed save": r"cannot write the snapshot of step (\d+): .*; training continues",
}


class InvariantError(AssertionError):
    """A guarantee was violated."""


def parse(text: str) -> list[tuple[str, int]]:
    """Return the kind and step of each record in a line of the log.

    There are several if a full disk has cut off the end of a line, so that the next one follows it.
    """
    found = []
    for message in re.split(HEAD, text)[1:]:
        for kind, pattern in KINDS.items():
            if match := re.match(pattern, message):
                found.append((kind, int(match[1]) if match.groups() else 0))
    return found


@dataclass
class LogChecker:
    """Reads the log and keeps its state up to `offset`. All fields can be written as JSON.

    While the disk is full, lines of the log and of the history are lost. The steps that may be
    missing lie between the last snapshot before the disk was full and the snapshot that the next
    attempt resumes from.
    """

    offset: int = 0  # bytes of the log that were read
    attempts: int = 0  # attempts that wrote to the log
    attempt_steps: int = 0  # steps logged by the current attempt
    logged: int = 0  # lines that log a step, over all attempts
    resumed: int = 0  # step that the current attempt resumed from
    last_step: int = 0
    committed: int = 0  # step of the newest committed snapshot
    commits: int = 0
    failed_saves: int = 0  # saves that failed while training continued
    last_kind: str = ""
    cause: str = ""  # the last fault that was meant to end an attempt
    cause_of_attempt: str = ""  # the fault that ended the previous attempt
    full_since: int | None = None  # newest committed step when the disk became full
    unlogged: list[list[int]] = field(default_factory=list)  # first and last step of each gap
    # For each kind of fault: how many steps each restart had to train again.
    lost: dict[str, list[int]] = field(default_factory=dict)

    def read(self, path: Path) -> None:
        """Read and check the complete lines that were added to the log since the last call.

        Raises:
            InvariantError: A guarantee was violated.
        """
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            file.seek(self.offset)
            content = file.read()
            content = content[: content.rfind(b"\n") + 1]
            self.offset += len(content)
            for text in content.decode(errors="replace").splitlines():
                for kind, step in parse(text):
                    self.check_record(kind, step)

    def disk_is_full(self) -> None:
        if self.full_since is None:
            self.full_since = self.committed

    def check_record(self, kind: str, step: int) -> None:
        """Check one record against the records before it."""
        if kind == "begin":
            self.attempts += 1
            self.attempt_steps, self.resumed = 0, 0
            self.cause_of_attempt = self.cause
        elif kind == "resumed":
            self.resumed = step
        elif kind == "step":
            self._take_step(step)
        elif kind == "committed":
            self.committed = step
            self.commits += 1
        elif kind == "failed save":
            self.failed_saves += 1
        else:
            self.last_kind = kind

    def _take_step(self, step: int) -> None:
        if self.attempt_steps == 0 and self.logged:
            self._check_resumed_step()
            lost = max(0, self.last_step - self.resumed)
            self.lost.setdefault(self.cause_of_attempt, []).append(lost)
            self.last_step, self.last_kind = self.resumed, ""
        follows = step == self.last_step + 1
        if not follows and not (self.full_since is not None and step > self.last_step):
            raise InvariantError(f"step {step} was logged after step {self.last_step}")
        self.last_step = step
        self.attempt_steps += 1
        self.logged += 1

    def _check_resumed_step(self) -> None:
        resumed, cause = self.resumed, self.cause_of_attempt
        if resumed < self.committed:
            raise InvariantError(
                f"after '{cause}': from step {resumed}, although step {self.committed} was "
                "committed"
            )
        if self.full_since is not None:
            self.unlogged.append([self.full_since + 1, resumed])
            self.full_since = None
            return
        if resumed > self.last_step:
            raise InvariantError(
                f"after '{cause}': from step {resumed}, although only {self.last_step} were trained"
            )
        if self.last_kind == "preempted" and resumed != self.last_step:
            raise InvariantError(
                f"'{cause}' lost {self.last_step - resumed} steps, although it was reported to "
                "lose none"
            )

    def may_be_missing(self) -> set[int]:
        """Return the steps that the history may lack, because the disk was full."""
        return {step for first, last in self.unlogged for step in range(first, last + 1)}
