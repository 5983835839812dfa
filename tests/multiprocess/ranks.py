"""Run a function on several ranks. Each rank is a process, and they form a gloo process group.

A test passes a function of its module. Every rank calls it with the same keyword arguments, and its
return value comes back as JSON. The processes start quickly, because they are forked from a server
that has already imported torch.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from forked import ROOT, fit_for_tests
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from launching import PATIENCE_S
from omegaconf import DictConfig, OmegaConf
from ports import free_port

from mingpt_ddp.config.builders import run_code
from mingpt_ddp.config.compose.hydra_utils import VERSION_BASE, config_directory
from mingpt_ddp.config.config import Config, from_mapping, to_plain
from mingpt_ddp.config.job import Job

# examples whose presets can be selected
EXAMPLES = [ROOT / "examples" / name for name in ("digits", "toy")]
processes = multiprocessing.get_context("forkserver")
# torch would import the last two later.
processes.set_forkserver_preload(
    ["mingpt_ddp.training.run", "torch._inductor.config", "torch.utils.tensorboard"]
)


def configure(*overrides: str) -> dict[str, Any]:
    """Compose a configuration. Return plain values for `config.from_mapping`.

    Composing presets takes most of the time, so the result is cached. Single keys are then set as
    Hydra sets them.
    """
    words = ["trainer.device=cpu", "trainer.precision=fp32", "ddp.timeout_s=60", *overrides]
    values = [word for word in words if re.match(r"\w+\.", word)]
    config = copy.deepcopy(composed(*(word for word in words if word not in values)))
    for override in OverridesParser.create().parse_overrides(values):
        OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
    return typed(to_plain(config)).to_dict()


def typed(values: dict[str, Any]) -> Config:
    """Return the typed configuration. If it names code of an example, run that code first."""
    if any("code" in keys for keys in values.values()):
        run_code(values, EXAMPLES)
    return from_mapping(values)


@functools.cache
def composed(*presets: str) -> DictConfig:
    with initialize_config_dir(str(config_directory()), **VERSION_BASE):
        return compose("config", [*presets, f"hydra.searchpath={[*map(str, EXAMPLES)]}"])


def train_in_turn(configs: list[dict[str, Any]]) -> list[float]:
    """Train one run after another on this rank, as a sweep does. Return their validation losses."""
    from mingpt_ddp.distributed.runtime import Runtime
    from mingpt_ddp.process.env import read_env
    from mingpt_ddp.training.run import train_run

    losses = []
    for job, values in enumerate(configs):
        config = typed(values)
        runtime = Runtime(config, read_env(), job)
        losses.append(train_run(Job(config), runtime)["loss"])
        runtime.close()
        del runtime
    return losses


class Ranks:
    """Some or all ranks of a running job.

    Ranks that are still alive at the end of the `with` block are killed.
    """

    def __init__(
        self,
        world_size: int,
        work: Callable[..., Any],
        directory: Path,
        port: int | None = None,
        agent: bool = False,
        only: Iterable[int] | None = None,
        **arguments: Any,
    ) -> None:
        """
        Args:
            directory: Folder for the results and the output of the ranks.
            port: Port of the job's key-value store on this machine. By default a free port.
            agent: The store exists already and outlives the ranks, like the store of an elastic
                agent. Otherwise rank zero hosts it.
            only: The ranks to start. By default all of them.
        """
        directory.mkdir(parents=True, exist_ok=True)
        job = {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port or free_port()),
            "TORCHELASTIC_USE_AGENT_STORE": str(agent),
        }
        call = (inspect.getfile(work), work.__name__, arguments)
        self.outputs = {
            rank: directory / f"rank{rank}"
            for rank in (range(world_size) if only is None else only)
        }
        self.processes = {
            rank: processes.Process(
                target=_run_rank, args=({**job, "RANK": str(rank)}, output, *call), daemon=True
            )
            for rank, output in self.outputs.items()
        }
        for process in self.processes.values():
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.kill(*self.processes)

    def kill(self, *ranks: int) -> None:
        """Kill these ranks by SIGKILL, and wait until they have exited."""
        for rank in ranks:
            self.processes[rank].kill()
        for rank in ranks:
            self.processes[rank].join()

    def printed(self) -> str:
        return "\n".join(
            f"rank {r}: {o.with_suffix('.txt').read_text()}" for r, o in self.outputs.items()
        )

    def results(self, timeout: float = PATIENCE_S) -> list[Any]:
        """Wait until all ranks have exited with code 0. Return their results."""
        deadline = time.monotonic() + timeout
        while any(process.is_alive() for process in self.processes.values()):
            failed = any(process.exitcode not in (None, 0) for process in self.processes.values())
            if failed or time.monotonic() > deadline:
                time.sleep(1.0)  # gives the other ranks time to report their errors
                break
            time.sleep(0.01)
        codes = {rank: process.exitcode for rank, process in self.processes.items()}
        self.kill(*self.processes)
        assert set(codes.values()) == {0}, f"exit codes {codes}\n{self.printed()}"
        return [
            json.loads(output.with_suffix(".json").read_text()) for output in self.outputs.values()
        ]


def run_ranks(
    world_size: int, work: Callable[..., Any], directory: Path, **arguments: Any
) -> list[Any]:
    """Run `work` on every rank. Return the results in rank order."""
    with Ranks(world_size, work, directory, **arguments) as ranks:
        return ranks.results()


def _run_rank(
    environment: dict[str, str], output: Path, file: str, name: str, arguments: dict[str, Any]
) -> None:
    """Run the function in this process, as one rank."""
    import torch

    with open(output.with_suffix(".txt"), "w") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    os.environ.update(environment, LOCAL_RANK=environment["RANK"])
    torch.set_num_threads(1)
    fit_for_tests()
    spec = importlib.util.spec_from_file_location("work", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = getattr(module, name)(**arguments)
    output.with_suffix(".json").write_text(json.dumps(result))
