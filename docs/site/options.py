"""For the reference: a setting's help, `option(default, "help")`, is its documentation, as it is the command line's."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class Options(griffe.Extension):
    """Give fields that are made by `option` the help as docstring and the plain default as value."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Called for every attribute that is found."""
        value = attr.value
        if not (isinstance(value, griffe.ExprCall) and str(value.function) == "option" and attr.docstring is None):
            return
        default, help_ = value.arguments
        attr.docstring = griffe.Docstring(ast.literal_eval(str(help_)), parent=attr)
        attr.value = default
        if isinstance(attr.parent, griffe.Class) and "dataclass" not in attr.parent.labels:
            attr.parent.labels.add("dataclass")
