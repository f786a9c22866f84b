"""What libraries say while they load: logged and warned."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["listening"]


@contextmanager
def listening(most: int = 300) -> Generator[list[str], None, None]:
    """Collect what is logged or warned meanwhile, of each text the first *most* characters."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"log: {record.getMessage()[:most]}")

    ear = Ear(logging.WARNING)
    loggers = [
        logging.getLogger(name) for name in ("", "transformers", "accelerate", "modelquirks")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(ear)
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
            said += [f"warning: {str(each.message)[:most]}" for each in caught]
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(ear)
            logger.setLevel(level)
