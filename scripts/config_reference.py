"""Write docs/configuration.md and help.txt, the references of all keys, from the schema."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from mingpt_ddp.config.keys.components import DatasetConfig  # noqa: E402
from mingpt_ddp.config.keys.schema import GROUPS  # noqa: E402
from mingpt_ddp.config.validation import adapter  # noqa: E402

TYPES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true | false",
    "null": "null",
    "array": "list",
    "object": "mapping",
}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
Keys = dict[str, dict[str, Any]]  # the JSON schemas of keys by name
# Its commands are printed as the user has typed them.
HELP = """mingpt_ddp trains a small GPT: python -m mingpt_ddp [group=preset ...] [group.key=value ...]
For example: python -m mingpt_ddp experiment=demo ddp.nproc_per_node=2 trainer.max_steps=500

Flags: -m sweeps over values, as in optimizer.lr=1e-3,3e-4 sweep.parallel=auto; --cfg job shows the configuration; --config-dir=DIR adds
presets of your own; --version; --hydra-help shows what else Hydra takes.

Presets"""  # noqa: E501
PAGE = """# Look up a configuration key

```
python main.py --help                       # this list, and the presets
python main.py model=gpt2 --cfg job         # the values of a command line, without a run
```

Made from `mingpt_ddp/config/keys/schema.py` by `python scripts/config_reference.py`. A key is a word on the command line,
`group.key=value`, and a line in a YAML file. The presets in `conf/` say only what differs from the defaults here; ???
stands for what every preset says itself.

**In the name:** the key is part of the hash in the name of a run without `run.name`, unless it has its default: a key that
a later version adds renames no run. Almost no key of `ddp` is, so that a run can go on on other machines, and no limit, so that
a larger `trainer.max_steps` continues the run.

**Changes:** what in a result depends on the key.

| changes | what | two seeds that differ in it |
| --- | --- | --- |
| training | what a step computes | do not compare as replicates |
| rounding | only the last bits of what a step computes | are replicates |
| end | the step at which the run ends | do not compare as replicates |
| measurement | what evaluations measure: `data.val_paths` adds losses, `trainer.eval_steps` changes `val_loss` | are replicates if only `data.val_paths` differs |
| nothing | no result: where files are, what is logged and saved, how long to wait | are replicates |

[Reports](sweeps.md#read-the-results) go by it, and so do replays of
[recorded steps](fault-tolerance.md). The keys of your own classes enter the name and change the training.
"""  # noqa: E501


def sections() -> Iterator[tuple[str, str, Keys]]:
    """Yield heading, meaning and keys of each group and of its dataclasses.

    A group has the keys that all its dataclasses have; each of these follows with the others.
    """
    for group, (selectors, classes) in GROUPS.items():
        if group == "data":  # no dataset of samples is built in
            classes = {**classes, "MINE": DatasetConfig}
        keys = {cls: adapter(cls).json_schema()["properties"] for cls in classes.values()}
        first, *others = keys
        common = {}
        for key, schema in keys[first].items():
            if all(keys[other].get(key) == schema for other in others):
                common[key] = schema
        bases = (base for base in first.__mro__ if all(issubclass(other, base) for other in others))
        yield group, meaning(next(bases)), common
        if not others:
            continue
        for name, cls in classes.items():
            own = {key: schema for key, schema in keys[cls].items() if key not in common}
            selector = selectors[0] if issubclass(cls, DatasetConfig) else selectors[-1]
            yield f"{group}, {selector}={name or 'null'}", meaning(cls), own


def meaning(cls: type) -> str:
    """Return the first line of a docstring without the module that it names."""
    return str(cls.__doc__).partition("(mingpt_ddp")[0].rstrip(" .\n") + "."


def type_of(schema: dict[str, Any]) -> str:
    """Return type and bounds of a key."""
    if "anyOf" in schema:
        return " | ".join(map(type_of, schema["anyOf"]))
    if literals := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return " | ".join(literals)
    if "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])}: {type_of(schema['prefixItems'][0])}"
    bounds = (
        f"{sign} {show_number(schema[name])}" for name, sign in BOUNDS.items() if name in schema
    )
    return f"{TYPES[schema['type']]} {', '.join(bounds)}".strip()


def show_number(value: float) -> str:
    """Format a number as 10,000 or 1e6."""
    return re.sub(r"e\+0*", "e", f"{value:,g}")


def default_of(schema: dict[str, Any]) -> str:
    """Return a key's default as one types it."""
    return json.dumps(schema["default"]).strip('"') if "default" in schema else "???"


def help_text() -> str:
    """Return what --help prints."""
    lines = [HELP]
    for directory in sorted((ROOT / "conf").iterdir()):
        presets = sorted(path.stem for path in directory.glob("*.yaml"))
        if presets:
            lines.append(f"  {directory.name:<10} {' '.join(presets)}")
    lines += ["", "Keys with their defaults; ??? stands for a value of the preset"]
    for heading, text, keys in sections():
        lines += ["", f"{heading}: {text}"]
        for key, schema in keys.items():
            assignment = f"{heading.partition(',')[0]}.{key}={default_of(schema)}"
            unit = f"{schema['unit']}: " if schema["unit"] else ""
            lines.append(f"  {assignment:<38} {unit}{schema['description']} ({type_of(schema)})")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the text of docs/configuration.md."""
    lines = [PAGE]
    for heading, text, keys in sections():
        lines += [f"## {heading}", "", text, ""]
        if keys:
            lines += [
                "| key | type | unit | default | meaning | in the name | changes |",
                "| --- | --- | --- | --- | --- | --- | --- |",
            ]
        for key, schema in keys.items():
            cells = [
                type_of(schema).replace("|", "\\|"),
                schema["unit"],
                f"`{default_of(schema)}`",
                schema["description"],
                "yes" if schema["in_name"] else "",
                schema["changes"],
            ]
            lines.append(f"| `{key}` | {' | '.join(cells)} |")
        lines += [""] if keys else []
    return "\n".join(lines).rstrip("\n") + "\n"


FILES = {
    ROOT / "docs" / "configuration.md": page,
    ROOT / "mingpt_ddp" / "config" / "compose" / "help.txt": help_text,
}

if __name__ == "__main__":
    for path, text in FILES.items():
        path.write_text(text())
