"""Settings by their dotted paths, such as optim.learning_rate."""

from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python


def setting_of(name: str) -> str:
    """The dotted path of the setting that a longer path leads into."""
    return ".".join(name.split(".")[:2])


def is_within(name: str, setting: str) -> bool:
    """Whether a dotted path leads to a setting, or into it."""
    return f"{name}.".startswith(f"{setting}.")


def eval_setting(name: str) -> str:
    """The dotted path of an evaluation's source. The only one has no name."""
    return f"data.eval_source.{name}" if name else "data.eval_source"


def config_fields(kind: type[BaseModel]) -> dict[str, Any]:
    """Every setting by its dotted path, those of a fork included, whose class of configs has more sections."""
    known = {}
    for section, holder in kind.model_fields.items():
        for name, field in holder.annotation.model_fields.items():
            known[f"{section}.{name}"] = field
    return known


def flat_settings(config: BaseModel) -> dict[str, Any]:
    """The value of every setting by its dotted path, as it is read from JSON: a list for a tuple, a text for a Path."""
    flat = flatten(config.model_dump())
    return {name: to_jsonable_python(value) for name, value in flat.items()}


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """One dictionary with dotted names. An empty one is a value, unless it is a section, which then says nothing."""
    flat = {}
    for name, value in nested.items():
        if isinstance(value, dict) and (value or not prefix):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    """What flatten() makes such names of, if no key of a dictionary has a dot.

    Raises TypeError or AttributeError where a key has one, and its beginning is a key, too.
    """
    nested = {}
    for name in sorted(flat, key=lambda name: name.count(".")):
        *parents, last = name.split(".")
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = flat[name]
    return nested
