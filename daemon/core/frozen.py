"""Copies of frozen dataclasses with some fields changed."""

from typing import Any, TypeVar

T = TypeVar("T")


def replace(old: T, /, **changes: Any) -> T:
    """As `dataclasses.replace`, for plain frozen dataclasses without slots: several times faster, and
    decisions do little else. Raises `TypeError` for a field that does not exist."""
    fields = vars(old)
    new = object.__new__(type(old))
    vars(new).update(fields, **changes)
    if len(vars(new)) != len(fields):
        raise TypeError(
            f"{type(old).__name__} has no field {sorted(changes.keys() - fields.keys())}"
        )
    return new
