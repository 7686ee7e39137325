"""Tests of the documentation in Chromium; `make docs-test` builds the site and runs them.

Every page is opened at the widths of a phone and of a desktop. The browser can reach only the
site.
"""

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from playwright.sync_api import TimeoutError as TookTooLong

SITE = Path(__file__).parents[2] / "site"
WIDTHS = {"phone": (390, 844), "desk": (1280, 900)}
FIGURES = """async () => {
    const all = [...document.querySelectorAll("article img")];
    for (const one of all) { one.loading = "eager"; await one.decode().catch(() => {}); }
    return all.filter(one => one.naturalWidth === 0).map(one => one.src);
}"""
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serve the site, and return its address."""
    assert (SITE / "index.html").exists(), "there is no site: run make docs-test, which builds it"
    handler = functools.partial(_Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start the installed Chromium, or else the Chromium of playwright."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    sandbox = [] if os.getuid() else ["--no-sandbox"]  # Chromium's sandbox refuses root
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=sandbox)
        yield started
        started.close()


def opened(browser: Browser, width: str, faults: list[str]) -> Page:
    """Return a new page that records errors, failed requests, and requests to other hosts."""
    across, down = WIDTHS[width]
    page = browser.new_page(viewport={"width": across, "height": down})
    page.on("console", lambda one: faults.append(one.text) if one.type == "error" else None)
    page.on("pageerror", lambda one: faults.append(str(one)))
    page.on("requestfailed", lambda one: faults.append(f"failed: {one.url}"))
    page.on(
        "request",
        lambda one: (
            None
            if one.url.startswith(("http://127.0.0.1:", "data:", "blob:"))
            else faults.append(f"from another host: {one.url}")
        ),
    )
    return page


def test_every_page_renders(browser: Browser, address: str) -> None:
    pages = sorted(file.parent.relative_to(SITE) for file in SITE.rglob("index.html"))
    assert len(pages) > 40
    wrong: dict[str, list[str]] = {}
    faults: list[str] = []
    page = opened(browser, "phone", faults)
    for path in pages:
        faults.clear()
        page.goto(f"{address}/{path}/", wait_until="networkidle")
        faults += [f"no picture: {source}" for source in page.evaluate(FIGURES)]
        for width, (across, down) in WIDTHS.items():
            page.set_viewport_size({"width": across, "height": down})
            try:  # the layout needs a moment after a change of the width
                page.wait_for_function(FITS, timeout=20_000)
            except TookTooLong:
                faults.append(f"it scrolls sideways on a {width}")
            if not page.locator("article h1").first.is_visible():
                faults.append(f"it has no heading on a {width}")
        if faults:
            wrong[str(path)] = list(faults)
    page.close()
    assert wrong == {}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_search_finds_an_algorithm(browser: Browser, address: str, width: str) -> None:
    faults: list[str] = []
    page = opened(browser, width, faults)
    page.goto(address, wait_until="networkidle")
    if width == "phone":
        page.locator("label[for=__search]").first.click()
    page.locator("input[name=query]").press_sequentially("schedule_free_adamw")
    found = page.locator(".md-search-result__link[href*='#functional_optim.schedule_free_adamw']")
    found.wait_for()
    found.click()
    page.wait_for_url("**/reference/algorithms/**")
    assert page.locator("[id='functional_optim.schedule_free_adamw']").is_visible()
    assert faults == []
    page.close()


def test_a_notebook_shows_its_outputs_and_figures(browser: Browser, address: str) -> None:
    faults: list[str] = []
    page = opened(browser, "desk", faults)
    page.goto(f"{address}/tutorials/compose_an_optimizer/", wait_until="networkidle")
    assert page.locator("article .jp-OutputArea-output").count() > 0
    assert faults == []
    page.close()
