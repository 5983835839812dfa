"""YAML that a stranger may have written: plain data, at a cost that its length limits."""

from __future__ import annotations

from typing import Any

import yaml

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same in C, ten times as fast
DEEPEST = 50  # levels of lists and mappings


def load_yaml(text: str | bytes) -> Any:
    """The one document in `text`, whose length the caller limits.

    Raises:
        ValueError: it is no YAML, or has what no record of ours has: tags that name objects, aliases (few of them make
            gigabytes), or lists in lists without end.
    """
    try:
        depth = 0
        for event in yaml.parse(text, Loader=Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > DEEPEST:
                raise ValueError("it has aliases, or lists too deep in each other")
        return Loader(text).get_single_data()
    except Exception as error:  # of the scanner, and of the types' constructors whatever their values cannot do
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
