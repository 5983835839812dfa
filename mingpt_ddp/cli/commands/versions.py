"""Train two or more versions of the code with the same seeds, and compare their losses and speeds.

    python -m mingpt_ddp versions main . model=gpt_nano trainer.max_steps=500 run.seed=1,2,3,4,5
    python -m mingpt_ddp versions HEAD~1 HEAD run.seed=1,2 trainer.max_steps=50 require=same_bits

A B ...      commits or branches of this checkout, or directories; . stands for the present code. Write ./main for a directory
             with the name of a branch. Each version is compared with the first one
key=value    keys as for training, the same for all versions. If --config-dir=DIR or code=FILE is inside this
             checkout, each version takes its own copy of it (code= needs an absolute path). All other paths stay as they are
run.seed     two or more seeds, separated by commas; one is enough for require=same_bits
until        until=decided trains one seed after another. It stops when each version is known to be better or worse than the first
             one, or to differ from it by less than the key care says. Give it about 12 seeds: with too few, nothing can be decided
care         for until=decided: a difference in the loss that is too small to matter
require      same_bits, or not_worse: no version is worse than the first one by more than chance. If a version does not meet the
             requirement, the exit code is 1 and the last line gives the reason

Jobs run one after another in the order A B B A A B, so that a machine that becomes slower does not favour a version. If the
command is killed, run it again: it continues, and trains no job twice. If the code of a version, which includes your uncommitted
changes to ., or the configuration has changed since then, a new comparison begins.

The verdict has three parts. The first is the difference of the losses, with its 95% interval and p-value. It is paired by seed if
there are at least three seeds, and corrected for several versions (Holm). The second is the difference of the speeds, by the
median time of a step and the time from the first step to the end. The third is whether the last weights and optimizer states have
the same bits. The verdict is also added to outputs/experiments.jsonl. The runs are in outputs/versions-HASH/NUMBER-VERSION,run.seed=N.
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
from mingpt_ddp.errors import counted
from mingpt_ddp.process.interrupts import raise_interrupts
from mingpt_ddp.process.root_cause import cli_errors
from mingpt_ddp.process.terminal import echo
from mingpt_ddp.study.versions.comparison import compare_versions

VERSIONS_KEYS = ("run.seed", "require", "until", "care")
SEEDS = range(2**63)
REQUIREMENTS = (None, "same_bits", "not_worse")
# Words that cannot be combined with this command, which sets these keys itself.
REFUSED_WORD = re.compile(r"-m$|--multirun$|\+*(run\.(name|resume)|hydra\.searchpath)=")


def main() -> None:
    """Run `python -m mingpt_ddp versions`."""
    with cli_errors():
        if text := answer(__doc__, sys.argv[1:]):
            echo(text)
            return
        raise_interrupts()  # so that Ctrl-C also ends the running job
        sys.exit(_command(sys.argv[1:]))


def _command(words: list[str]) -> int:
    names = [*itertools.takewhile(lambda word: word[:1] != "-" and "=" not in word, words)]
    own, others = _split(words[len(names) :])
    for name in names:
        refuse_credentials("the name of a version", name)
    for word in words[len(names) :]:
        is_path = "=" in word and os.path.isdir(word)
        check(
            not is_path,
            f"{word} cannot be a version, because its path contains a =; "
            "give a symbolic link to it instead",
        )
    check(len(names) > 1, "name at least two versions of the code: commits or directories")
    required = own.get("require")
    check(required in REQUIREMENTS, f"require={required} must be same_bits or not_worse")
    seeds = _parse_seeds(own.get("run.seed", ""), 1 if required == "same_bits" else 2)
    until = own.get("until")
    check(
        until in (None, "decided"),
        f"until={until} is not valid; write until=decided, or leave it out",
    )
    care = _parse_care(own["care"]) if "care" in own else None
    check(
        care is None or until is not None, "care needs until=decided; add that, or leave out care"
    )
    text, is_met = compare_versions(names, seeds, others, required, until is not None, care)
    echo(text)
    return int(not is_met)


def _split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of VERSIONS_KEYS, and the other words, which configure the training."""
    values = {}
    others = []
    for word in words:
        key, _, value = word.removeprefix("--").partition("=")
        check(not REFUSED_WORD.match(word), f"{word} cannot be used with versions; leave it out")
        refuse_credentials(key, value)
        if key in VERSIONS_KEYS:
            values[key] = value
        else:
            advice = "give one value, because only run.seed may have several in a comparison"
            check(not _is_sweep(word), f"{word} has several values; {advice}")
            others.append(word)
    return values, others


def _is_sweep(word: str) -> bool:
    """Return True if a word is an override with several values."""
    with contextlib.suppress(HydraException):  # the word is a flag, or Hydra will report the error
        return bool(OverridesParser.create().parse_override(word).is_sweep_override())
    return False


def _parse_care(text: str) -> float:
    """Parse the value of care.

    Raises:
        ConfigError: The text is not a positive number.
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
    check(
        all(seed in SEEDS for seed in seeds),
        f"run.seed={text:.100} has a seed of 2**63 or more; use smaller seeds",
    )
    advice = "write run.seed=1,2,3,4,5"
    check(
        len(seeds) >= least,
        f"run.seed={text:.100} must be a list of at least {counted(least, 'seed')}; {advice}",
    )
    return sorted(seeds)
