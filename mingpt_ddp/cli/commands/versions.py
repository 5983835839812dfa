"""Train versions of the code with the same seeds, and say which is better, faster, or the same.

    python -m mingpt_ddp versions main . model=gpt_nano trainer.max_steps=500 run.seed=1,2,3,4,5
    python -m mingpt_ddp versions HEAD~1 HEAD run.seed=1,2 trainer.max_steps=50 require=same_bits

A B ...      commits or branches of the checkout here, or directories; . is the code as it is now. Write ./main for a
             directory that is named like a branch. All others are compared with the first
key=value    as for training, and the same for all versions. --config-dir=DIR and absolute paths of code inside this
             checkout are replaced by the same paths in each version. All other paths are used as you type them
run.seed     two seeds or more, with a comma between them; one is enough for require=same_bits
until        decided: train the seeds one after another, and stop when each version is decided to be better, worse, or
             different by less than care (in the unit of the loss). With too few seeds nothing can be decided: give 12
require      same_bits or not_worse (by more than chance). Exit with code 1 if a version does not meet it; the last line
             says why

Jobs run one after another in the order A B B A A B, which is fair to all on a machine that becomes slower. After a kill,
the same command goes on, and trains no job twice. If the code (also that of .) or the configuration has changed since, the
same command begins another comparison.

The verdict says how the loss differs: paired by seed if there are at least three, with interval and p, corrected by Holm for
several versions. It says how the speed differs: median time of a step, and time from the first step to the end. And it says
whether the last weights and optimizer states have the same bits. It is added to outputs/experiments.jsonl; the runs are in
outputs/versions-HASH/NUMBER-VERSION,run.seed=N.
"""  # noqa: E501

import contextlib
import itertools
import math
import os
import re
import sys

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from mingpt_ddp.cli.arguments import answer
from mingpt_ddp.config.validation import check, refuse_credentials
from mingpt_ddp.process.interrupts import raise_interrupts
from mingpt_ddp.process.root_cause import cli_errors
from mingpt_ddp.process.terminal import echo
from mingpt_ddp.study.versions.comparison import compare_versions

OWN_KEYS = ("run.seed", "require", "until", "care")
SEEDS = range(2**63)
REQUIREMENTS = (None, "same_bits", "not_worse")
REFUSED = re.compile(r"-m$|--multirun$|\+*(run\.(name|resume)|hydra\.searchpath)=")


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
    until = own.get("until")
    check(until in (None, "decided"), f"until={until} must be decided, or leave it out")
    care = _parse_care(own["care"]) if "care" in own else None
    check(care is None or until is not None, "care is used by until=decided only; add it")
    text, is_met = compare_versions(names, seeds, others, required, until is not None, care)
    echo(text)
    return int(not is_met)


def _split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of OWN_KEYS by key, and the other words, which train."""
    values = {}
    others = []
    for word in words:
        key, _, value = word.removeprefix("--").partition("=")
        check(not REFUSED.match(word), f"{word} does not go with versions; leave it out")
        refuse_credentials(key, value)
        if key in OWN_KEYS:
            values[key] = value
        else:
            advice = "there is one setting in a comparison: give one value, or several of run.seed"
            check(not _is_sweep(word), f"{word} is a sweep; {advice}")
            others.append(word)
    return values, others


def _is_sweep(word: str) -> bool:
    """Return True if a word is an override with several values."""
    with contextlib.suppress(HydraException):  # it is a flag, or Hydra will say what is wrong
        return bool(OverridesParser.create().parse_override(word).is_sweep_override())
    return False


def _parse_care(text: str) -> float:
    """Parse the value of care.

    Raises:
        ConfigError: It is not a positive number.
    """
    care = 0.0
    with contextlib.suppress(ValueError):
        care = float(text)
    check(0 < care < math.inf, f"care={text:.100} must be a positive number, as in care=0.01")
    return care


def _parse_seeds(text: str, least: int) -> list[int]:
    """Parse the value of run.seed.

    Raises:
        ConfigError: A seed is too large, or there are fewer seeds than `least`.
    """
    words = text.split(",")
    are_short = all(word.isdecimal() and len(word) <= len(str(SEEDS.stop)) for word in words)
    seeds = {*map(int, words)} if are_short else set()
    check(all(seed in SEEDS for seed in seeds), f"run.seed={text:.100} has one of 2**63 or more")
    advice = "one says nothing about chance, as in run.seed=1,2,3,4,5"
    check(len(seeds) >= least, f"run.seed={text:.100} must be several seeds: {advice}")
    return sorted(seeds)
