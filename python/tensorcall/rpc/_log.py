"""What `TENSORCALL_LOG` asks for, on Python's side; below Python it is read once more.

Without it nothing is configured: what we say goes to ``logging.getLogger("tensorcall")``, and a program
that does not configure logging sees warnings and errors, as of any library.
"""

from __future__ import annotations

import logging
import os

_VARIABLE = "TENSORCALL_LOG"
_LEVELS = {
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
}
_FORMAT = "%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s"

_logger = logging.getLogger("tensorcall")


def configure() -> None:
    """Let through, and show, what the variable asks for; a level or handlers of the program's stay."""
    given = os.environ.get(_VARIABLE)
    if not given:
        return
    level = _LEVELS.get(given.strip().lower())
    if level is None:
        _logger.warning("%s=%s is no level: it is one of %s", _VARIABLE, given, ", ".join(_LEVELS))
        return
    if _logger.level == logging.NOTSET:
        _logger.setLevel(level)
    if not _logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        _logger.addHandler(handler)
