"""The help of a command: the options people need, or with --help-all every option, and examples at the end.

It is plain text that fits 80 columns. Option names are never cut: a long one gets a line of its own.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.models import ArgumentInfo

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""The context settings of the program; commands inherit them."""

_NAMES = 24  # columns for an option's name; a longer name has its help on the next line
_INDENT = "  "

Function = TypeVar("Function", bound=Callable[..., Any])


def add_to(app: typer.Typer, *examples: str) -> Callable[[Function], Function]:
    """Register a function as a command of an app, with the examples that its help ends with."""
    return app.command(cls=PlainCommand, epilog=epilog(*examples))


def epilog(*examples: str) -> str:
    """Examples as the epilog of a command."""
    return "\n".join(examples)


def names_of(parameter: Any) -> str:
    """An option's names and the kind of its value, or an argument's name."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    names = " / ".join(filter(None, (", ".join(parameter.opts), ", ".join(parameter.secondary_opts))))
    return names if parameter.is_flag else f"{names} {parameter.metavar or parameter.type.name.upper()}"


def help_of(parameter: Any) -> str:
    """An option's help, with its default, whether it is required, and its environment variable."""
    words = [parameter.help or ""]
    default = parameter.default
    if parameter.show_default and default is not None and default is not False and default != "" and not callable(default):
        words.append(f"Default: {default}.")
    if parameter.required and parameter.param_type_name == "option":
        words.append("Required.")
    if parameter.envvar:
        words.append(f"Environment variable: {parameter.envvar}.")
    return " ".join(filter(None, words))


class _Plain:
    """What commands and groups share. An option declared with `hidden=True` is shown by --help-all only."""

    params: list[Any]
    callback: Callable[..., Any] | None
    help: str | None
    epilog: str | None
    format_usage: Callable[..., None]
    get_params: Callable[..., list[Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.advanced = {each.name for each in self.params if each.hidden}
        helps = _argument_helps(self.callback)
        for each in self.params:
            each.hidden = False  # the shell still completes it
            if each.param_type_name == "argument":
                each.help = each.help or helps.get(each.name)
        self.params.append(
            TyperOption(
                param_decls=["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=self._show_all,
                help="Show all options and exit.",
            )
        )

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help that --help shows."""
        self._write(ctx, formatter, everything=False)

    def short_helps(self) -> list[tuple[str, str]]:
        """The commands of a group by name, with a sentence each."""
        return [(name, each.get_short_help_str(500)) for name, each in getattr(self, "commands", {}).items()]

    def _show_all(self, ctx: Any, _: Any, asked: bool) -> None:
        if asked and not ctx.resilient_parsing:
            formatter = ctx.make_formatter()
            self._write(ctx, formatter, everything=True)
            typer.echo(formatter.getvalue().rstrip("\n"))
            raise typer.Exit

    def _write(self, ctx: Any, formatter: Any, everything: bool) -> None:
        self.format_usage(ctx, formatter)
        for paragraph in (self.help or "").split("\n\n"):
            formatter.write("\n" + _wrapped(" ".join(paragraph.split()), formatter.width) + "\n")
        sections: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            if everything or each.name not in self.advanced:
                is_argument = each.param_type_name == "argument"
                panel = each.rich_help_panel if hasattr(each, "rich_help_panel") else None
                name = "Arguments" if is_argument else panel or "Options"
                sections.setdefault(name, []).append((names_of(each), help_of(each)))
        if commands := self.short_helps():
            sections["Commands"] = commands
        for name, rows in sections.items():
            formatter.write(f"\n{name}:\n{_table(rows, formatter.width)}")
        if self.advanced and not everything:
            formatter.write(f"\n{len(self.advanced)} more options: {ctx.command_path} --help-all\n")
        if self.epilog:
            formatter.write("\nExamples:\n" + textwrap.indent(self.epilog, _INDENT) + "\n")


class PlainCommand(_Plain, TyperCommand):
    """A command with the help of this module."""


class PlainGroup(_Plain, TyperGroup):
    """A group of commands with the help of this module."""


def _argument_helps(function: Callable[..., Any] | None) -> dict[str, str | None]:
    """The help of each argument, as it was declared: some versions of typer and click lose it together."""
    declared = {} if function is None else inspect.signature(function, eval_str=True).parameters
    return {
        name: each.help
        for name, parameter in declared.items()
        for each in getattr(parameter.annotation, "__metadata__", ())
        if isinstance(each, ArgumentInfo)
    }


def _table(rows: list[tuple[str, str]], width: int) -> str:
    column = min(_NAMES, max(len(names) for names, _ in rows)) + len(_INDENT)
    lines = []
    for names, words in rows:
        shown = _wrapped(words, width - column - len(_INDENT)).splitlines() or [""]
        if len(names) > column - len(_INDENT):
            lines.append(names)
        else:
            lines.append(names.ljust(column) + shown.pop(0))
        lines += [" " * column + line for line in shown]
    return "".join(f"{_INDENT}{line}".rstrip() + "\n" for line in lines)


def _wrapped(words: str, width: int) -> str:
    """Text in lines that break between words only: an option's name stays whole."""
    return textwrap.fill(words, width, break_on_hyphens=False, break_long_words=False)
