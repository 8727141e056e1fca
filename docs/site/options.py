"""For the reference: the fields of a dataclass as one table of name, type, default and meaning.

The meaning of a field is its help, `option(default, "help")`, as on the command line, or the text below the field.
"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, Field, fields
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

import griffe

_LONGEST_SIGNATURE = 6  # parameters: a longer one says less than the table
_SECTIONS = re.compile(r"^(?=(?:Raises|Examples):$)", re.MULTILINE)
_DEFAULT = re.compile(r"\s*Default: ([^.]*(?:\.\d[^.]*)*)\.$")


class Options(griffe.Extension):
    """Replace the fields of every dataclass by a table in its docstring, before errors and examples."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called once the package is read."""
        for each in _classes(pkg):
            if "dataclass" in each.labels and not each.name.startswith("_"):
                alias = pkg.members.get(each.name)  # by which users import it
                _tabulate(each, alias.path if isinstance(alias, griffe.Alias) else each.path)


def _classes(parent: griffe.Module | griffe.Class) -> list[griffe.Class]:
    found = []
    for member in parent.members.values():
        if isinstance(member, griffe.Class):
            found.append(member)
        if isinstance(member, griffe.Module | griffe.Class):
            found += _classes(member)
    return found


def _tabulate(each: griffe.Class, path: str) -> None:
    module = import_module(each.module.path)
    known = {field.name: field for field in fields(getattr(module, each.name)) if not field.name.startswith("_")}
    members = {name: each.members[name] for name in known if name in each.members}
    if not members:
        return
    init = each.members.get("__init__")
    given = init.parameters if isinstance(init, griffe.Function) else griffe.Parameters()
    rows = []
    for name, member in members.items():
        annotation = given[name].annotation if name in given else member.annotation
        meaning = known[name].metadata.get("help") or (member.docstring.value if member.docstring else "")
        default, meaning = _default(known[name], " ".join(meaning.split()))
        anchor = f'<span id="{path}.{name}"></span>'
        rows.append([f"{anchor}`{name}`", _type(str(annotation), module), default, meaning])
        each.del_member(name)
    if isinstance(init, griffe.Function) and len(given) - 1 > _LONGEST_SIGNATURE:
        each.del_member("__init__")
    text, *sections = _SECTIONS.split(each.docstring.value if each.docstring else "")
    text = "\n\n".join([text.rstrip(), _table(rows), *sections])
    each.docstring = griffe.Docstring(text, parent=each, lineno=each.lineno)


def _table(rows: list[list[str]]) -> str:
    """The rows as Markdown, without a column that would be empty."""
    used = [column for column in range(4) if any(row[column] for row in rows)]
    lines = [[line[column] for column in used] for line in (["field", "type", "default", "meaning"], ["---"] * 4, *rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f'<div class="fields{" defaults" * (2 in used)}" markdown>\n\n{table}\n\n</div>'


def _type(annotation: str, module: Any) -> str:
    """The annotation; the name of a choice becomes the values to choose from."""
    named = getattr(module, annotation, None)
    if get_origin(named) is Literal:
        return ", ".join(map(_value, get_args(named)))
    return f"`{annotation}`"


def _value(value: object) -> str:
    return f"`{json.dumps(value) if isinstance(value, str) else value}`"


def _default(field: Field[Any], meaning: str) -> tuple[str, str]:
    """The default, and the meaning without it. Where None stands for a value, the meaning ends with `Default: value.`"""
    if field.default is MISSING:
        made = "" if field.default_factory is MISSING else "new for each"
        return (_value(field.default_factory()) if field.default_factory in (dict, list, tuple) else made), meaning
    if field.default is None and (written := _DEFAULT.search(meaning)):
        return written[1], meaning[: written.start()]
    return _value(field.default), meaning
