"""Draw the cases of the fuzz test: valid small commands in which one or two values are hostile.

A case depends only on its seed and its number. The cases of a seed go through every key of the
schema and of every command, again and again, in an order that depends on the seed.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import shlex
import typing
from dataclasses import dataclass, field
from typing import Any

from fuzz.hostile_files import HOSTILE, names
from fuzz.values import (
    EXPORTS,
    JSON_VALUES,
    NESTED,
    NUMBERS,
    OTHERS,
    PATHS,
    RUN_FILES,
    RUNS,
    STEP,
    TEXTS,
    TREES,
    URLS,
    WORDS,
)
from launching import WITH_DIGITS, WITH_TOY

from mingpt_ddp.cli.commands.at import AtConfig
from mingpt_ddp.cli.commands.evaluate import EvaluateConfig
from mingpt_ddp.cli.commands.export import ExportConfig
from mingpt_ddp.cli.commands.replay import ReplayConfig
from mingpt_ddp.cli.commands.report import ReportConfig
from mingpt_ddp.cli.commands.sample import SampleConfig
from mingpt_ddp.cli.commands.snapshots import ListConfig, PruneConfig
from mingpt_ddp.config.config import OMITTED_IF_NULL
from mingpt_ddp.config.keys.components import DatasetConfig, TaskConfig
from mingpt_ddp.config.keys.model_config import ModelConfig
from mingpt_ddp.config.keys.schema import GROUPS
from mingpt_ddp.config.validation import field_types, type_parts

SMALL = ["trainer.device=cpu", "trainer.max_steps=2", "tracker=[]"]
TEXT = ["data=text_file", "data.path=good.txt", "data.block_size=8", "trainer.batch_size=2", *SMALL]
SIZES = ["model.n_layer=1", "model.n_head=1", "model.n_embd=8"]
# Valid train commands: the words and, for each group that has several sets of keys, the value that
# selects the set.
BASES: list[tuple[list[str], dict[str, str | None]]] = [
    (["model=gpt_nano", *SIZES, *TEXT], {"model": "gpt", "optimizer": "adamw"}),
    (
        ["model=gpt_nano", *SIZES, *TEXT, "data.tokenizer=bpe", "data.vocab_size=270"],
        {"model": "gpt"},
    ),
    (
        ["model=modern_nano", *SIZES, *TEXT, "optimizer=muon"],
        {"model": "modern", "optimizer": "muon"},
    ),
    (
        [WITH_TOY, "experiment=toy", *SMALL],
        {"task": "own", "model": "own", "optimizer": "sgd", "data": "own"},
    ),
    (
        [WITH_DIGITS, "experiment=digits_convnet", *SMALL],
        {"task": "language_model", "model": "own", "optimizer": "sgd", "data": "own"},
    ),
    (["--config-dir=own", "model=table", *TEXT], {"model": "own", "optimizer": "adamw"}),
]
# The keys of everything that users register.
OWN = {
    "task": TaskConfig,
    "model": ModelConfig,
    "data": DatasetConfig,
}
DEFAULTS = {"task": "language_model", "data": None}
# Other commands: the class with their keys, the value of the first key, and other words.
COMMANDS: dict[str, tuple[type, str, list[str]]] = {
    "sample": (SampleConfig, "run", ["max_new_tokens=3"]),
    "evaluate": (EvaluateConfig, "run", ["data.path=text.txt", "device=cpu"]),
    "snapshots list": (ListConfig, "run", []),
    "snapshots verify": (ListConfig, "run", []),
    "snapshots prune": (PruneConfig, "run", ["keep_last=1"]),
    "snapshots export": (ExportConfig, "run", ["to=exported"]),
    "replay": (ReplayConfig, "run", ["steps=1000000"]),
    "at": (AtConfig, "run", ["step=1000000"]),
    "report": (ReportConfig, "run", []),
}
Target = tuple[str, str]


@dataclass
class Case:
    """A command, and the changes to make in the working directory before it."""

    command: str
    words: list[str]
    # Each step is the name of a function in world.STEPS and its arguments.
    steps: list[list[Any]] = field(default_factory=list)

    def shell(self) -> str:
        """Return the command as a line for a shell."""
        program = {"train": "python main.py", "sample": "python sample.py"}
        start = program.get(self.command, f"python -m mingpt_ddp {self.command}")
        return " ".join([start, *map(quote, self.words)])


def quote(word: str) -> str:
    """Quote a word for bash. Long repetitions of a character become a call of printf."""
    if found := re.search(r"(.)\1{500,}", word):
        return (
            f'{quote(word[: found.start()])}"$(printf {quote(found[1])}%.0s '
            f'{{1..{len(found[0])}}})"'
        )
    if word.isprintable():
        return shlex.quote(word)
    content = word.encode(errors="surrogatepass")
    return (
        "$'"
        + "".join(f"\\x{b:02x}" if not 32 <= b < 127 or b in b"'\\" else chr(b) for b in content)
        + "'"
    )


def classes(base: dict[str, str | None]) -> dict[str, type]:
    """Return the dataclass of each group in a valid command."""
    chosen = {group: {**DEFAULTS, "optimizer": "adamw", **base}.get(group) for group in GROUPS}
    return {
        group: {**found, "own": OWN.get(group)}[chosen[group]]
        for group, (_, found) in GROUPS.items()
    }


@functools.cache
def keys() -> dict[str, list[int]]:
    """Return every key of train, with the indices of the valid commands that have it."""
    found: dict[str, list[int]] = {}
    for index, (_, base) in enumerate(BASES):
        for group, cls in classes(base).items():
            for each in dataclasses.fields(cls):
                found.setdefault(f"{group}.{each.name}", []).append(index)
    return found


@functools.cache
def targets() -> list[Target]:
    """Return the commands and keys for which cases are drawn.

    Keys that take files occur several times, so that they are drawn more often.
    """
    found = [("train", key) for key in keys()] + [("train", key) for key in PATHS] * 4
    for command, (cls, first, _) in COMMANDS.items():
        found += [(command, each.name) for each in dataclasses.fields(cls)]
        found += [(command, dataclasses.fields(cls)[0].name)] * (3 if first == "run" else 0)
    found += [("again", "run")] * 5 + [("train", "own run")] * 5 + [("train", "--config-dir")] * 4
    return [
        *found,
        ("train", "--config-name"),
        ("train", "word"),
        ("train", "word"),
        ("plan", "format"),
    ]


def draw(seed: int, number: int) -> Case:
    """Draw the case with this number. It depends only on the seed and the number."""
    order = targets()[:]
    random.Random(seed).shuffle(order)
    rng = random.Random(f"{seed} {number}")
    command, key = order[number % len(order)]
    if command in COMMANDS:
        return _of_command(rng, command, key)
    case = Case(command, [])
    if command == "again":
        case.words = [
            _file(rng, "run", case.steps),
            *([_override(rng, case.steps)] if rng.random() < 0.3 else []),
        ]
        return case
    indices = keys().get(key, range(len(BASES)))
    base = BASES[rng.choice(indices)][0]
    if key == "own run":  # an earlier attempt or another user has left the run's directory
        case.steps += [["copy", "run", "mutant"], *_damage(rng, "mutant", RUN_FILES)]
        case.words = [*BASES[0][0], "run.root=.", "run.name=mutant"]
    elif key == "--config-dir":
        case.steps += [
            ["copy", "presets", "mutant"],
            # Hydra expands YAML merge keys in the user's own presets, which can take minutes.
            *_damage(rng, "mutant", ["experiment/mine.yaml", "experiment"], without="merges.yaml"),
        ]
        case.words = [*BASES[0][0], "--config-dir=mutant", "experiment=mine"]
    elif key in ("--config-name", "word", "format"):
        word = {"--config-name": "--config-name={}", "word": "{}", "format": "format={}"}[key]
        case.words = [*base, word.format(_value(rng, str, "word", case.steps, raw=True))]
    else:
        case.words = [*base, _override(rng, case.steps, key)]
    if rng.random() < 0.2:
        case.words.append(_override(rng, case.steps))
    if command == "train" and rng.random() < 0.08:
        case.command = "plan"
    return case


def _of_command(rng: random.Random, command: str, key: str) -> Case:
    cls, first, others = COMMANDS[command]
    hints, case = field_types(cls), Case(command, [])
    chosen = {key, *([rng.choice([*hints])] if rng.random() < 0.2 else [])}
    leading = next(iter(hints))
    run = _file(rng, leading, case.steps) if leading in chosen and first == "run" else first
    if leading in chosen and first != "run":
        run = _value(rng, str, leading, case.steps, raw=True)
    given = {
        name: _value(rng, hints[name], name, case.steps, raw=True)
        for name in sorted(chosen - {leading})
    }
    kept = [word for word in others if word.partition("=")[0].replace(".", "_") not in given]
    case.words = [run, *kept, *(f"{name}={value}" for name, value in given.items())]
    return case


def _override(rng: random.Random, steps: list[list[Any]], key: str | None = None) -> str:
    """Return an override that gives a hostile value to a key, by default to a random one."""
    key = key or rng.choice([*keys()])
    group, _, name = key.partition(".")
    hint = next(field_types(cls)[name] for cls in _classes_of(group) if name in field_types(cls))
    if name == "sources" and rng.random() < 0.7:
        value = (
            f"[[{_file(rng, name, steps)},{rng.choice(NUMBERS)}],[good.txt,{rng.choice(NUMBERS)}]]"
        )
    elif name in ("val_paths", "split_paths") and rng.random() < 0.7:
        split = rng.choice(("a", "val", "test", "train", "ä", "__class__"))
        value = f"{{{split}:{_file(rng, name, steps)}}}"
    else:
        value = _value(rng, hint, key if key in TREES else name, steps, is_path=key in PATHS)
    return f"{'++' if name in OMITTED_IF_NULL else ''}{key}={value}"


def _classes_of(group: str) -> list[type]:
    return [*GROUPS[group][1].values(), *([OWN[group]] if group in OWN else [])]


def _value(
    rng: random.Random,
    hint: Any,
    name: str,
    steps: list[list[Any]],
    raw: bool = False,
    is_path: bool = False,
) -> str:
    """Return a hostile value for a key of this type.

    Args:
        rng: Source of all random choices.
        hint: Type of the key.
        name: Name of the key.
        steps: The steps of the case, to which steps that make files are added.
        raw: Return the value as it is, without the quotes of Hydra's grammar.
        is_path: The key takes a path, so most values are files.
    """
    types = [*type_parts(hint)]
    takes_text, takes_number = str in types, int in types or float in types
    kind = rng.random()
    if takes_text and kind < (0.85 if is_path or name in TREES else 0.25):
        return _quoted(_file(rng, name, steps), raw)
    if takes_number and kind < 0.65:
        return rng.choice(NUMBERS)
    literals = [
        v
        for part in types
        if typing.get_origin(part) is typing.Literal
        for v in typing.get_args(part)
    ]
    if literals and kind < 0.4:
        return str(rng.choice(literals))
    word = rng.choice((rng.choice(WORDS), rng.choice(NESTED)))
    return rng.choice(
        (rng.choice(NUMBERS), rng.choice(OTHERS), _quoted(word, raw), _quoted(word, raw))
    )


def _quoted(text: str, raw: bool) -> str:
    return (
        text if raw else "'" + re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"(\\+)$", r"\1\1", text)) + "'"
    )


def _file(rng: random.Random, name: str, steps: list[list[Any]]) -> str:
    """Return the path of a hostile file or of a damaged copy of a valid tree, or a hostile URL."""
    kind = rng.random()
    if kind < 0.15:
        return rng.choice(URLS)
    if kind < 0.45:
        return f"{HOSTILE}/{rng.choice(names())}"
    tree, files = rng.choice(TREES.get(name, RUNS + TEXTS + EXPORTS))
    mutant = f"mutant{len(steps)}" + "".join(re.findall(r"\.\w+$", tree))
    steps += [["copy", tree, mutant], *_damage(rng, mutant, files)]
    return mutant if rng.random() < 0.8 else f"{mutant}/{rng.choice(files)}"


def _damage(rng: random.Random, tree: str, files: list[str], without: str = "") -> list[list[Any]]:
    """Return steps that damage a file of a tree.

    Args:
        rng: Source of all random choices.
        tree: Path of the tree.
        files: Files of the tree, of which one is damaged.
        without: Name of a hostile file that may not replace the chosen file.
    """
    file = f"{tree}/{rng.choice(files)}".rstrip("/")
    steps: list[list[Any]] = []
    match rng.randrange(4):
        case 0:
            hostile = rng.choice([name for name in names() if name != without])
            steps.append(["replace", f"{HOSTILE}/{hostile}", file])
        case 1:
            steps.append(["truncate", file, rng.random()])
        case _:
            steps.append(["edit", file, rng.random(), rng.choice(JSON_VALUES)])
    if "snapshots/" in file and not file.endswith("manifest.json") and rng.random() < 0.7:
        steps.append(["sign", f"{tree}/{STEP}"])
    return steps
