"""The sweeper of mingpt_ddp, where Hydra looks for sweepers.

Every Hydra application imports this module at every start. It therefore registers nothing.
"""

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class JobSweeper(Sweeper):
    """Run the jobs of a sweep: a grid or a search, one after another or several concurrently."""

    def __init__(self, params: dict[str, str] | None) -> None:
        """
        Args:
            params: Overrides of the sweep, which `mingpt_ddp.study.sweeps.preflight` has parsed.
        """

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what Hydra's launchers need."""
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def sweep(self, arguments: list[str]) -> None:
        """Run all jobs. `Preflight` has parsed their overrides, so `arguments` is not used."""
        from mingpt_ddp.cli.hydra_callbacks import started_sweep
        from mingpt_ddp.study.sweeps.sweeper import run_jobs

        sweep = started_sweep()
        assert sweep is not None, "the callback of this package was replaced"
        task = self.task_function
        run_jobs(sweep, self.hydra_context, task, self.config)
