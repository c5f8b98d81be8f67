"""What a statement touches, down to the statements inside of functions, as auto_explain tells it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg


@dataclass(frozen=True)
class Scan:
    """A scan that was executed. `rows`: that it looked at, those that a filter then refused included."""

    relation: str
    index: str | None
    rows: float


@dataclass(frozen=True)
class Touched:
    scans: list[Scan]
    buffers: int

    def rows(self, relation: str = "jobs_live") -> float:
        return sum(scan.rows for scan in self.scans if scan.relation == relation)

    def relations(self) -> set[str]:
        return {scan.relation for scan in self.scans}

    def finished(self) -> set[str]:
        """The partitions of finished jobs."""
        parents = ("jobs_completed", "jobs_cancelled", "jobs_dead_letter")
        return {scan.relation for scan in self.scans if scan.relation.startswith(parents)}

    def without_index(self) -> set[str]:
        """Partitions of jobs that were read from end to end."""
        partitions = {"jobs_live", *self.finished()}
        return {scan.relation for scan in self.scans if scan.index is None and scan.relation in partitions}

    def indexes(self, relation: str = "jobs_live") -> set[str]:
        return {scan.index for scan in self.scans if scan.index and scan.relation == relation}


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from _nodes(child)


def _scans(plan: dict[str, Any]) -> Iterator[Scan]:
    for node in _nodes(plan):
        loops = node.get("Actual Loops", 0)
        if not loops or not node["Node Type"].endswith("Scan"):
            continue
        refused = sum(node.get(name, 0) for name in ("Rows Removed by Filter", "Rows Removed by Index Recheck"))
        looked_at = (node["Actual Rows"] + refused) * loops
        if node["Node Type"] == "Bitmap Index Scan":
            yield Scan(_table_of(node["Index Name"]), node["Index Name"], looked_at)
        # A row that is found by its place has been found by an index before.
        elif "Relation Name" in node and not node["Node Type"].startswith(("Bitmap", "Tid")):
            yield Scan(node["Relation Name"], node.get("Index Name"), looked_at)


def _table_of(index: str) -> str:
    return "jobs_live" if index.startswith("jobs_live_") else index


def _blocks(plan: dict[str, Any]) -> int:
    return int(plan.get("Shared Hit Blocks", 0) + plan.get("Shared Read Blocks", 0))


def touched(session: psycopg.Connection[Any], statement: str, parameters: Any = None) -> Touched:
    """Runs the statement, with all that it calls, and says what they touched. The session must be a superuser's."""
    plans: list[dict[str, Any]] = []

    def note(diagnostic: psycopg.errors.Diagnostic) -> None:
        _, found, plan = (diagnostic.message_primary or "").partition(" plan:\n")
        if found:
            plans.append(json.loads(plan)["Plan"])

    for setting in (
        "client_min_messages = log", "auto_explain.log_min_duration = 0", "auto_explain.log_nested_statements = on",
        "auto_explain.log_analyze = on", "auto_explain.log_buffers = on", "auto_explain.log_timing = off",
        "auto_explain.log_format = json",
    ):  # fmt: skip
        session.execute(f"set {setting}" if "." not in setting else f"load 'auto_explain'; set {setting}")
    session.add_notice_handler(note)
    try:
        session.execute(statement, parameters)
    finally:
        session.remove_notice_handler(note)
        session.execute("set client_min_messages = notice; set auto_explain.log_min_duration = -1")
    assert plans, "auto_explain told nothing"
    # The outermost statement is told last, and its buffers hold those of all others.
    return Touched([scan for plan in plans for scan in _scans(plan)], _blocks(plans[-1]))
