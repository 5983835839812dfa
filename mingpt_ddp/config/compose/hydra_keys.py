"""Refuse settings of Hydra that do not work with a run."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from mingpt_ddp.config.validation import check


def check_hydra_keys(config: DictConfig) -> None:
    """Reject Hydra settings that would be ignored or that conflict with run.root and run.name."""
    check(
        not config.hydra.job.chdir,
        "hydra.job.chdir=true would start the jobs outside of run.root; leave it out",
    )
    check(not config.hydra.verbose, "hydra.verbose has no effect here; leave it out")
    # Do not resolve interpolations: some have no value before a job runs.
    hydra: Any = OmegaConf.to_container(config.hydra, resolve=False)
    run, sweep = hydra["run"], hydra["sweep"]
    for key, value, *allowed in (
        ("run.dir", run["dir"], "."),
        ("sweep.dir", sweep["dir"], "${run.root}", str(config.run.root)),
        ("sweep.subdir", sweep["subdir"], "."),
        ("output_subdir", hydra["output_subdir"], None),
    ):
        check(
            value in allowed,
            f"hydra.{key}={value} has no effect here, because run.root and run.name set the run "
            "directory; leave it out",
        )
