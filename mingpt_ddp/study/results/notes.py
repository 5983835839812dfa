"""Write notes on a comparison of jobs: how they are ranked, and why results cannot be compared."""

from collections.abc import Hashable, Iterable, Sequence

from mingpt_ddp.config.config import effect_of
from mingpt_ddp.errors import counted
from mingpt_ddp.storage.code_identity import PACKAGE, package_version, recorded_code
from mingpt_ddp.study.results.formats import cut
from mingpt_ddp.study.results.groups import (
    SEED,
    Group,
    accepts_code,
    best_group,
    rivals_of,
    shared_seeds,
    text_of,
)
from mingpt_ddp.study.results.objective import (
    BITS_PER_BYTE,
    LOSS,
    TEXT_KEYS,
    WHY_BITS_PER_BYTE,
    is_text,
    loss_unit,
)
from mingpt_ddp.study.results.runs import (
    RunRecord,
    Value,
    grouped,
    identity,
    known,
    number,
    plain,
    varying,
)

DATA_KEYS = tuple(f"data.{key}" for key in TEXT_KEYS)
# Keys that determine the number and length of the windows on which the loss is measured.
EVALUATION_KEYS = ("trainer.eval_steps", "trainer.batch_size", "data.block_size")
MINUTES = "trainer.max_minutes"
MAX_TIME_RATIO = 1.05  # warn if the longest training time is longer than this times the shortest
TOKENIZER_KEYS = ("data.tokenizer", "data.vocab_size")


def comparison_notes(jobs: list[RunRecord], are_versions: bool = False) -> list[str]:
    """Write notes on an unusual ranking, and on reasons why results cannot be compared.

    Args:
        are_versions: True if the settings are versions of the code.
    """
    objective = jobs[0].ranked_by
    notes = []
    if objective is BITS_PER_BYTE:
        notes.append(f"ranked by {objective.title}: {WHY_BITS_PER_BYTE}")
    if objective is not LOSS:
        lacking = [job.name for job in jobs if job.val_loss is not None and job.value is None]
        if lacking:
            names = cut(", ".join(lacking), 200)
            notes.append(f"these jobs have no {objective.title} and are not ranked: {names}")
    measured = []
    for job in jobs:
        has_data = "data.path" in job.config or "data.dataset" in job.config
        if job.val_loss is not None and has_data:
            measured.append(job)
    if keys := _different_data(measured):
        kind = "texts" if all(is_text(job.config) for job in measured) else "data"
        notes.append(
            f"the jobs were measured on different {kind} ({', '.join(keys)}): their results "
            "cannot be compared"
        )
    if _differing(measured, ("task.name",)):
        notes.append(
            "the jobs have different tasks, each of which defines its own loss (task.name)"
        )
    if keys := _different_evaluation(measured):
        what = "the jobs were measured on different parts of the validation split"
        notes.append(f"{what} ({', '.join(keys)}): their results cannot be compared exactly")
    if not are_versions:
        notes += _code_notes(jobs)
    if mixed := [job.name for job in jobs if "+" in job.code]:
        notes.append(
            "these jobs were trained with more than one version of your code: "
            f"{cut(', '.join(mixed), 200)}"
        )
    steps = {job.step for job in jobs if job.status == "complete" and job.step is not None}
    if len(steps) > 1:
        notes.append(f"the jobs ran {min(steps)} to {max(steps)} steps")
    return notes


def _code_notes(jobs: list[RunRecord]) -> list[str]:
    """Write notes on jobs that were trained by different code."""
    contents = dict[str, set[str]]()
    packages = dict[str, str]()  # by SHA-256
    for record in filter(None, [recorded_code(job.result) for job in jobs]):
        packages[record["package"]["sha256"]] = package_version(record)
        for name, sha256 in record["files"].items():
            contents.setdefault(name, set()).add(sha256)
    notes = []
    if changed := [name for name, hashes in contents.items() if len(hashes) > 1]:
        how = "seeds of different versions are not grouped"
        if accepts_code(jobs):
            how = "run.accept_code=true groups their seeds"
        notes.append(f"the jobs were trained with several versions of {_cut(changed)}: {how}")
    if len(packages) > 1:
        names = packages.values() if len({*packages.values()}) > 1 else packages
        versions = " and ".join(sorted(name[:20] for name in names))
        notes.append(
            f"the jobs were trained with several versions of {PACKAGE.name}, {_cut([versions])}: "
            "their seeds are grouped"
        )
    return notes


def minutes_notes(groups: Sequence[Group]) -> list[str]:
    """Warn if settings with the same trainer.max_minutes trained for different times."""
    notes = []
    for limit, given in grouped(groups, lambda group: number(group.config.get(MINUTES))).items():
        taken = known(group.minutes for group in given)
        if limit is not None and taken and max(taken) > MAX_TIME_RATIO * min(taken):
            notes.append(
                f"the comparison is not at equal time: settings with {MINUTES}={limit:g} trained "
                f"for {min(taken):.3g} to {max(taken):.3g} minutes. The pace of the machine "
                "changed, or another limit ended some jobs"
            )
    return notes


def pooling_notes(groups: list[Group]) -> list[str]:
    """Write notes on the keys, apart from the seed, in which replicates differ."""
    keys = dict[str, None]()
    for group in groups:
        keys |= dict.fromkeys(varying(group.jobs))
    keys.pop(SEED, None)
    rounding = [key for key in keys if effect_of(key) == "rounding"]
    without_effect = [key for key in keys if key not in rounding]
    notes = []
    if without_effect:
        notes.append(f"replicates differ in {_cut(without_effect)}: no loss depends on this")
    if rounding:
        notes.append(
            f"replicates differ in {_cut(rounding)}: the last bits of results depend on this"
        )
    sizes = [{number(job.result.get("world_size")) for job in group.jobs} for group in groups]
    if any(len(each - {None}) > 1 for each in sizes):
        notes.append("replicates ran on different numbers of ranks: results differ by rounding")
    return notes


def diverged_notes(groups: Iterable[tuple[str, Group]]) -> list[str]:
    """Name the diverged seeds of each group.

    Args:
        groups: Pairs of a group's name and the group.
    """
    notes = []
    for name, group in groups:
        if seeds := group.diverged:
            notes.append(
                f"{name} diverged at {len(seeds)} of its {counted(group.n_seeds, 'seed')} "
                f"({_cut(seeds)}), so it has no mean and is not ranked"
            )
    return notes


def best_notes(groups: list[Group]) -> list[str]:
    """Explain why the best group is not the first group, if that is so.

    Args:
        groups: Groups in the order in which `replicates` returns them.
    """
    first, best = groups[0], best_group(groups)
    if best is None or best is first:
        return []
    names = cut(first.name), cut(best.name)
    if first.n_complete < 2:
        return [
            f"{names[0]} has only one seed, so {names[1]}, which has more seeds, is called the best"
        ]
    seeds = len(shared_seeds(rivals_of(groups)))
    return [
        f"{names[0]} has the best mean over all of its seeds, but {names[1]} has the best mean "
        f"over the {seeds} seeds that all settings have"
    ]


def _cut(keys: list[str]) -> str:
    return cut(", ".join(keys), 200)


def _different_data(jobs: list[RunRecord]) -> list[str]:
    """List the keys that show that the jobs were measured on different data."""
    # Different datasets have different keys, so the other keys say nothing more.
    if kinds := _differing(jobs, ("data.dataset",)):
        return kinds
    keys = {*_differing(jobs, DATA_KEYS)}
    texts = {text_of(job) for job in jobs}
    # The text of a job is None if it is not known. Then it may be the same as the other texts.
    if len(texts - {None}) > 1:
        keys |= {"data.sha256"}
    else:
        keys -= {"data.sha256"}
    if len(texts) == 1 and None not in texts:
        keys -= {"data.path"}  # the path does not matter if the content is the same
    if len({_text_format(job) for job in jobs} - {"auto"}) < 2:
        keys -= {"data.format"}
    return [key for key in DATA_KEYS if key in keys]


def _text_format(job: RunRecord) -> Value:
    """Return the format in which a job's text was read, or auto if it is not known."""
    recorded = job.result.get("data")
    if isinstance(recorded, dict) and job.config.get("data.format") == "auto":
        return plain(recorded.get("format", "text"))
    return job.config.get("data.format", "auto")


def _different_evaluation(jobs: list[RunRecord]) -> list[str]:
    """List the keys that make the jobs evaluate different parts of the validation split."""
    if len({_evaluated_part(job) for job in jobs}) < 2:
        return []
    return [EVALUATION_KEYS[0], *_differing(jobs, (*EVALUATION_KEYS[1:], *TOKENIZER_KEYS))]


def _evaluated_part(job: RunRecord) -> Hashable:
    """Return a hashable key of the part of the split that a job evaluates. None means all of it."""
    if job.config.get(EVALUATION_KEYS[0]) is None:
        return None
    steps, batch_size, block_size = (job.config.get(key) for key in EVALUATION_KEYS)
    windows = None
    if isinstance(steps, int) and isinstance(batch_size, int):
        windows = steps * batch_size
    return windows, identity(block_size), loss_unit(job.config, job.directory)


def _differing(jobs: Iterable[RunRecord], keys: Iterable[str]) -> list[str]:
    """List the keys whose values differ between the jobs."""
    differing = []
    for key in keys:
        values = {identity(job.config.get(key)) for job in jobs}
        if len(values) > 1:
            differing.append(key)
    return differing
