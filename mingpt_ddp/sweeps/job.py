"""One job of a sweep: which it is, whatever job Hydra's state describes meanwhile."""

from dataclasses import dataclass

from mingpt_ddp.config.compose import hydra_utils


@dataclass(frozen=True)
class Job:
    """One job of a sweep."""

    number: int  # from 0
    label: str  # its swept overrides

    @staticmethod
    def current() -> "Job":
        """Return the job that Hydra's state describes."""
        return Job(hydra_utils.job_number(), hydra_utils.job_label())
