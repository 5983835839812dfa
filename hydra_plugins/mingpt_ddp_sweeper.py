"""The sweeper of mingpt_ddp, in the package where Hydra looks for plugins.

Every Hydra application imports this module at every start. It must therefore stay small, and it
registers nothing.
"""

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class JobSweeper(Sweeper):
    """Run the jobs of a sweep: a grid or a search, one after another or concurrently."""

    def __init__(self, params: dict[str, str] | None) -> None:
        """Accept the parameter that Hydra passes. It is not used.

        Args:
            params: Overrides of the sweep. `mingpt_ddp.study.sweeps.preflight` parses them.
        """

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep the objects that Hydra's launchers need."""
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
