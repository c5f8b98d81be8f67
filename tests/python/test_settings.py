"""Settings: read once, checked, and clear about what is wrong."""

import math
from pathlib import Path

import pytest

from pgqueue.errors import ConfigError
from pgqueue.settings import Settings


def test_defaults_are_those_of_the_documentation() -> None:
    settings = Settings.load(env={})
    assert (settings.dsn, settings.wake, settings.sweep_interval, settings.poll_interval, settings.grace) == (
        None, "notify", 1.0, 1.0, 30.0,
    )  # fmt: skip


def test_a_lease_is_a_day_at_most() -> None:
    assert Settings.load(env={"PGQUEUE_LEASE": "86400"}).lease == 86_400
    with pytest.raises(ConfigError, match=r"LEASE is '86400\.5'; it must be seconds greater than 0, and at most 86400"):
        Settings.load(env={"PGQUEUE_LEASE": "86400.5"})


def test_variables_are_read_and_overrides_win() -> None:
    env = {
        "PGQUEUE_DSN": "host=a",
        "PGQUEUE_GRACE": "2.5",
        "PGQUEUE_PREPARE": "off",
        "PGQUEUE_DATA_DIR": "/x",
        "PGQUEUE_POOL_SIZE": " 3 ",
    }
    settings = Settings.load(env=env, dsn="host=b", grace=None)
    assert settings == Settings(dsn="host=b", grace=2.5, prepare=False, data_dir=Path("/x"), pool_size=3)


def test_an_empty_variable_is_no_value() -> None:
    assert Settings.load(env={"PGQUEUE_DSN": " "}).dsn is None


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("PGQUEUE_GRACE", "soon", "PGQUEUE_GRACE is 'soon'; it must be a number of seconds"),
        ("PGQUEUE_POLL_INTERVAL", "0", "PGQUEUE_POLL_INTERVAL is '0'; it must be seconds greater than 0"),
        ("PGQUEUE_POLL_INTERVAL", "nan", "PGQUEUE_POLL_INTERVAL is 'nan'"),
        ("PGQUEUE_POOL_SIZE", "0", "PGQUEUE_POOL_SIZE is '0'; it must be 1 or more"),
        ("PGQUEUE_POOL_SIZE", "1.5", "PGQUEUE_POOL_SIZE is '1.5'; it must be a whole number"),
        ("PGQUEUE_WAKE", "push", "PGQUEUE_WAKE is 'push'; it must be 'notify' or 'poll'"),
        ("PGQUEUE_GRACE", "-1", "PGQUEUE_GRACE is '-1'; it must be seconds, 0 or more"),
        (
            "PGQUEUE_LOG_LEVEL",
            "loud",
            "PGQUEUE_LOG_LEVEL is 'loud'; it must be debug, info, warning, error or critical",
        ),
        ("PGQUEUE_LOG_FORMAT", "xml", "PGQUEUE_LOG_FORMAT is 'xml'; it must be 'auto', 'json' or 'console'"),
        ("PGQUEUE_ROOT_PATH", "queue", "PGQUEUE_ROOT_PATH is 'queue'; it must be a path such as /queue"),
        ("PGQUEUE_ROOT_PATH", "/queue/", "PGQUEUE_ROOT_PATH is '/queue/'"),
        ("PGQUEUE_ROOT_PATH", "//queue", "PGQUEUE_ROOT_PATH is '//queue'"),
        ("PGQUEUE_ROOT_PATH", "/a/../b", "PGQUEUE_ROOT_PATH is '/a/../b'"),
        ("PGQUEUE_ROOT_PATH", "/a?b", "PGQUEUE_ROOT_PATH is '/a?b'"),
        ("PGQUEUE_PREPARE", "maybe", "PGQUEUE_PREPARE is 'maybe'; it must be on or off"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(variable: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match="must be") as refused:
        Settings.load(env={variable: value})
    assert said in str(refused.value)


def test_a_wrong_argument_is_named_as_it_was_given() -> None:
    with pytest.raises(ConfigError, match=r"^poll_interval is 0; it must be seconds greater than 0$"):
        Settings.load(env={"PGQUEUE_POLL_INTERVAL": "5"}, poll_interval=0)
    with pytest.raises(ConfigError, match=r"^wake is 'push'; it must be 'notify' or 'poll'$"):
        Settings(wake="push")  # type: ignore[arg-type]


def test_an_unknown_override_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'dns'"):
        Settings.load(env={}, dns="host=a")


def test_settings_do_not_change() -> None:
    with pytest.raises(AttributeError):
        Settings().grace = math.inf  # type: ignore[misc]
