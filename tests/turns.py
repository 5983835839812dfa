"""Many ranks in one process: threads that take turns, by a clock that jumps.

One thread runs at a time, until it sleeps or waits. Then the next one that is due runs, and the
clock is set to its time. So a run of hundreds of ranks is the same every time, whatever the load of
the machine, and takes as long as its work alone.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

BEGAN_AT = 123456.789012345  # as many digits as time.monotonic() has, for what writes it as text


class Stuck(RuntimeError):
    """All ranks wait, and none of them can go on."""


class _Task:
    """A rank's thread."""

    def __init__(self, rank: int, work: Callable[[], Any]) -> None:
        self.rank = rank
        self.work = work
        self.turn = threading.Semaphore(0)
        self.pauses = 0  # tells entries of the queue from those of an earlier pause
        self.waits_for: Hashable = None
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None


class Turns:
    """The clock, and whose turn it is."""

    def __init__(self) -> None:
        self.now = BEGAN_AT
        self._local = threading.local()
        self._numbers = itertools.count()  # threads that are due at the same time keep their order
        self._due: list[tuple[float, int, _Task, int]] = []
        self._waiting: dict[Hashable, list[_Task]] = defaultdict(list)
        self._tasks: list[_Task] = []
        self._is_stuck = False

    @property
    def rank(self) -> int:
        """The rank of the current thread."""
        rank: int = self._local.task.rank
        return rank

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call each in a thread of its own, in the order of ranks; return their results.

        Raises:
            Exception: the error of the lowest rank that failed by itself.
            Stuck: all ranks that are left wait.
        """
        self._tasks = [_Task(rank, work) for rank, work in enumerate(works)]
        self._waiting.clear()
        self._is_stuck = False
        threads = []
        for task in self._tasks:
            self._schedule(task, self.now)
            threads.append(threading.Thread(target=self._play, args=(task,), daemon=True))
        for thread in threads:
            thread.start()
        self._next_turn()
        for thread in threads:
            thread.join()
        errors = [task.error for task in self._tasks if task.error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, Stuck)):
            raise error
        return [task.result for task in self._tasks]

    def sleep(self, seconds: float) -> None:
        """Let the others run for that time; a thread that is no rank's goes on at once."""
        task = getattr(self._local, "task", None)
        if task is None:
            return
        self._schedule(task, self.now + seconds)
        self._pause(task)

    def wait(self, topic: Hashable, until: float | None = None) -> bool:
        """Wait for the next `notify`; return whether it came before a time of the clock."""
        task: _Task = self._local.task
        task.waits_for = topic
        self._waiting[topic].append(task)
        if until is not None:
            self._schedule(task, until)
        self._pause(task)
        if task in self._waiting[topic]:
            self._waiting[topic].remove(task)
            return False
        return True

    def notify(self, topic: Hashable) -> None:
        """Let all that wait for it run, once it is their turn."""
        for task in self._waiting.pop(topic, []):
            self._schedule(task, self.now)

    def _schedule(self, task: _Task, at: float) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), task, task.pauses))

    def _pause(self, task: _Task) -> None:
        self._next_turn()
        task.turn.acquire()
        task.pauses += 1
        if self._is_stuck:
            raise Stuck(f"rank {task.rank} waits for {task.waits_for}")

    def _next_turn(self) -> None:
        while self._due:
            at, _, task, pauses = heapq.heappop(self._due)
            if task.is_done or pauses != task.pauses:
                continue  # woken already
            self.now = max(self.now, at)
            task.turn.release()
            return
        self._is_stuck = True
        for task in self._tasks:
            if not task.is_done:
                task.turn.release()

    def _play(self, task: _Task) -> None:
        task.turn.acquire()
        task.pauses += 1
        self._local.task = task
        try:
            if not self._is_stuck:
                task.result = task.work()
        except BaseException as error:
            task.error = error
        finally:
            task.is_done = True
            if not self._is_stuck:
                self._next_turn()
