"""How much each parameter matters for the objective, by an evaluator of Optuna."""

from typing import Any

from mingpt_ddp.errors import ConfigError
from mingpt_ddp.results.formats import is_logarithmic, shown
from mingpt_ddp.results.groups import Group
from mingpt_ddp.results.runs import Value, known, number

LEAST_GROUPS = 10  # that are complete
BEST = 5  # groups, at least, that count as good: Optuna's advice


def importances(groups: list[Group], keys: list[str]) -> dict[str, float]:
    """Return the share of each parameter, the largest first; {} without Optuna or enough groups.

    PED-ANOVA (Watanabe et al., 2023) compares the values of the best groups, a tenth or BEST of
    them, with those of all. It needs no scikit-learn.

    Args:
        keys: the parameters in which the groups differ.
    """
    complete = [group for group in groups if group.objective is not None]
    keys = [key for key in keys if any(key in group.config for group in complete)]
    if len(complete) < LEAST_GROUPS or len(keys) < 2:
        return {}
    try:
        from mingpt_ddp.results.optuna_library import no_warnings, optuna
    except ConfigError:  # none, or one too old
        return {}
    with no_warnings():
        study = optuna.create_study()
        distributions = {}
        for key in keys:
            values = [group.config[key] for group in complete if key in group.config]
            distributions[key] = _distribution(values)
        for group in complete:
            cost = group.ranked_by.cost(group.objective or 0.0)
            searched = {key: each for key, each in distributions.items() if key in group.config}
            params = {}
            for key, each in searched.items():
                value = group.config[key]
                params[key] = shown(value) if hasattr(each, "choices") else number(value)
            study.add_trial(optuna.create_trial(params=params, distributions=searched, value=cost))
        quantile = max(0.1, BEST / len(complete))
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=quantile)
        return {**optuna.importance.get_param_importances(study, evaluator=evaluator)}


def _distribution(values: list[Value]) -> Any:
    """Return the range of a parameter's numbers, logarithmic as in the plots; or its choices."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    numbers = known(map(number, values))
    if len(numbers) < len(values):
        return CategoricalDistribution([*dict.fromkeys(map(shown, values))])
    low, high = min(numbers), max(numbers)
    return FloatDistribution(low, high, log=is_logarithmic(low, high))
