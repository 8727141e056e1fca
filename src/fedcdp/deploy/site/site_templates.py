"""The texts of a deployment, rendered from `templates/`: scripts, commented settings, and the README.

| filter | for |
| --- | --- |
| `toml` | a value in a TOML file |
| `quote` | a value that is a word of a script |
| `inside_quotes` | a value between double quotes in a script |
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from typing import TYPE_CHECKING

from fedcdp.errors import DeploymentError

if TYPE_CHECKING:
    from jinja2 import Environment

_OBEYED_IN_QUOTES = re.compile(r'["$`\\{}\x00-\x1f\x7f]')


def render(name: str, **values: object) -> str:
    """The text of a template; a value that it needs and does not get is an error."""
    return _environment().get_template(f"{name}.j2").render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(  # nosec B701 (scripts and settings, no HTML)
        loader=PackageLoader("fedcdp.deploy.site"),
        autoescape=False,  # noqa: S701
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    environment.filters |= {"toml": _toml, "quote": shlex.quote, "inside_quotes": _inside_quotes}
    return environment


def _toml(value: object) -> str:
    import tomli_w

    return tomli_w.dumps({"value": value}).removeprefix("value = ").removesuffix("\n")


def _inside_quotes(value: object) -> str:
    """The value as it is, unless a shell would see more in it than a text."""
    text = str(value)
    if _OBEYED_IN_QUOTES.search(text):
        raise DeploymentError(f"{text!r} cannot be written into a script")
    return text
