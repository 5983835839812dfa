"""A manifest against the models that the training operator and Kubernetes publish: names, types, what is required."""

from __future__ import annotations

import re
from typing import Any

from kubeflow.training import models
from kubernetes.client import models as core

PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float)}


def complaints(value: Any, kind: str, path: str = "") -> list[str]:
    """What the models do not know, or hold to be of another type.

    Args:
        kind: as the models write it, such as `KubeflowOrgV1PyTorchJob` or `list[V1Container]`.
        path: where `value` stands.
    """
    if kind == "object":
        return []
    if kind in PLAIN:
        fits = isinstance(value, PLAIN[kind]) and isinstance(value, bool) == (kind == "bool")
        return [] if fits else [f"{path}: {value!r} is not {kind}"]
    if several := re.fullmatch(r"list\[(.*)\]", kind):
        if not isinstance(value, list):
            return [f"{path}: {value!r} is not a list"]
        return [told for i, each in enumerate(value) for told in complaints(each, several[1], f"{path}[{i}]")]
    if not isinstance(value, dict):
        return [f"{path}: {value!r} is not a mapping"]
    if mapping := re.fullmatch(r"dict\(str, (.*)\)", kind):
        return [told for key, each in value.items() for told in complaints(each, mapping[1], f"{path}.{key}")]
    return _of_model(value, getattr(models, kind, None) or getattr(core, kind), path)


def _of_model(value: dict[str, Any], model: Any, path: str) -> list[str]:
    kinds = {name: model.openapi_types[attribute] for attribute, name in model.attribute_map.items()}
    told = [f"{path}.{key}: not known to {model.__name__}" for key in value if key not in kinds]
    try:
        model(**{attribute: value.get(name) for attribute, name in model.attribute_map.items()})
    except ValueError as error:  # what is required is missing
        told.append(f"{path}: {error}")
    for key in kinds.keys() & value.keys():
        told += complaints(value[key], kinds[key], f"{path}.{key}")
    return told
