"""Additions to MkDocs: results, examples and notebooks are on the site, and links written for the repository work in both.

A page links to `../results/attacks.md`, which is right in the repository, where `docs/` is a folder. On the site `docs/` is
the root. So each relative link is looked up as a file of the repository and rewritten as a link between pages of the site. A
link to a file that is not on the site fails the build.
"""

from __future__ import annotations

import importlib.util
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
COMMANDS = "The site lists every command here (`make docs`)."
PROJECT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
NOTEBOOKS = "docs/notebooks/"
_LINK = re.compile(r"(\]\()(?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?(\))")
_CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
_LOADED = re.compile(
    r"<(?:script|img|iframe|source)[^>]+src=[\"']?https?:"
    r"|<link[^>]+rel=[\"']?(?:stylesheet|preconnect|icon)[^>]+href=[\"']?https?:"
)


def on_files(files: Files, config: Any) -> Files:
    """Put results, examples, the project's own pages and the notebooks on the site."""
    outside = [ROOT / name for name in PROJECT_PAGES]
    for folder in ("examples", "results"):
        outside += sorted(
            path for path in (ROOT / folder).rglob("*") if path.is_file() and path.parent.name != "__pycache__"
        )
    for path in outside:
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config["site_dir"], use_directory_urls=False))
    for path in sorted((ROOT / NOTEBOOKS).glob("*.ipynb")):
        name = _on_site(path.relative_to(ROOT).as_posix())
        files.append(File.generated(config, name, content=_beside("notebooks").page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:  # noqa: ARG001
    """Rewrite the links of a page for the site, and make the page of commands from the command line itself."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, _beside("commands").page())
    here = _in_repository(page.file.src_uri)

    def between_pages(link: re.Match[str]) -> str:
        before, written, anchor, after = link.groups()
        target = _on_site(posixpath.normpath(posixpath.join(posixpath.dirname(here), written)))
        if files.get_file_from_path(target) is None:
            raise PluginError(f"{here}: the link {written} leads to {target}, which is not on the site")
        return f"{before}{posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or '.')}{anchor or ''}{after}"

    parts = _CODE.split(markdown)
    return "".join(part if at % 2 else _LINK.sub(between_pages, part) for at, part in enumerate(parts))


def on_post_page(output: str, page: Any, config: Any) -> str:  # noqa: ARG001
    """Refuse a page that loads anything from elsewhere: no third party learns who reads it."""
    if loaded := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from the network: {loaded.group()[:200]}")
    return output


def _in_repository(site: str) -> str:
    return site if site.startswith("results/") or site in PROJECT_PAGES else f"docs/{site}"


def _on_site(repository: str) -> str:
    if repository.startswith(NOTEBOOKS):
        repository = repository.removesuffix(".ipynb") + ".md"
    return "index.md" if repository == "README.md" else repository.removeprefix("docs/")


def _beside(name: str) -> Any:
    """The module of this name in this folder, which is not a package."""
    found = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    if found is None or found.loader is None:
        raise PluginError(f"docs/site/{name}.py is missing")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
