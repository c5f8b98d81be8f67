"""Debian's Chromium, driven by Playwright, on an API of this process."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import MakeLive, live, make_api
from tests.browser.scene import Scene
from tests.conftest import Connect

__all__ = ["live", "make_api"]

_OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


# Not of the session: while Playwright is open, its event loop counts as running, and no other test could run one.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser; skips where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=_OPTIONS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program of axe-core, which looks for what people with a disability cannot use; skips where npm has none."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm to fetch axe-core by")
    place = tmp_path_factory.mktemp("axe")
    try:
        done = subprocess.run(
            [npm, "install", "axe-core@4", "--no-audit", "--no-fund"], cwd=place, capture_output=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        pytest.skip("axe-core cannot be had here")
    program: Path = place / "node_modules" / "axe-core" / "axe.min.js"
    if done.returncode or not program.exists():
        pytest.skip("axe-core cannot be had here")
    return program.read_text()


class Screens:
    """Opens pages and keeps what they did wrong: errors, requests elsewhere, breaches of the policy."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser = browser
        self.url = url
        self.wrong: list[str] = []

    @contextmanager
    def open(self, path: str, *, width: int = 1280, dark: bool = False, **options: Any) -> Iterator[Any]:
        context = self.browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", **options
        )
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", lambda asked: self._asked(asked.url))
        try:
            page.goto(self.url + path)
            yield page
        finally:
            context.close()

    def _asked(self, url: str) -> None:
        if not url.startswith((self.url + "/", "data:")):
            self.wrong.append(f"a request to {url}")


@pytest.fixture
def scene(connect: Connect) -> Scene:
    """Jobs in every status."""
    return Scene(connect())


@pytest.fixture
def screens(browser: Any, live: MakeLive, scene: Scene) -> Iterator[Screens]:
    """The dashboard of the scene; fails when a page did something wrong."""
    found = Screens(browser, live().url)
    yield found
    assert found.wrong == []
