"""``Results``: what is known of each class and road, kept in a file line by line."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["FORMAT", "Results", "worklist"]

FORMAT = 1
"""To be raised when models are built or filled otherwise: all results are then taken again."""

_HERE = Path(__file__).parent
Row = dict[str, Any]


class Results:
    """Rows by class, form and road; a row counts as long as the code it tells of is the same."""

    def __init__(self, path: Path) -> None:
        """Read the rows in *path*, if there are any."""
        self._path = path
        self._rows: dict[str, dict[tuple[str, str], Row]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                self._keep(json.loads(line))

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """Return the versions of the packages that are compared."""
        return {name: version(name) for name in ("torch", "accelerate", "transformers")}

    @cached_property
    def _digests(self) -> Mapping[str, str]:
        base = f"{FORMAT} {sorted(self.versions.items())}"
        sources = [
            path
            for root in ("quirks", "planner", "plugins")
            for path in sorted((_HERE.parent / root).rglob("*.py"))
        ]
        zoo = [_HERE / f"zoo_{part}.py" for part in ("compare", "roads")]
        return {
            "build": f"{base} {_digest([_HERE / 'zoo_shrink.py'])}",
            "ours": f"{base} {_digest([*sources, *zoo])}",
            "others": base,
        }

    def _code(self, row: Mapping[str, Any]) -> str:
        if row["road"].startswith("ours"):
            return self._digests["ours"]
        if row["road"] in ("build", "zoo", "start") and row["verdict"] != "right":
            return self._digests["build"]
        return self._digests["others"]

    def _keep(self, row: Row) -> None:
        self._rows.setdefault(row["name"], {})[row["form"], row["road"]] = row

    def add(self, row: Row) -> None:
        """Keep *row*, on disk too."""
        row["code"] = self._code(row)
        self._keep(row)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self, name: str) -> Iterable[Row]:
        """Return the rows of the class *name*."""
        return self._rows.get(name, {}).values()

    def known(self, name: str, again: Collection[str] = ()) -> dict[str, Row]:
        """Return the rows of *name* that still count, by ``form/road``; none of those *again*."""
        return {
            f"{form}/{road}": row
            for (form, road), row in self._rows.get(name, {}).items()
            if road not in again and row.get("code") == self._code(row)
        }

    def finished(self, name: str, roads: Sequence[str], known: Mapping[str, Row]) -> bool:
        """Tell whether nothing is left to do for the class *name* on *roads*."""
        marker = known.get("fresh/build") or known.get("all/build") or known.get(f"{name}/zoo")
        if marker is None:
            return False
        forms = (marker.get("more") or {}).get("forms", ["fresh"])
        return marker["verdict"] != "right" or all(
            f"{form}/{road}" in known for form in forms for road in roads
        )


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def worklist(
    right: Collection[tuple[str, str]],
    verdict: Mapping[tuple[str, str, str], Row],
    roads: Sequence[str],
) -> list[dict[str, Any]]:
    """Return what transformers loads right and we do not, grouped by reason; most classes first."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, form in sorted(right):
        for road in roads:
            row = verdict.get((name, form, road))
            if row is None or row["verdict"] == "right":
                continue
            key = row["verdict"], _plain(row["reason"])
            case = name if form == "fresh" else f"{name} ({form})"
            groups.setdefault(key, {}).setdefault(case, []).append(road)
    found = [
        {"verdict": kind, "reason": reason, "classes": sorted(cases), "roads": cases}
        for (kind, reason), cases in groups.items()
    ]
    return sorted(found, key=lambda group: -len(group["classes"]))


def _plain(reason: str) -> str:
    """Return *reason* without the names and numbers in it."""
    return re.sub(r"\d+", "N", re.sub(r"('[^']*'(, )?)+", "'…' ", reason))[:200]
