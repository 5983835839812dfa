"""Inject faults of an S3 server and of its network at random moments, from a thread."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from fault_proxy import Fault, FaultProxy, Rule
from s3_server import SeaweedServer

KINDS = {
    "store killed": 2,
    "errors 503": 2,
    "resets": 2,
    "stalls": 2,
    "answers lost": 2,
    "answers late": 1,
}
# The kernel kills the server when the thread that started it ends, so this thread must not end.
server_thread = ThreadPoolExecutor(1, "starter")


def deck(generator: random.Random, kinds: dict[str, int]) -> Iterator[str]:
    """Yield kinds forever, in shuffled rounds. A round has each kind as often as `kinds` says."""
    while True:
        shuffled = [kind for kind, count in kinds.items() for _ in range(count)]
        generator.shuffle(shuffled)
        yield from shuffled


class StoreFaults:
    """A thread that injects one fault after another until `stop` is called."""

    def __init__(self, server: SeaweedServer, seed: str, count: Callable[[str], None]) -> None:
        """
        Args:
            count: Called with the kind of each fault.
        """
        self.server, self.count = server, count
        self.generator = random.Random(f"store {seed}")
        self.proxy = FaultProxy(server.port, self.generator.getrandbits(32))
        # The server is not killed while this lock is held.
        self.lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._inject, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the current fault, and inject no more of them."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.proxy.heal()

    def close(self) -> None:
        self.stop()
        self.proxy.close()

    def _inject(self) -> None:
        generator = self.generator
        kinds = deck(generator, KINDS)
        while not self._stopped.wait(generator.uniform(0.2, 2)):
            kind = next(kinds)
            self.count(kind)
            if kind == "store killed":
                self._kill_server()
                continue
            self.proxy.rules = self._rules(kind)
            self._stopped.wait(generator.uniform(0.5, 2.5))
            self.proxy.heal()

    def _kill_server(self) -> None:
        with self.lock:
            self.server.kill()
            self._stopped.wait(self.generator.uniform(0, 3))
            server_thread.submit(self.server.start).result()

    def _rules(self, kind: str) -> list[Rule]:
        generator = self.generator
        options = {"times": float("inf"), "probability": generator.uniform(0.2, 0.7)}
        if kind == "errors 503":
            return [Rule(".", Fault.STATUS, **options)]
        if kind == "resets":
            after = generator.randint(0, 20_000)
            return [
                Rule("^PUT", Fault.RESET_SENDING, after=after, **options),
                Rule("^GET", Fault.RESET_ANSWERING, after=after, **options),
                Rule(".", Fault.RESET_BEFORE, times=3),
            ]
        if kind == "stalls":
            return [
                Rule("^PUT", Fault.STALL_SENDING, after=100, times=2),
                Rule(".", Fault.STALL, times=2),
            ]
        if kind == "answers late":
            return [Rule(".", Fault.DELAY, seconds=generator.uniform(0.1, 1), **options)]
        return [Rule("^(PUT|DELETE|POST)", Fault.RESET_UNANSWERED, **options)]
