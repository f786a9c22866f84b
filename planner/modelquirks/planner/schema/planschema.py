"""``plan_schema``: the JSON Schema of plan files."""

from __future__ import annotations

from importlib.resources import files

from modelquirks.planner.plan import SCHEMA

__all__ = ["plan_schema"]


def plan_schema() -> str:
    """Return the JSON Schema (draft 2020-12) of the plans that this version writes and reads.

    It allows no key that it does not name. Later versions of this program may add keys under the
    same number; each ships the schema of its own plans.
    """
    name = f"plan-v{SCHEMA}.schema.json"
    return files("modelquirks.planner.schema").joinpath(name).read_text(encoding="utf-8")
