"""The reference table of every configuration key, in Markdown, made from the model.

`python -m distmlp.config_reference README.md` rewrites the table between the two marks in that file.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from distmlp.config import sections

BEGIN, END = "<!-- keys -->", "<!-- /keys -->"


def reference_table() -> str:
    """A heading and a table (key, default, values, meaning) for every section."""
    parts = []
    for name, model in sections().items():
        rows = [f"| `{key}` | {_default(field)} | {_values(field)} | {field.description} |" for key, field in
                model.model_fields.items()]  # fmt: skip
        parts.append("\n".join([f"**`[{name}]`** {model.__doc__}", "", "| key | default | values | meaning |",
                                "|---|---|---|---|", *rows]))  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default in (None, ()):
        return ""
    return f"`{json.dumps(field.default)}`"


def _values(field: FieldInfo) -> str:
    kind = _kind(field.annotation)
    bounds = [_bound(limit) for limit in field.metadata]
    return ", ".join([kind, *filter(None, bounds)])


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " ".join(f"`{name}`" for name in arguments)
    if origin in (Union, types.UnionType):
        alternatives = [argument for argument in arguments if argument is not types.NoneType]
        if len(alternatives) == 2:  # a value or a list of such values
            return f"{_kind(alternatives[0])}, or a list of them"
        return _kind(alternatives[0])
    if origin is tuple:
        return f"list of: {_kind(arguments[0])}"
    if origin is Annotated:
        return _values(FieldInfo.from_annotation(annotation))
    return {int: "whole number", float: "number", bool: "`true` `false`", str: "text"}[annotation]


def _bound(limit: Any) -> str:
    match limit:
        case Ge(ge=bound):
            return f"≥ {_number(bound)}"
        case Gt(gt=bound):
            return f"> {_number(bound)}"
        case Le(le=int() as bound) if bound < 1 << 32:  # more than that is more than anyone needs
            return f"≤ {_number(bound)}"
        case Lt(lt=bound):
            return f"< {_number(bound)}"
        case MinLen():
            return "not empty"
    return ""  # such as "no NaN", which all numbers share


def _number(bound: Any) -> str:
    large = isinstance(bound, int) and bound >= 1 << 20
    return f"2^{bound.bit_length() - 1}" if large else f"{bound:g}"  # the large ones are powers of two


def with_table(text: str) -> str:
    """`text` with the table between its marks renewed. Raises ValueError where the marks are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"no {BEGIN} followed by {END}")
    return f"{before}{BEGIN}\n{reference_table()}{END}{after}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
