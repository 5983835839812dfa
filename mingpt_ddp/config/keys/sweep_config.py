"""The keys of the group `sweep`: how many jobs at once, what draws them, what ends them early."""

# ruff: noqa: RUF009  key() returns a dataclass field
from dataclasses import dataclass
from typing import Any, Literal

from mingpt_ddp.config.keys.fields import NonNegativeInt, PositiveFloat, PositiveInt, neutral
from mingpt_ddp.config.validation import check


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Which jobs a sweep has, and when they run (docs/sweeps.md)."""

    parallel: PositiveInt | Literal["auto"] = neutral(
        1, "jobs at a time on this machine; auto: as many as its GPUs or cores hold"
    )
    max_failures: NonNegativeInt | None = neutral(
        None, "failed jobs after which no other starts; null: any number"
    )
    retries: NonNegativeInt = neutral(0, "how often a failed job is started again")
    zip: list[str] | None = neutral(
        None, "keys whose values change together, the first with the first; null: all combinations"
    )
    sampler: Literal["tpe", "gp", "random"] | None = neutral(
        None, "draws the values of a search; null: all combinations, a grid"
    )
    sampler_settings: dict[str, Any] | None = neutral(
        None,
        "settings of the sampler by name; tpe: {n_startup_trials: 10, n_ei_candidates: 24, "
        "multivariate: true, constant_liar: true}; gp: {n_startup_trials: 10, "
        "deterministic_objective: false}",
    )
    trials: PositiveInt = neutral(20, "jobs of a search")
    seed: NonNegativeInt = neutral(1, "of the sampler; run.seed is that of the jobs")
    metric: str | None = neutral(
        None,
        "number of result.json by which jobs are ranked, searched and pruned; NAME: lower is "
        "better; -NAME: higher is better; null: val_loss, or bits_per_byte if tokenizers differ",
    )
    pruner: Literal["none", "median", "asha"] = neutral(
        "none", "ends jobs of a search whose evaluations are worse than those of others"
    )
    pruner_settings: dict[str, Any] | None = neutral(
        None,
        "settings of the pruner by name; median: {n_startup_trials: 5, n_warmup_steps: 0, "
        "interval_steps: 1, n_min_trials: 1}; asha: {min_resource: null, reduction_factor: 3, "
        "min_early_stopping_rate: 0, bootstrap_count: 0}, null: trainer.eval_every",
    )

    until: Literal["decided"] | None = neutral(
        None,
        "decided: train the seeds of all settings one after another, and no more seeds of a "
        "setting once its difference from the first one is decided; null: train all",
    )
    care: PositiveFloat | None = neutral(
        None,
        "a smaller difference in the metric does not matter, and ends sweep.until=decided; null: "
        "each difference matters",
    )

    @property
    def is_search(self) -> bool:
        """Whether a sampler draws the values of the jobs; else they are a grid."""
        return self.sampler is not None

    def __post_init__(self) -> None:
        check(
            self.metric is None or self.metric.strip("-"),
            "sweep.metric is empty; name a number of result.json",
        )
        check(
            self.care is None or self.until is not None,
            f"sweep.care={self.care} is used by sweep.until=decided only: add it, or leave it out",
        )
        check(
            self.until is None or (not self.is_search and self.pruner == "none"),
            "sweep.until=decided compares the settings of a grid; leave out sweep=optuna, "
            "sweep.sampler and sweep.pruner, or sweep.until",
        )
