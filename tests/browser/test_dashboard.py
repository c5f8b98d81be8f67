"""The dashboard in a browser: every page, narrow and wide, and that actions act."""

import os
import re
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from pgqueue.api.access import new_key
from tests.api.conftest import MakeLive
from tests.browser.conftest import Screens
from tests.browser.scene import BIG, HOSTILE, Scene
from tests.meet import wait_until

PAGES = ["", "/jobs", "/failures", "/queues", "/schedules", "/workers", "/dead-letters", "/system"]
SHOTS = os.environ.get("PGQUEUE_SCREENSHOTS")


def look(page: Any, name: str, width: int, theme: str = "light") -> None:
    """Checks what must hold on every page."""
    assert page.title() != "pwned"
    assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than {width}"
    assert page.locator("#main h1").count() == 1
    if SHOTS:
        page.screenshot(
            path=Path(SHOTS) / f"{name.strip('/').replace('/', '-') or 'overview'}-{width}-{theme}.png", full_page=True
        )


def refresh(page: Any) -> None:
    """Has the page fetch itself anew, and returns once the differences, of which a mark of ours is one, are put in."""
    page.evaluate("document.getElementById('live').setAttribute('data-old', '')")
    page.keyboard.press("r")
    page.wait_for_selector("#live:not([data-old])")


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_fits_and_asks_for_nothing_elsewhere(screens: Screens, scene: Scene, width: int, dark: bool) -> None:
    paths = [*PAGES, f"/jobs/{scene.hostile}", f"/jobs/{scene.running[0]}"]
    with screens.open("/dashboard", width=width, dark=dark) as page:
        for path in paths:
            response = page.goto(f"{screens.url}/dashboard{path}")
            assert response.status == 200, path
            assert "script-src 'self'" in response.headers["content-security-policy"]
            look(page, path if len(path) < 20 else path[:12], width, "dark" if dark else "light")


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_serious(screens: Screens, scene: Scene, axe: str, width: int, dark: bool) -> None:
    paths = [*PAGES, f"/jobs/{scene.hostile}", f"/jobs/{scene.running[0]}"]
    found = {}

    def examine(what: str) -> None:
        page.evaluate(axe)
        for one in page.evaluate("axe.run()")["violations"]:
            if one["impact"] in ("serious", "critical"):
                found[what, one["id"]] = [(place["target"], place["failureSummary"]) for place in one["nodes"]]

    # A policy that lets only our own scripts run lets no test's run either.
    with screens.open("/dashboard", width=width, dark=dark, bypass_csp=True) as page:
        for path in paths:
            page.goto(f"{screens.url}/dashboard{path}")
            examine(path)
        page.goto(f"{screens.url}/dashboard/jobs?status=pending")
        page.locator("input[name=id]").first.check()
        page.click("button:text('Cancel')")
        page.wait_for_selector("button:text-is('Cancel 1 job')")
        examine("bulk")
        page.goto(f"{screens.url}/dashboard")
        page.keyboard.press("?")
        page.wait_for_selector("#help[open]")
        examine("help")
        add_key(scene.session, "look", "read")
        page.goto(f"{screens.url}/dashboard/login")
        examine("login")
    assert found == {}


@pytest.mark.parametrize("width", [740, 400, 360])
def test_every_tab_is_in_sight(screens: Screens, width: int) -> None:
    with screens.open("/dashboard/jobs", width=width) as page:
        for bar in (".side nav a", "nav.tabs a"):
            tabs = page.locator(bar).all()
            assert len(tabs) == 8
            for tab in tabs:
                place = tab.bounding_box()
                assert place["x"] >= 0, tab.inner_text()
                assert place["x"] + place["width"] <= width, tab.inner_text()


def test_tabs_count_only_what_all_of_them_show(screens: Screens, scene: Scene) -> None:
    scene.enqueue("other", queue="elsewhere")
    with screens.open("/dashboard/jobs") as page:
        assert page.locator("nav.tabs span").count() > 0
        page.goto(f"{screens.url}/dashboard/jobs?queue=elsewhere")
        assert page.locator("nav.tabs a").count() > 1
        # These are counts of all queues.
        assert page.locator("nav.tabs span").count() == 0


def test_hostile_text_is_text_and_big_integers_are_exact(screens: Screens, scene: Scene) -> None:
    with screens.open(f"/dashboard/jobs/{scene.hostile}") as page:
        assert HOSTILE in page.inner_text("#main")
        assert page.locator("#main img").count() == 0
        assert BIG in page.inner_text("#payload")
        # Whatever a worker says of how long it ran.
        timeline = page.inner_text(".timeline")
        assert timeline.index("Enqueued") < timeline.index("Attempt 1 began") < timeline.index("Attempt 1 failed")
        # What is put in later is text too.
        refresh(page)
        assert page.locator("#main img").count() == 0
        assert page.title() != "pwned"
        page.goto(f"{screens.url}/dashboard/jobs?q=hunter2")
        assert "hunter2" not in page.inner_text("table")


def test_a_change_shows_within_a_second_or_so(screens: Screens, scene: Scene) -> None:
    job_id = scene.running[0]
    with screens.open(f"/dashboard/jobs/{job_id}") as page:
        assert "running" in page.inner_text("#why")
        page.wait_for_timeout(1500)
        scene.complete(job_id, '{"done": 12345678901234567890}')
        page.wait_for_selector(".head .badge.completed", timeout=3000)
        assert "12345678901234567890" in page.inner_text("#result")


def test_actions_on_a_job_a_queue_and_a_schedule(screens: Screens, scene: Scene) -> None:
    with screens.open(f"/dashboard/jobs/{scene.hostile}") as page:
        page.click("text=Retry now")
        page.wait_for_selector(".flash.good")
        assert scene.status(scene.hostile) == "pending"
        page.click("button:text-is('Cancel')")
        page.click("#confirm button[value=yes]")
        page.wait_for_selector("text=It is cancelled.")
        assert scene.status(scene.hostile) == "cancelled"

        page.goto(f"{screens.url}/dashboard/queues")
        page.click("article:has(h2 a:text-is('images')) button:text-is('Resume')")
        page.wait_for_selector(".flash.good")
        page.click("article:has(h2 a:text-is('mail')) summary")
        page.fill("article:has(h2 a:text-is('mail')) input[name=soft_limit]", "1234")
        page.click("article:has(h2 a:text-is('mail')) button:text-is('Set limits')")
        page.wait_for_selector("text=slowed above 1,234")

        page.goto(f"{screens.url}/dashboard/schedules")
        page.click("tr:has-text('nightly') >> text=Run now")
        page.wait_for_selector("text=enqueued job")
        page.click("tr:has-text('nightly') >> text=Disable")
        page.wait_for_selector("tr:has-text('nightly') .badge:text('disabled')")
    rows = scene.session.execute("select actor, verb from pgqueue.audit order by audit_id").fetchall()
    # The pause and what it was made with came from SQL.
    verbs = [verb for actor, verb in rows if actor == "api"]
    assert verbs == ["retry", "cancel", "resume", "set_queue", "run_schedule", "put_schedule"]


def test_bulk_actions_say_how_many_before(screens: Screens, scene: Scene) -> None:
    def count(sql: str) -> int:
        row = scene.session.execute(f"select count(*) from pgqueue.jobs where {sql}").fetchone()
        assert row
        return int(row[0])

    waiting = count("queue = 'mail' and status = 'pending'")
    with screens.open("/dashboard/jobs?queue=mail&status=pending") as page:
        later = scene.enqueue("send_email", queue="mail")
        page.locator("input[name=id]").first.check()
        assert page.inner_text("#selected-count") == "1 selected"
        page.click("button:text('Cancel')")
        page.click("button:text-is('Cancel 1 job')")
        page.wait_for_selector("text=1 job is cancelled.")
        assert count("status = 'cancelled'") == 1

        page.select_option("select[name=target]", "all")
        page.click("button:text('Cancel')")
        assert f"Cancel {waiting} jobs?" in page.inner_text("h1")
        newest = scene.enqueue("send_email", queue="mail")
        page.click(f"button:text-is('Cancel {waiting} jobs')")
        page.wait_for_selector(f"text={waiting} jobs are cancelled.")
    assert scene.status(later) == "cancelled"
    assert scene.status(newest) == "pending"

    dead = count("status = 'dead_letter' and job_type = 'send_email'") + count(
        "status = 'dead_letter' and job_type = 'daily_report'"
    )
    with screens.open("/dashboard/dead-letters?q=KeyError") as page:
        page.select_option("select[name=target]", "all")
        page.click("#bulk button:text('Retry')")
        page.click(f"button:text-is('Retry {dead} jobs')")
        page.wait_for_selector(f"text={dead} jobs are pending again.")
        page.goto(f"{screens.url}/dashboard/dead-letters")
        page.click("li.letter button:text('Discard')")
        page.click("button:text-is('Discard 1 job')")
        page.wait_for_selector("text=No dead letters")


@pytest.mark.parametrize("path", ["/dead-letters?q=KeyError", "/jobs?queue=mail&status=pending"])
def test_bulk_buttons_wait_for_a_selection(screens: Screens, scene: Scene, path: str) -> None:
    with screens.open(f"/dashboard{path}") as page:
        buttons, first = page.locator("#bulk button"), page.locator("input[name=id]").first

        def disabled() -> set[bool]:
            return {button.is_disabled() for button in buttons.all()}

        assert disabled() == {True}
        first.check()
        assert disabled() == {False}
        first.uncheck()
        assert disabled() == {True}
        page.select_option("select[name=target]", "all")
        assert disabled() == {False}
        page.select_option("select[name=target]", "selected")
        refresh(page)
        assert disabled() == {True}
        # Keys tick the row they are at.
        page.keyboard.press("j")
        page.keyboard.press("D" if "dead" in path else "C")
        page.wait_for_selector("h1:has-text(' 1 job?')")


def test_ticks_stay_when_the_list_changes(screens: Screens, scene: Scene) -> None:
    with screens.open("/dashboard/jobs?queue=mail&status=pending") as page:
        ticked = page.locator("input[name=id]").nth(1)
        chosen = ticked.get_attribute("value")
        ticked.check()
        page.select_option("select[name=target]", "all")
        page.click("h1")
        for _ in range(2):
            later = scene.enqueue("send_email", queue="mail")
            page.wait_for_selector(f"#j-{later}")
        assert page.inner_text("#selected-count") == "1 selected"
        assert page.is_checked(f"input[value='{chosen}']")
        assert page.input_value("select[name=target]") == "all"


def test_keys_move_select_and_lead_to_pages(screens: Screens) -> None:
    with screens.open("/dashboard") as page:
        page.keyboard.press("g")
        page.keyboard.press("j")
        page.wait_for_url(re.compile("/dashboard/jobs$"))
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("x")
        assert page.locator("tr.here.ticked").count() == 1
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.name") == "q"
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        page.wait_for_selector("#help[open] h2:text-is('Keyboard shortcuts')")
        page.keyboard.press("Escape")
        assert page.inner_text("#help-button") == "Shortcuts"
        page.keyboard.press("t")
        page.keyboard.press("t")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile("/dashboard/jobs/[0-9a-f-]{36}$"))


def test_an_empty_queue_says_what_to_do(browser: Any, live: MakeLive) -> None:
    screens = Screens(browser, live().url)
    with screens.open("/dashboard", width=400) as page:
        for path in PAGES:
            page.goto(f"{screens.url}/dashboard{path}")
            look(page, f"empty{path}", 400)
    assert screens.wrong == []


def add_key(session: psycopg.Connection[Any], name: str, *scopes: str) -> str:
    key, digest, shown = new_key()
    session.execute("select pgqueue.create_key(%s, %s, %s, %s, null, null)", [name, digest, shown, list(scopes)])
    return key


def test_with_keys_one_signs_in_and_a_reader_acts_on_nothing(screens: Screens, scene: Scene) -> None:
    reader, operator = add_key(scene.session, "look", "read"), add_key(scene.session, "ops", "operate")
    with screens.open("/dashboard/jobs?queue=mail") as page:
        assert "/dashboard/login" in page.url
        look(page, "login", 1280)
        page.fill("input[name=key]", reader)
        page.click("button:text-is('Sign in')")
        page.wait_for_url(re.compile(r"/dashboard/jobs\?queue=mail$"))
        for path in [*PAGES, f"/jobs/{scene.hostile}"]:
            page.goto(f"{screens.url}/dashboard{path}")
            assert page.locator("#live form[method=post]").count() == 0, path
        page.click("text=Sign out")
        page.wait_for_url(re.compile("/dashboard/login$"))
        page.fill("input[name=key]", operator)
        page.click("button:text-is('Sign in')")
        page.wait_for_selector(".figure")
        page.goto(f"{screens.url}/dashboard/queues")
        page.click("article:has(h2 a:text-is('images')) button:text-is('Resume')")
        page.wait_for_selector(".flash.good")
    row = scene.session.execute("select actor from pgqueue.audit order by audit_id desc limit 1").fetchone()
    assert row == ("key ops",)
    form = {"id": scene.hostile, "back": "/dashboard"}
    own = {"Sec-Fetch-Site": "same-origin"}
    with httpx.Client(base_url=screens.url, cookies={"pgqueue_key": reader}) as client:
        assert client.post("/dashboard/jobs/retry", data=form, headers=own).status_code == 403
    with httpx.Client(base_url=screens.url, cookies={"pgqueue_key": operator}) as client:
        for headers in (
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {},
        ):
            assert client.post("/dashboard/jobs/retry", data=form, headers=headers).status_code == 403
        assert scene.status(scene.hostile) == "dead_letter"
        assert client.post("/dashboard/jobs/retry", data=form, headers={"Origin": screens.url}).status_code == 303
    assert scene.status(scene.hostile) == "pending"


def test_a_database_that_is_away_is_said_on_the_page(live: MakeLive, connect: Any) -> None:
    served = live()
    assert served.http.get("/dashboard").status_code == 200
    connect().execute("alter schema pgqueue rename to elsewhere")
    wait_until(lambda: served.http.get("/dashboard/system").status_code >= 500, 10)
    answer = served.http.get("/dashboard/system")
    assert "<h1>" in answer.text
    assert "elsewhere" not in answer.text
