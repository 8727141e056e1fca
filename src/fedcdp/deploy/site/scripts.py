"""The texts of a deployment that are rendered from `templates/`: scripts, commented settings, service files."""

from __future__ import annotations

import re
import shlex
from functools import cache
from typing import TYPE_CHECKING

from fedcdp.deploy.site.directory import CONNECTION, SiteSettings
from fedcdp.errors import DeploymentError

if TYPE_CHECKING:
    from jinja2 import Environment


_POLLS_A_SECOND = 20  # of all nodes together, which the server answers
_SHORTEST_POLL, _LONGEST_POLL = 0.25, 3.0  # seconds; Flower's own pause is the longest
_FIRST_RUNTIME_PORT = 9100  # used by the programs that a node starts; on one machine each node needs its own
_OBEYED_IN_QUOTES = re.compile(r'["$`\\{}\x00-\x1f\x7f]')


def render(name: str, **values: object) -> str:
    """The text of a template; a missing value is an error."""
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
    """The value unchanged; raises if a shell would treat any part of it as more than text."""
    text = str(value)
    if _OBEYED_IN_QUOTES.search(text):
        raise DeploymentError(f"{text!r} cannot be written into a script")
    return text


def server_scripts(settings: SiteSettings) -> dict[str, str]:
    """The scripts that start the server and the job: `fedcdp deploy up` runs them as well."""
    return {
        "start-superlink.sh": render("start-superlink.sh", settings=settings),
        "run.sh": render("run.sh", settings=settings, connection=CONNECTION),
    }


def node_script(settings: SiteSettings, number: int, name: str | None = None) -> str:
    """The script that starts a node; together with the node's folder, it is all that the node's machine needs."""
    poll = min(_LONGEST_POLL, max(_SHORTEST_POLL, settings.nodes / _POLLS_A_SECOND))
    return render(
        "start-node.sh",
        settings=settings,
        number=number,
        folder=name or f"node-{number}",
        runtime_port=runtime_port(number),
        poll=f"{poll:g}",
    )


def runtime_port(number: int) -> int:
    """The port of the loopback that a node's own programs use."""
    return _FIRST_RUNTIME_PORT + number
