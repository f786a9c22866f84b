"""Findings as log records, for callers who are given no report."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from modelquirks.planner.finding import Finding
from modelquirks.planner.wording import clean

__all__ = ["tell"]

_LOG = logging.getLogger(__name__)
_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO}


def tell(findings: Iterable[Finding]) -> None:
    """Log *findings*; without any set-up Python prints warnings and errors on standard error."""
    for finding in findings:
        _LOG.log(_LEVELS[finding.severity], "%s", clean(finding.message))
