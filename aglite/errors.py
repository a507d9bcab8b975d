"""Errors that a user is meant to read."""


class AgliteError(Exception):
    """Something a user can mend: what was wrong, and what to do about it.

    `exit_code` is the process's exit status when the error reaches the command line: 1 failed, 2 bad usage or recipe.
    """

    exit_code = 1

    def __init__(self, message: str, mend: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.mend = mend

    def __str__(self) -> str:
        return f"{self.message}\n  -> {self.mend}" if self.mend else self.message


class RecipeError(AgliteError):
    """A recipe, task file or setting that cannot be used."""

    exit_code = 2


class StoreError(AgliteError):
    """The database cannot be opened or is not what it should be."""


class EngineError(AgliteError):
    """The engine or the model worker failed; `retryable` ones are infrastructure failures of a rollout."""
