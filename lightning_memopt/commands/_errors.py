"""How a command says that what it was asked can't be done."""

from __future__ import annotations


class CommandError(Exception):
    """A user's mistake, in one line; the command ends with status 2."""
