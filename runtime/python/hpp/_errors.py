"""The error and the warning of this package."""

from __future__ import annotations


class HppError(Exception):
    """Why something failed, in the words of the commands.

    `message` is what happened and because of what; `hint`, where there is one, what to do next.
    """

    message: str
    hint: str | None

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class HppWarning(UserWarning):
    """What the commands print as a warning."""
