"""Write docs/configuration.md and help.txt, which list all configuration keys, from the schema."""

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
Keys = dict[str, dict[str, Any]]  # JSON schema of each key, by the name of the key
# The program replaces `python -m mingpt_ddp` by the command that the user runs.
HELP = """mingpt_ddp trains a small GPT: python -m mingpt_ddp [group=preset ...] [group.key=value ...]
For example: python -m mingpt_ddp experiment=demo ddp.nproc_per_node=2 trainer.max_steps=500

-m               train a job for each combination of values, as in optimizer.lr=1e-3,3e-4 sweep.parallel=auto
--cfg job        show the configuration and exit
--config-dir=DIR add your own presets
--version        show the version and exit
--hydra-help     show the other options of Hydra

Presets"""  # noqa: E501
PAGE = """# Look up a configuration key

```
python main.py --help                       # the keys and the presets
python main.py model=gpt2 --cfg job         # the values that a command line gives all keys
```

Set a key on the command line as `group.key=value`, or in a YAML file. The presets in `conf/` list only values that differ from
the defaults below. ??? means that there is no default, and each preset sets the key.

**In the name:** A run without `run.name` gets a name with a hash. The key is part of the hash if its value is not the default. Limits
and most `ddp` keys are not, so that a run continues with a larger `trainer.max_steps` or on other machines.

**Changes:** The part of a run's result that depends on the key. [Reports](sweeps.md#read-the-results) and
[replays](fault-tolerance.md) use it to decide which runs are comparable. Keys of your own classes change the training.

| changes | effect of the key | are runs that differ in it and in their seed replicates? |
| --- | --- | --- |
| training | on the result of a step | no |
| rounding | on the last bits of this result | yes |
| end | on the step at which the run ends | no |
| measurement | on evaluations | yes for `data.val_paths`, no for `trainer.eval_steps` |
| nothing | none on results | yes |

`python scripts/config_reference.py` writes this page.
"""  # noqa: E501


def sections() -> Iterator[tuple[str, str, Keys]]:
    """Yield the heading, the description and the keys of each section.

    A group has a section with the keys that all its dataclasses share. Then each of its dataclasses
    has a section with its other keys.
    """
    for group, (selectors, classes) in GROUPS.items():
        # No dataset of samples is built in, so a made-up one shows the keys of all.
        if group == "data":
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
    """Return the docstring of a class, without the name of a module in parentheses at its end."""
    return str(cls.__doc__).partition("(mingpt_ddp")[0].rstrip(" .\n") + "."


def type_of(schema: dict[str, Any]) -> str:
    """Describe the type and the bounds of a key, for example as "whole number >= 1"."""
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


def type_with_unit(schema: dict[str, Any]) -> str:
    """Describe the unit, type and bounds of a key, for example as "steps: whole number >= 1"."""
    unit = f"{schema['unit']}: " if schema["unit"] else ""
    return f"{unit}{type_of(schema)}"


def show_number(value: float) -> str:
    """Format a number, for example as 10,000 or 1e6."""
    return re.sub(r"e\+0*", "e", f"{value:,g}")


def default_of(schema: dict[str, Any]) -> str:
    """Return the default of a key as text for the command line, or ??? if there is none."""
    return json.dumps(schema["default"]).strip('"') if "default" in schema else "???"


def help_text() -> str:
    """Return the text that --help prints."""
    lines = [HELP]
    for directory in sorted((ROOT / "conf").iterdir()):
        presets = sorted(path.stem for path in directory.glob("*.yaml"))
        if presets:
            lines.append(f"  {directory.name:<10} {' '.join(presets)}")
    lines += ["", "Keys with their defaults (??? means that each preset sets the key)"]
    for heading, text, keys in sections():
        lines += ["", f"{heading}: {text}"]
        for key, schema in keys.items():
            assignment = f"{heading.partition(',')[0]}.{key}={default_of(schema)}"
            lines.append(f"  {assignment:<38} {schema['description']} ({type_with_unit(schema)})")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the text of docs/configuration.md."""
    lines = [PAGE]
    for heading, text, keys in sections():
        lines += [f"## {heading}", "", text, ""]
        if keys:
            lines += [
                "| key | type | default | meaning | in the name | changes |",
                "| --- | --- | --- | --- | --- | --- |",
            ]
        for key, schema in keys.items():
            cells = [
                type_with_unit(schema).replace("|", "\\|"),
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
