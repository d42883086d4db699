"""What is wrong with a configuration, one line a key: the key, its value, what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, sections: Mapping[str, type[BaseModel]]) -> Iterator[str]:
    """One line for everything that pydantic objects to. `sections`: name → model of that section."""
    by_key: dict[tuple[Any, ...], list[Any]] = {}
    for item in error.errors():
        by_key.setdefault(item["loc"][:2], []).append(item)
    for place, items in by_key.items():
        yield from (_line(place, item, sections) for item in _of_the_meant_alternative(items))


def _of_the_meant_alternative(items: list[Any]) -> list[Any]:
    """Of a key that takes a value or a list: only the faults of what was given. Of others: all."""
    if not any(len(item["loc"]) > 2 and isinstance(item["loc"][2], str) for item in items):
        return items
    inside_list = [item for item in items if len(item["loc"]) > 3]
    return inside_list or items[:1]


def _line(place: tuple[Any, ...], item: Any, sections: Mapping[str, type[BaseModel]]) -> str:
    section, key = (*(str(part) for part in place), "", "")[:2]
    if item["type"] == "extra_forbidden":
        known = sections[section].model_fields if key else sections
        name = ".".join(part if part.isprintable() and len(part) <= 60 else short(part) for part in map(str, place))
        return f"{name}: unknown key{nearest(key or section, known)}"
    if item["type"] == "missing":
        return f"{section}.{key}: missing; it has no default" if key else f"[{section}]: this section is missing"
    index = item["loc"][-1]
    name = f"{section}.{key}" if key else section or "configuration"
    name += f"[{index}]" if isinstance(index, int) else ""
    value = "" if isinstance(item["input"], dict | BaseModel) and len(place) < 2 else f" = {short(item['input'])}"
    or_list = " or a list of them" if len(item["loc"]) == 3 and isinstance(item["loc"][2], str) else ""
    names = _names(sections[section].model_fields[key].annotation) if item["type"] == "literal_error" else []
    return f"{name}{value}: {_expected(item, names)}{or_list}{_guess(item['input'], names)}"


def _expected(item: Any, names: list[str]) -> str:
    bound = next(iter(item.get("ctx", {"": ""}).values()), "")
    bound = f"{bound:g}" if isinstance(bound, float) else bound
    wanted = {
        "literal_error": f"expected one of {', '.join(names)}",
        "greater_than_equal": f"must be at least {bound}",
        "greater_than": f"must be greater than {bound}",
        "less_than_equal": f"must be at most {bound}",
        "less_than": f"must be less than {bound}",
        "finite_number": "expected a finite number",
        "float_type": "expected a number",
        "int_type": "expected a whole number",
        "int_from_float": "expected a whole number",
        "string_type": "expected a string",
        "string_too_short": "must not be empty",
        "bool_type": "expected true or false",
        "tuple_type": "expected a list",
        "model_type": "expected a section with keys below it",
    }
    reason = item["msg"].removeprefix("Value error, ")
    return wanted.get(item["type"], reason[:1].lower() + reason[1:])


def _names(annotation: Any) -> list[str]:
    """The names that a field takes, also where it is one alternative of several."""
    names: list[str] = []
    for part in get_args(annotation):
        names += [part] if isinstance(part, str) else [name for name in _names(part) if name not in names]
    return names


def _guess(value: Any, names: list[str]) -> str:
    close = difflib.get_close_matches(value, names, n=1, cutoff=0.5) if isinstance(value, str) else []
    return f"; did you mean {close[0]}?" if close else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known key that `name` may have meant, or at all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean `{close[0]}`?" if close else f"; known: {', '.join(known)}"


def short(value: Any) -> str:
    """`value` for a message, at most 60 characters."""
    try:
        text = repr(list(value) if isinstance(value, tuple) else value)
    except ValueError:  # Python refuses to write out integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
