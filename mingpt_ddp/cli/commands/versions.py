"""Train versions of the code with the same seeds, and say which is better, faster, or the same.

    python -m mingpt_ddp versions main . model=gpt_nano trainer.max_steps=500 run.seed=1,2,3,4,5
    python -m mingpt_ddp versions HEAD~1 HEAD run.seed=1,2 trainer.max_steps=50 require=same_bits

A B ...      commits or branches of the checkout here, or directories; . is the code as it is now. Write ./main for a
             directory with the name of a branch. Each is compared with the first
key=value    as for training, the same for all; --config-dir=DIR and absolute paths of code below this checkout lead to
             the files of each version. All other paths, data and outputs are as you type them here
run.seed     two seeds or more, with a comma between them; one is enough for same_bits
require      exit with code 1 unless all have same_bits, or none is worse (not_worse) by more than chance; the last line says why

Jobs run in turn, A B B A A B, which is fair to all on a machine that becomes slower. The same command goes on after a kill, and
trains no job twice; other code, also in . since, or another configuration is another comparison.

Says how the loss differs (paired by seed from three seeds on, with interval and p, corrected by Holm for several versions), how the
speed does (median time of a step; time from the first step to the end), and whether the last weights and optimizer states have the same bits.
Adds the verdict to outputs/experiments.jsonl; the runs are in outputs/versions-HASH/NUMBER-VERSION,run.seed=N.
"""  # noqa: E501

import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from mingpt_ddp.cli.arguments import answer
from mingpt_ddp.cli.code_version import Version, find_commit, find_version
from mingpt_ddp.config.compose.hydra_utils import hydra_value
from mingpt_ddp.config.job import RunStatus
from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.config.validation import check, refuse_credentials
from mingpt_ddp.distributed.root_cause import cli_errors
from mingpt_ddp.errors import RunError, UserError
from mingpt_ddp.interrupts import raise_interrupts
from mingpt_ddp.results.analysis.compare import Setting
from mingpt_ddp.results.analysis.version_verdict import Against, version_verdict
from mingpt_ddp.results.experiments import record
from mingpt_ddp.results.objective import TEXT_KEYS
from mingpt_ddp.results.runs import read_jobs
from mingpt_ddp.storage.code_identity import PACKAGE, changed_files, describe, recorded_code
from mingpt_ddp.storage.lease import LockedError
from mingpt_ddp.storage.lock import acquire_lock
from mingpt_ddp.storage.run_directory import difference, read_result
from mingpt_ddp.storage.yaml_and_json import read_yaml
from mingpt_ddp.terminal import echo, echo_error

OWN_KEYS = ("run.seed", "require")
SEEDS = range(2**63)
WORDS_OF_A_JOB = ("run.seed", "run.root", "run.name")
REQUIREMENTS = (None, "same_bits", "not_worse")
NOT_IN_NAMES = re.compile(r"[^\w.+-]+", re.ASCII)  # characters that names of directories lack
REFUSED = re.compile(r"-m$|--multirun$|\+*(run\.(name|resume)|hydra\.searchpath)=")


@dataclass(frozen=True)
class VersionRun:
    """A version that trains with a seed, in a run directory."""

    version: Version
    words: list[str]
    directory: Path
    config: dict[str, Any]  # the configuration that is composed without these words

    @property
    def result(self) -> dict[str, Any]:
        return read_result(self.directory)

    @property
    def code(self) -> str:
        """The code that trained it, as `report` shows it.

        An earlier package may have recorded none. Then it is the code of the version.
        """
        return describe(recorded_code(self.result) or self.version.code.record)


def main() -> None:
    """Run `python -m mingpt_ddp versions`."""
    with cli_errors():
        if text := answer(__doc__, sys.argv[1:]):
            echo(text)
            return
        raise_interrupts()  # so that the running job ends too
        sys.exit(_command(sys.argv[1:]))


def _command(words: list[str]) -> int:
    names = [*itertools.takewhile(lambda word: word[:1] != "-" and "=" not in word, words)]
    own, others = _split(words[len(names) :])
    for name in names:
        refuse_credentials("the name of a version", name)
    for word in words[len(names) :]:
        is_path = "=" in word and os.path.isdir(word)
        check(not is_path, f"{word} cannot be a version, as it has a = in its path; name a link")
    check(len(names) > 1, "name two versions of the code or more: commits or directories")
    required = own.get("require")
    check(required in REQUIREMENTS, f"require={required} must be same_bits or not_worse")
    seeds = _parse_seeds(own.get("run.seed", ""), 1 if required == "same_bits" else 2)
    commits = [find_commit(name) for name in names]
    versions = [find_version(*each, others) for each in zip(names, commits, strict=True)]
    root, name, configs = _compose(versions)
    trials: dict[str, list[VersionRun]] = {}
    for number, (version, config) in enumerate(zip(versions, configs, strict=True), 1):
        label = version.name if names.count(version.name) == 1 else f"{number}: {version.name}"
        trials[label] = []
        for seed in seeds:
            directory = (
                root / name / f"{number}-{NOT_IN_NAMES.sub('_', version.name)},run.seed={seed}"
            )
            words = [f"run.seed={seed}", f"run.root={hydra_value(str(root))}"]
            words.append(f'run.name="{name}/{directory.name}"')
            trials[label].append(VersionRun(version, words, directory, config))
    with _lock(root / name):
        _train([*zip(*trials.values(), strict=True)])
        verdicts, document, text = version_verdict(_settings(trials), _digests(trials))
    recorded = {label: each[0].code for label, each in trials.items()}
    runs = str(root / name)
    record(root, {"runs": [runs], "versions": recorded, "overrides": others, **document})
    echo(f"{text}\nthe runs are in {runs}")
    why = _why_unmet(required, verdicts)
    if why:
        echo(f"require={required}: {why}")
    return int(bool(why))


def _why_unmet(required: str | None, verdicts: list[Against]) -> str:
    """Return the reason if a requirement is not met, else ""."""
    if required == "same_bits" and not all(each.has_same_bits for each in verdicts):
        return "the bits differ"
    if required == "not_worse" and any(each.is_worse for each in verdicts):
        worse = ", ".join(each.other.label for each in verdicts if each.is_worse)
        return f"worse by more than chance, or nothing can be said: {worse}"
    return ""


def _split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of OWN_KEYS, and the words that train."""
    values = {}
    others = []
    for word in words:
        key, _, value = word.removeprefix("--").partition("=")
        check(not REFUSED.match(word), f"{word} does not go with versions; leave it out")
        refuse_credentials(key, value)
        if key in OWN_KEYS:
            values[key] = value
        else:
            one = "one setting in a comparison: give one value, or several of run.seed"
            check(not _is_sweep(word), f"{word} is a sweep; there is {one}")
            others.append(word)
    return values, others


def _is_sweep(word: str) -> bool:
    """Return True if a word is an override with several values."""
    with contextlib.suppress(HydraException):  # it is a flag, or Hydra will say what is wrong
        return bool(OverridesParser.create().parse_override(word).is_sweep_override())
    return False


def _parse_seeds(text: str, least: int) -> list[int]:
    """Return the seeds.

    Raises:
        ConfigError: one is too large, or there are too few: one says nothing about chance.
    """
    words = text.split(",")
    are_short = all(word.isdecimal() and len(word) <= len(str(SEEDS.stop)) for word in words)
    seeds = {*map(int, words)} if are_short else set()
    check(all(seed in SEEDS for seed in seeds), f"run.seed={text:.100} has one of 2**63 or more")
    advice = "one says nothing about chance, as in run.seed=1,2,3,4,5"
    check(len(seeds) >= least, f"run.seed={text:.100} must be several seeds: {advice}")
    return sorted(seeds)


def _compose(versions: list[Version]) -> tuple[Path, str, list[dict[str, Any]]]:
    """Return the run.root of the first version, a directory for all, and the configurations.

    Raises:
        UserError: a version refuses the words.
    """
    composed = [version.compose() for version in versions]
    configs = [*map(yaml.safe_load, composed)]
    compared = []
    for version, yaml_text, config in zip(versions, composed, configs, strict=True):
        code = version.code
        compared.append([code.record, code.patch.hex(), yaml_text, _text_sha256(config["data"])])
    digest = hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()[:8]
    return Path(configs[0]["run"]["root"]), f"versions-{digest}", configs


def _text_sha256(data: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a text as it is now. Return "" if only the version's code can read it.

    With data.reader, this is the SHA-256 of the files that the reader reads.
    """
    from mingpt_ddp.data.prepare import sha256_of_text

    values = {key: data[key] for key in TEXT_KEYS if data.get(key) is not None}
    if values.pop("reader", None):
        values["format"] = "text"
    try:
        return sha256_of_text(DataConfig(**values))
    except UserError:  # the jobs say what is wrong, unless their version can read it
        return ""


def _lock(directory: Path) -> IO[str]:
    """Lock a comparison.

    Raises:
        RunError: another process trains it.
    """
    try:
        return acquire_lock(directory, 0.0, what="the directory of the comparison")
    except LockedError as error:
        raise LockedError(directory, error.owner, "wait for it, then run this again") from error


def _train(rounds: list[tuple[VersionRun, ...]]) -> None:
    """Train what is not complete, the trials of each seed in turn: A B, B A, A B ...

    Raises:
        UserError: a job has failed, or has trained with another code or configuration than its
            version, or on another text than the job before it.
    """
    order = list[VersionRun]()
    for number, trials in enumerate(rounds):
        order += trials[:: -1 if number % 2 else 1]
    texts = dict[str, Any]()  # the recorded SHA-256, by version
    for number, trial in enumerate(order, 1):
        if trial.result.get("status") != RunStatus.COMPLETE:
            what = f"{trial.version.name}, {trial.words[0]}"
            trial.version.check_unchanged()
            echo_error(f"job {number} of {len(order)}: {what}")
            trial.version.train(trial.words)
            loss, seconds = trial.result.get("val_loss"), trial.result.get("wall_seconds")
            echo_error(f"job {number}: validation loss {loss} after {seconds} s")
        if trial.result.get("status") != RunStatus.COMPLETE:
            raise RunError(f"{trial.directory} is not complete; run the same command to go on")
        _check_code(trial)
        _check_config(trial)
        recorded = trial.result.get("data")
        if texts.setdefault(str(trial.version.directory), recorded) != recorded:
            raise RunError(
                f"{trial.directory} was trained on another text than the jobs of "
                f"{trial.version.name} before it; run the same command again to compare on the text"
            )


def _check_code(trial: VersionRun) -> None:
    """Check that a job was trained by the code that its version has now.

    Files of the user outside of the version, such as a library, must not have changed either.

    Raises:
        RunError: It was trained by other code.
    """
    code = recorded_code(trial.result)
    if not code:  # an earlier version of the package has trained it
        return
    version = trial.version
    own = {*version.code.record["files"].values()}
    others = {name: sha256 for name, sha256 in code["files"].items() if sha256 not in own}
    here = Path.cwd()
    changed = {*changed_files({"files": others})}
    for name in others:
        path = Path(name).resolve()
        if path.is_relative_to(here) and not path.is_relative_to(version.directory):
            changed.add(name)
    if code["package"]["sha256"] != version.code.record["package"]["sha256"]:
        changed.add(PACKAGE.name)
    if changed or code.get("earlier"):
        version.check_unchanged()
        names = ", ".join(sorted(changed)) or "several versions of it have"
        raise RunError(
            f"{trial.directory} was not trained by the code of {version.name} ({names:.200}): "
            "restore that, or delete the directory and run this again"
        )


def _check_config(trial: VersionRun) -> None:
    """Check that a job has trained with the configuration of its version, in all its starts."""
    directory = trial.directory
    try:
        recorded = read_yaml(directory / ".hydra" / "config.yaml")
    except (OSError, ValueError):  # a copy may lack hidden files
        return
    changes = difference(trial.config, recorded, WORDS_OF_A_JOB)
    if changes or any(directory.glob("config.*.yaml")):
        what = "; ".join(changes) or "it has config.2.yaml"
        raise RunError(
            f"{directory} was not trained with the configuration of {trial.version.name} ({what}): "
            "files of that have changed since; delete the directory, or compare commits"
        )


def _settings(trials: dict[str, list[VersionRun]]) -> list[Setting]:
    """Return the jobs of each version as a setting."""
    jobs = {}
    for job in read_jobs([trial.directory for each in trials.values() for trial in each]):
        jobs[job.directory] = job
    settings = []
    for label, trials_of_version in trials.items():
        replicates = [jobs[trial.directory] for trial in trials_of_version]
        settings.append(Setting(replicates, replicates[0].config, label))
    return settings


def _digests(trials: dict[str, list[VersionRun]]) -> dict[Path, str]:
    """Return the SHA-256 of the last weights and optimizer states, by run directory."""
    from mingpt_ddp.snapshots.format import WEIGHT_KINDS
    from mingpt_ddp.snapshots.hashes import hash_snapshot
    from mingpt_ddp.snapshots.read.load import load

    digests = {}
    for trial in itertools.chain(*trials.values()):
        hashes = hash_snapshot(load(str(trial.directory), WEIGHT_KINDS))
        digests[trial.directory] = json.dumps(hashes)
    return digests
