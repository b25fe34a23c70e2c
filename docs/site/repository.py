"""Files outside docs/ on the site: README, DESIGN and others as pages, and every file that a page links to.

The pages are written for GitHub, with links to files of the repository such as ../bench/results/adapt.csv. This hook of
mkdocs copies those files to files/ on the site and points the links there. A folder becomes a list of its files.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "DESIGN.md": "design.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""File of the repository -> page of the site."""
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)")
"""The target of a link or an image, without its anchor; no address on the web."""


def on_config(config: MkDocsConfig) -> None:
    """Gives headings the anchors that GitHub gives them, so that a link works in both places."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages, and the files and folders that pages link to."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    for page in list(files.documentation_pages()):
        for target in LINK.findall(page.content_string):
            path = _in_repository(page.src_uri, target)
            place = _on_site(path)
            if files.get_file_from_path(place) is None and (ROOT / path).exists():
                files.append(_generated(config, path, place))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links at the places that files have on the site."""
    here = page.file.src_uri

    def moved(target: re.Match[str]) -> str:
        path = _in_repository(here, target[0])
        if not (ROOT / path).exists():
            return target[0]  # mkdocs names it in a warning
        return posixpath.relpath(_on_site(path), posixpath.dirname(here) or ".")

    return LINK.sub(moved, markdown)


def _in_repository(page: str, target: str) -> str:
    sources = {place: name for name, place in PAGES.items()}
    source = sources.get(page, page.removeprefix("files/") if page.startswith("files/") else f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _on_site(path: str) -> str:
    place = path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path, f"files/{path}")
    if place.endswith(".ipynb"):
        return place.removesuffix("ipynb") + "md"  # notebooks.py makes the page
    return f"{place}/index.md" if (ROOT / path).is_dir() else place


def _generated(config: MkDocsConfig, path: str, place: str) -> File:
    if not (ROOT / path).is_dir():
        found = File.generated(config, place, abs_src_path=str(ROOT / path))
    else:
        names = sorted(file.name for file in (ROOT / path).iterdir())
        lines = [f"# {path}", "", *(f"- [{name}]({name})" for name in names)]
        found = File.generated(config, place, content="\n".join(lines))
    found.inclusion = InclusionLevel.NOT_IN_NAV
    return found
