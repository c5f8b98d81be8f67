"""The benchmark: every measure on a real database, what it tells, and what it leaves behind."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg.conninfo import make_conninfo

from pgqueue.bench import plot, report, statements
from pgqueue.bench.children import BenchError, clients, workers
from pgqueue.bench.draining import Drained
from pgqueue.bench.figures import Measure, Place, Ratio, Results, Sample, Variant, met, percentile
from pgqueue.bench.machine import Meter, ServerProcesses
from pgqueue.bench.measures import ALL, LONG
from pgqueue.bench.measures.submit import submitted
from pgqueue.bench.run import run
from pgqueue.bench.scratch import PREFIX, Scratch
from pgqueue.bench.site import Site, Sizes
from pgqueue.cli import root
from pgqueue.errors import ConfigError
from pgqueue.settings import Settings
from tests.conftest import Connect
from tests.servers import OwnServer, ServerUnderTest

SMALL = Sizes(jobs=500, seconds=0.3)
#: Too long for what they would show at this size.
LEFT_OUT = {"scale", "ordered", "queues"}


@pytest.fixture(scope="module")
def site(server: ServerUnderTest) -> Iterator[Site]:
    with Scratch(server.dsn, Settings(dsn=server.dsn)) as scratch:
        yield Site(scratch, SMALL)


def some_variants() -> list[Any]:
    """The last of each measure; of those that are taken only when named the first, which is the smallest."""
    some = [(measure, measure.variants[-1]) for measure in ALL if measure.name not in LEFT_OUT]
    some += [(measure, measure.variants[0]) for measure in LONG]
    return [pytest.param(measure, variant, id=f"{measure.name}: {variant.name}") for measure, variant in some]


def scratch_databases(connection: psycopg.Connection[Any]) -> list[str]:
    rows = connection.execute("select datname from pg_database where datname like %s", (PREFIX + "%",)).fetchall()
    return [name for (name,) in rows]


def invoke(database: str, *args: str) -> Result:
    return CliRunner().invoke(root, ["bench", *args], env={"PGQUEUE_DSN": database})


class TestMeasures:
    @pytest.mark.xdist_group("bench")
    @pytest.mark.parametrize(("measure", "variant"), some_variants())
    def test_gives_its_figures(self, site: Site, measure: Measure, variant: Variant) -> None:
        sample = variant.run(site)
        assert sample.figures
        assert all(value >= 0 for value in sample.figures.values())
        if "jobs_per_s" in sample.figures:
            assert sample.figures["jobs_per_s"] > 0

    @pytest.mark.xdist_group("bench")
    def test_clients_submit_as_fast_as_told(self, site: Site) -> None:
        with site.scratch.copy() as database:
            sample = submitted(
                database, Site(site.scratch, Sizes(jobs=500, seconds=1.0)), 1, "insert", plain=False, rate=20
            )
        # As many as are due, or fewer where the machine is slow; without a rate it would be hundreds.
        assert 1 <= sample.figures["jobs_per_s"] <= 25

    def test_have_names_of_their_own_and_ratios_between_variants_that_exist(self) -> None:
        names = [measure.name for measure in ALL]
        assert len(set(names)) == len(names)
        places = {(measure.name, variant.name) for measure in ALL for variant in measure.variants}
        for measure in ALL:
            assert len({variant.name for variant in measure.variants}) == len(measure.variants)
            for ratio in measure.ratios:
                assert {ratio.of[:2], ratio.over[:2]} <= places


class TestRun:
    def test_takes_all_variants_before_it_takes_one_again(self) -> None:
        taken: list[str] = []

        def variant(name: str) -> Variant:
            def take(site: Site) -> Sample:
                taken.append(name)
                return Sample({"jobs_per_s": float(len(taken))})

            return Variant(name, take)

        measure = Measure("m", "title", [variant("a"), variant("b")])
        results = run(None, [measure], 3, lambda line: None)  # type: ignore[arg-type]
        assert taken == ["a", "b", "b", "a", "a", "b"]
        assert results.values(Place("m", "a")) == [1.0, 4.0, 5.0]

    def test_goes_on_after_a_failure_and_tells_it(self) -> None:
        def fail(site: Site) -> Sample:
            raise BenchError("no")

        measure = Measure("m", "title", [Variant("a", fail), Variant("b", lambda site: Sample({"seconds": 1.0}))])
        results = run(None, [measure], 1, lambda line: None)  # type: ignore[arg-type]
        assert results.faults == ["m, a: no"]
        assert results.median(Place("m", "b", "seconds")) == 1.0

    def test_tells_what_it_has_when_it_is_interrupted(self) -> None:
        def interrupt(site: Site) -> Sample:
            raise KeyboardInterrupt

        measure = Measure("m", "title", [Variant("a", lambda site: Sample({"seconds": 1.0})), Variant("b", interrupt)])
        results = run(None, [measure], 2, lambda line: None)  # type: ignore[arg-type]
        assert results.interrupted
        assert results.values(Place("m", "a", "seconds")) == [1.0]


class TestFigures:
    def test_a_ratio_is_taken_within_repetitions(self) -> None:
        results = Results()
        for of, over in ((10.0, 5.0), (100.0, 100.0), (30.0, 10.0)):
            results.add("m", "of", Sample({"jobs_per_s": of}))
            results.add("m", "over", Sample({"jobs_per_s": over}))
        ratio = Ratio("r", Place("m", "of"), Place("m", "over"), at_least=2)
        assert results.quotients(ratio) == [2.0, 1.0, 3.0]
        assert met(ratio, statistics.median(results.quotients(ratio))) is True

    def test_a_repetition_without_the_figure_is_left_out(self) -> None:
        results = Results()
        results.add("m", "of", None)
        results.add("m", "of", Sample({"jobs_per_s": 4.0}))
        results.add("m", "over", Sample({"jobs_per_s": 2.0}))
        results.add("m", "over", Sample({"jobs_per_s": 2.0}))
        assert results.quotients(Ratio("r", Place("m", "of"), Place("m", "over"))) == [2.0]
        assert results.median(Place("m", "of")) == 4.0

    def test_a_bar_may_be_a_limit_or_absent(self) -> None:
        place = Place("m", "v")
        assert met(Ratio("r", place, place, at_most=1.35), 1.4) is False
        assert met(Ratio("r", place, place), 1.4) is None

    def test_percentiles(self) -> None:
        assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
        assert percentile([1.0], 0.99) == 1.0
        assert percentile([], 0.5) == 0.0

    def test_rates_of_parts_of_a_drain(self) -> None:
        drained = Drained(100, 4.0, {}, [(1.0, 50), (3.0, 25), (4.0, 25)], [(0.0, 0.0), (4.0, 0.4)], 0)
        assert drained.rate(0, 50) == 50.0
        assert drained.rate(50, 100) == pytest.approx(50 / 3)
        assert drained.server_us(0, 50) == pytest.approx(2000.0)
        assert len(drained.course(4)) == 4


class TestMachine:
    def test_sees_only_the_processes_of_its_database(self, site: Site) -> None:
        with (
            site.scratch.copy() as mine,
            site.scratch.copy() as others,
            mine.connection() as connection,
            others.connection() as other,
        ):
            if ServerProcesses.find(connection) is None:
                pytest.skip("the server's processes are not to be seen from here")
            meter = Meter(connection)
            other.execute("select count(*) from generate_series(1, 1000000)")
            idle = meter.per_job(1)["server_us"]
            connection.execute("select count(*) from generate_series(1, 1000000)")
            assert meter.per_job(1)["server_us"] > idle + 20_000


class TestProcesses:
    def test_a_worker_that_ends_is_told_with_its_words(self, site: Site) -> None:
        with site.scratch.copy() as database:
            with database.connection() as connection:
                connection.execute("drop function pgqueue.worker_started")
            with pytest.raises(BenchError, match="worker_started"), workers(database):
                pass

    def test_a_client_that_fails_is_told_with_its_words(self, site: Site) -> None:
        told = pytest.raises(BenchError, match="no_such_role")
        with site.scratch.copy() as database, told, clients(database, 1, "no_such_role"):
            pass


class TestScratch:
    def test_needs_the_right_to_create_databases(self, server: ServerUnderTest, connect: Connect) -> None:
        connect().execute("create role pgqueue_bench_nobody login")
        try:
            dsn = make_conninfo(server.dsn, user="pgqueue_bench_nobody")
            with Scratch(dsn, Settings(dsn=dsn)) as scratch, pytest.raises(ConfigError, match="CREATEDB"):
                scratch.kept("empty")
        finally:
            connect().execute("drop role pgqueue_bench_nobody")

    def test_drops_everything(self, server: ServerUnderTest, connect: Connect) -> None:
        with Scratch(server.dsn, Settings(dsn=server.dsn)) as scratch:
            with scratch.copy() as database, database.connection() as connection:
                assert connection.execute("select count(*) from pgqueue.jobs").fetchone() == (0,)
            made = scratch.kept("empty").name
            assert made in scratch_databases(connect())
        assert made not in scratch_databases(connect())

    def test_a_database_whose_making_was_interrupted_is_dropped(
        self, own_server: OwnServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = statements.run

        def interrupted(connection: Any, statement: Any, **parameters: Any) -> None:
            real(connection, statement, **parameters)
            if "create database" in str(statement):
                raise KeyboardInterrupt

        monkeypatch.setattr(statements, "run", interrupted)
        with pytest.raises(KeyboardInterrupt), Scratch(own_server.dsn, Settings(dsn=own_server.dsn)) as scratch:
            scratch.kept("empty")
        with psycopg.connect(own_server.dsn) as connection:
            assert scratch_databases(connection) == []


class TestCommand:
    def test_answers_data_and_a_plot_and_leaves_the_users_jobs_alone(
        self, database: str, connect: Connect, tmp_path: Path
    ) -> None:
        connection = connect()
        connection.execute("insert into pgqueue.jobs (job_type) values ('noop')")
        svg = tmp_path / "plot.svg"
        result = invoke(database, "--quick", "--jobs", "500", "--only", "wal", "--json", "--svg", str(svg))
        assert result.exit_code == 0, result.stderr
        told = json.loads(result.stdout)
        (measure,) = told["measures"]
        assert measure["name"] == "wal"
        assert [variant["figures"]["wal_bytes"]["median"] > 0 for variant in measure["variants"]] == [True, True]
        assert measure["ratios"][0]["wanted"] == "<= 1.2"
        assert ElementTree.parse(svg).getroot().tag.endswith("svg")
        assert connection.execute("select job_type, status from pgqueue.jobs").fetchall() == [("noop", "pending")]

    def test_prints_a_table_for_people(self, database: str) -> None:
        result = invoke(database, "--quick", "--jobs", "500", "--only", "wal")
        assert result.exit_code == 0, result.stderr
        assert "wal: WAL of a job's whole life" in result.stdout
        assert "<= 1.2" in result.stdout

    def test_refuses_a_measure_that_is_none(self, database: str) -> None:
        result = invoke(database, "--only", "drain,speed")
        assert result.exit_code == 2
        assert "speed" in result.stderr

    def test_drops_its_databases_when_it_is_terminated(self, own_server: OwnServer) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "pgqueue", "bench", "--only", "held"],
            env={**os.environ, "PGQUEUE_DSN": own_server.dsn},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        with psycopg.connect(own_server.dsn, autocommit=True) as connection:
            deadline = time.monotonic() + 60
            while len(scratch_databases(connection)) < 2 and time.monotonic() < deadline:
                time.sleep(0.1)
            assert len(scratch_databases(connection)) >= 2
            process.send_signal(signal.SIGTERM)
            _, words = process.communicate(timeout=60)
            assert process.returncode == 130, words.decode()
            assert scratch_databases(connection) == []


class TestShown:
    DOCUMENT: Any = {  # noqa: RUF012
        "pgqueue": "1", "python": "3", "repetitions": 3, "machine": {"processors": 2},
        "server": {"server_version": "18"},
        "measures": [
            {
                "name": "m", "title": "a < b & c", "headline": "jobs_per_s",
                "variants": [
                    {"name": "<one>", "figures": {"jobs_per_s": {"median": 1234.5, "runs": [1000.0, None, 2000.0]}},
                     "course": [1.0, 2.0]},
                    {"name": "none", "figures": {}, "course": []},
                ],
                "ratios": [{"name": "r", "median": 0.5, "runs": [0.4, 0.6], "wanted": ">= 0.9", "met": False}],
            }
        ],
        "faults": ["m, none: it broke"],
    }  # fmt: skip

    def test_a_plot_is_xml_whatever_names_hold(self) -> None:
        text = plot.svg(self.DOCUMENT)
        words = "".join(ElementTree.fromstring(text).itertext())
        assert "a < b & c" in words
        assert "<one>" in words
        assert "1,234" in words

    def test_a_table_tells_medians_bars_and_failures(self) -> None:
        text = "\n".join(report.lines(self.DOCUMENT))
        assert "1,234" in text
        assert "0.40 to 0.60" in text
        assert "failed: m, none: it broke" in text
