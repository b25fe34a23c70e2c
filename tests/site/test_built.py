"""The built site: it asks no other host for anything, and fits a screen and a telephone. `make docs` runs this."""

import functools
import http.server
import os
import re
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest

SITE = Path(os.environ.get("LOCANT_SITE", "missing")).absolute()
pytestmark = pytest.mark.skipif("LOCANT_SITE" not in os.environ, reason="make docs builds the site and runs this test")
RESOURCES = {("link", "href"), ("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src")}


def pages() -> list[Path]:
    return sorted(SITE.rglob("*.html"))


class Resources(HTMLParser):
    """Collects what a browser loads with a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if (tag, name) in RESOURCES and value]


def test_the_site_is_there():
    assert len(pages()) > 25
    for name in ("index", "deploy", "notebooks/adapt-a-sentence-encoder", "reference/attention", "security"):
        assert (SITE / f"{name}.html").stat().st_size > 5000
    assert "locant.attend" in (SITE / "reference/attention.html").read_text(encoding="utf-8")


def test_pages_load_nothing_from_other_hosts():
    for page in pages():
        for resource in Resources(page).found:
            assert not re.match(r"(https?:)?//", resource), f"{page.name} loads {resource}"
            if not resource.startswith(("data:", "#")):
                place = (page.parent / resource.partition("?")[0].partition("#")[0]).resolve()
                assert place.exists() or page.name == "404.html", f"{page.name} loads {resource}, which is missing"
    for style in SITE.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style.name


def test_arguments_in_two_columns_become_a_list():
    page = (SITE / "reference/models.html").read_text(encoding="utf-8")
    entries = re.findall(r"<li>\s*(?:<p>)?<code>(\w+)</code> ", page.partition('id="locant.adapt"')[2])
    names = ["text", "budget", "contrast", "train", "out", "scores", "length", "pooling", "report_to", "on_stage",
             "on_evaluation", "on_result"]  # fmt: skip
    assert entries[: len(names)] == names


@pytest.fixture(scope="module")
def address():
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("width", [1280, 400])
def test_no_page_is_wider_than_the_window(browser, address, width):
    context = browser.new_context(viewport={"width": width, "height": 900})
    page, problems = context.new_page(), []
    page.on("request", lambda request: problems.append(request.url) if not request.url.startswith(address) else None)
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    for path in pages():
        if path.name == "report.html":  # pages of `locant compare` have tests of their own
            continue
        page.goto(f"{address}/{path.relative_to(SITE).as_posix()}")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{path.name} is {wide} pixels wide in a window of {width}"
    context.close()
    assert problems == []


def test_the_search_finds_a_name(browser, address):
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(f"{address}/index.html")
    page.fill("input.md-search__input", "softcap")
    page.wait_for_selector(".md-search-result__item a[href*='attend']", state="attached", timeout=20_000)
    context.close()
