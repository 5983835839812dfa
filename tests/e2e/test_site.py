"""Build the site as `make site` does, and look at it in headless Chromium.

No link is dead, nothing is loaded from elsewhere, and the pages work on wide, narrow and dark
screens.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import Browser
from launching import PATIENCE_S, ROOT, wait_for

pytestmark = pytest.mark.integration
LEFT_OUT = shutil.ignore_patterns(".*", "outputs", "build", "__pycache__", "*.egg-info")
# Attributes whose URL a browser loads by itself. <link rel=canonical> is only a name.
LOADED = {
    "audio": "src", "embed": "src", "iframe": "src", "image": "href", "img": "src", "input": "src",
    "object": "data", "script": "src", "source": "src", "video": "src",
}  # fmt: skip
NAMES_ONLY = {"canonical", "next", "prev"}
WIDTHS = {"wide": 1280, "narrow": 390}
# Evaluated in the page, until the value is not empty.
COPY_BUTTONS = "document.querySelectorAll('pre button[data-md-type=copy]').length"
RESULTS = """[...document.querySelectorAll("*")].filter(e => e.shadowRoot).flatMap(
  e => [...e.shadowRoot.querySelectorAll("[role=option]")].map(a => new URL(a.href).pathname))"""


def copied(directory: Path) -> Path:
    """Copy the checkout, because a build writes into it and a test damages its pages."""
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("zensical is not installed; pip install -c constraints.txt -e '.[docs]'")
    return shutil.copytree(ROOT, directory / "checkout", ignore=LEFT_OUT, symlinks=True)


def build(checkout: Path) -> subprocess.CompletedProcess[str]:
    """Run the two commands of `make site`. Return the first one that fails, or else the second."""
    for words in (["scripts/site_pages.py"], ["-m", "zensical", "build", "--clean", "--strict"]):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=checkout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
        if done.returncode:
            break
    return done


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout = copied(tmp_path_factory.mktemp("site"))
    done = build(checkout)
    assert done.returncode == 0, done.stdout
    assert "No issues found" in done.stdout
    return checkout / "build" / "site"


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site."""
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(site))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def set_screen(browser: Browser, width: int, scheme: str = "light") -> None:
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=900,
        deviceScaleFactor=1,
        mobile=False,
    )
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.call("Emulation.setEmulatedMedia", features=[feature])


def value_of(browser: Browser, expression: str):
    """Wait until the value of an expression is not empty, and return it."""
    values = []

    def is_found() -> bool:
        values.append(browser.evaluate(expression))
        return bool(values[-1])

    wait_for(is_found, what=expression)
    return values[-1]


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("nowhere.md", "docs/at.md links to nowhere.md"),
        ("logs.md#nowhere", "anchor does not exist"),
    ],
    ids=["page", "anchor"],
)
def test_a_dead_link_fails_the_build(link: str, message: str, tmp_path: Path) -> None:
    checkout = copied(tmp_path)
    with (checkout / "docs" / "at.md").open("a") as page:
        page.write(f"\n[dead]({link})\n")
    done = build(checkout)
    assert done.returncode != 0, done.stdout
    assert message in done.stdout


class Loads(HTMLParser):
    """Collect the URLs that a browser loads while it shows a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag == "link" and values.get("rel") not in NAMES_ONLY:
            self.urls.append(values.get("href") or "")
        elif tag in LOADED:
            self.urls.append(values.get(LOADED[tag]) or "")


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    urls = {url for path in site.rglob("*.html") for url in Loads(path.read_text()).urls}
    for path in site.rglob("*.css"):
        urls |= set(re.findall(r"(?:url\(|@import\s*)[\"']?([^\"')\s]+)", path.read_text()))
    assert any("bundle" in url for url in urls)
    assert [url for url in urls if re.match(r"(https?:)?//", url)] == []


def pages(site: Path) -> list[str]:
    return sorted(path.parent.relative_to(site).as_posix() for path in site.rglob("index.html"))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_drawn(
    width: str, scheme: str, site: Path, address: str, browser: Browser
) -> None:
    set_screen(browser, WIDTHS[width], scheme)
    for page in pages(site):
        browser.open(f"{address}{page}/")
        value_of(browser, "document.querySelector('article h1, article h2')?.textContent")
        assert browser.errors() == [], page
        requested = [url for url in browser.requested() if not url.startswith("data:")]
        assert [url for url in requested if not url.startswith(address)] == [], page
        overflow = browser.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert overflow <= 0, f"{page} is too wide by {overflow} pixels"
        broken = "[...document.images].filter(e => e.complete && !e.naturalWidth).map(e => e.src)"
        assert browser.evaluate(broken) == [], page
        shown = browser.evaluate("document.body.dataset.mdColorScheme")
        assert shown == {"light": "default", "dark": "slate"}[scheme]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_search_finds_a_key(width: str, address: str, browser: Browser) -> None:
    set_screen(browser, WIDTHS[width])
    browser.open(address)
    opener = ".md-search__button" if width == "wide" else "label[for=__search]"
    value_of(browser, f"document.querySelector({opener!r}) !== null")
    browser.evaluate(f"document.querySelector({opener!r}).click()")
    value_of(browser, "document.activeElement.shadowRoot?.activeElement?.matches('input')")
    browser.call("Input.insertText", text="trainer.batch_size")
    assert value_of(browser, RESULTS)[0] == "/configuration/"
    assert browser.errors() == []


def test_code_has_a_copy_button(address: str, browser: Browser) -> None:
    set_screen(browser, WIDTHS["wide"])
    browser.open(address)
    blocks = browser.evaluate("document.querySelectorAll('article pre > code').length")
    assert blocks > 0 and value_of(browser, COPY_BUTTONS) == blocks
