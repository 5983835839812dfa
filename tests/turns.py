"""Run many ranks in one process, as threads that take turns by a simulated clock.

One thread runs at a time, until it sleeps or waits. Then the clock jumps to the time of the next
thread that is due, and that thread runs. So a run of hundreds of ranks does not depend on the load
of the machine. It takes only the time of its actual work.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

# It has as many digits as time.monotonic(), since messages contain times as text.
BEGAN_AT = 123456.789012345


class Stuck(RuntimeError):
    """All ranks wait, and none of them can continue."""


class _Task:
    """The work of a rank, its thread and its result."""

    def __init__(self, rank: int, work: Callable[[], Any]) -> None:
        self.rank = rank
        self.work = work
        self.turn = threading.Semaphore(0)
        self.pauses = 0  # number of pauses; an entry of the queue from an earlier pause is ignored
        self.waits_for: Hashable = None
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None


class Turns:
    """The simulated clock, and the order in which the ranks run."""

    def __init__(self) -> None:
        self.now = BEGAN_AT
        self._local = threading.local()
        # Numbers the entries of the queue, so that threads due at the same time keep their order.
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, _Task, int]] = []
        self._waiting: dict[Hashable, list[_Task]] = defaultdict(list)
        self._tasks: list[_Task] = []
        self._is_stuck = False

    @property
    def rank(self) -> int:
        """Rank of the current thread."""
        rank: int = self._local.task.rank
        return rank

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call each function in its own thread. The index of a function is its rank.

        Returns:
            The results in the order of ranks.

        Raises:
            Exception: The error of the lowest rank that failed by itself.
            Stuck: All remaining ranks wait.
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
        """Let the other ranks run for this time. In a thread of no rank, return at once."""
        task = getattr(self._local, "task", None)
        if task is None:
            return
        self._schedule(task, self.now + seconds)
        self._pause(task)

    def wait(self, topic: Hashable, until: float | None = None) -> bool:
        """Wait for the next `notify` of a topic.

        Args:
            topic: The topic.
            until: Time by the simulated clock at which to stop waiting. None waits without a limit.

        Returns:
            True if the topic was notified in time.
        """
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
        """Wake all ranks that wait for a topic. Each runs when it is its turn."""
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
                continue  # the thread was already woken
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
