"""The keys of the group `sweep`: concurrent jobs, the sampler of a search, and its pruner."""

# ruff: noqa: RUF009  key() returns a dataclass field
from dataclasses import dataclass
from typing import Any, Literal

from mingpt_ddp.config.keys.fields import NonNegativeInt, PositiveFloat, PositiveInt, neutral
from mingpt_ddp.config.validation import check


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """The jobs of a sweep, and when they run (docs/sweeps.md)."""

    parallel: PositiveInt | Literal["auto"] = neutral(
        1,
        "Number of concurrent jobs on this machine. auto runs as many as fit on its GPUs or cores.",
    )
    max_failures: NonNegativeInt | None = neutral(
        None, "Number of failed jobs after which no other job starts. null sets no limit."
    )
    retries: NonNegativeInt = neutral(0, "How often a failed job starts again.")
    zip: list[str] | None = neutral(
        None,
        "Keys whose values change together: the first job has the first value of each key, the "
        "second job the second. null runs all combinations.",
    )
    sampler: Literal["tpe", "gp", "random"] | None = neutral(
        None, "Method that draws the values of a search. null runs all combinations (a grid)."
    )
    sampler_settings: dict[str, Any] | None = neutral(
        None,
        "Settings of the sampler by name. tpe: {n_startup_trials: 10, n_ei_candidates: 24, "
        "multivariate: true, constant_liar: true}. gp: {n_startup_trials: 10, "
        "deterministic_objective: false}.",
    )
    trials: PositiveInt = neutral(20, "Number of jobs of a search.")
    seed: NonNegativeInt = neutral(1, "Seed of the sampler. The jobs use run.seed.")
    metric: str | None = neutral(
        None,
        "Name of a number in result.json, by which jobs are ranked, searched and pruned. NAME "
        "prefers lower values, -NAME higher values. null uses val_loss, or bits_per_byte if the "
        "tokenizers differ.",
    )
    pruner: Literal["none", "median", "asha"] = neutral(
        "none",
        "Method that ends a job of a search early if other jobs have better evaluations.",
    )
    pruner_settings: dict[str, Any] | None = neutral(
        None,
        "Settings of the pruner by name. median: {n_startup_trials: 5, n_warmup_steps: 0, "
        "interval_steps: 1, n_min_trials: 1}. asha: {min_resource: null, reduction_factor: 3,"
        " min_early_stopping_rate: 0, bootstrap_count: 0}, where null stands for "
        "trainer.eval_every.",
    )

    until: Literal["decided"] | None = neutral(
        None,
        "decided trains all settings seed by seed, and stops a setting once its difference "
        "from the first setting is decided. null trains all seeds.",
    )
    care: PositiveFloat | None = neutral(
        None,
        "For sweep.until=decided: a smaller difference in the metric does not matter. null "
        "means that every difference matters.",
    )

    @property
    def is_search(self) -> bool:
        """True if a sampler draws the values of the jobs. False for a grid."""
        return self.sampler is not None

    def __post_init__(self) -> None:
        check(
            self.metric is None or self.metric.strip("-"),
            "sweep.metric is empty; set it to the name of a number in result.json",
        )
        check(
            self.care is None or self.until is not None,
            f"sweep.care={self.care} needs sweep.until=decided; add that, or leave out sweep.care",
        )
        check(
            self.until is None or (not self.is_search and self.pruner == "none"),
            "sweep.until=decided compares the settings of a grid, and does not work with a search; "
            "leave out sweep=optuna, sweep.sampler and sweep.pruner, or leave out sweep.until",
        )
