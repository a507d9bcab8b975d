"""Errors that a user is meant to read."""


class AgliteError(Exception):
    """Something a user can mend: what was wrong, and what to do about it.

    `exit_code` is the process's exit status when the error reaches the command line: 1 failed, 2 bad usage or recipe.
    """

    exit_code = 1
    otherwise = "AGLITE_DEBUG=1 shows where it happened; please report it if it is no mistake of yours"
    """What to do where an error does not say it."""

    def __init__(self, message: str, mend: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.mend = mend

    def __str__(self) -> str:
        return f"{self.message}\n  -> {self.mend}" if self.mend else self.message


class RecipeError(AgliteError):
    """A recipe, task file or setting that cannot be used."""

    exit_code = 2


class DiskFullError(AgliteError):
    """Something large could not be written; it can be tried again when there is room."""


class StoreError(AgliteError):
    """The database cannot be opened or is not what it should be."""

    otherwise = "`aglite db check` reads the whole database and says what is wrong with it"


class NotFoundError(StoreError):
    """The store has nothing of that name."""


class OlderStoreError(StoreError):
    """An older aglite wrote the database; it must be migrated before it can be read."""


class EngineError(AgliteError):
    """The engine or the model worker failed; `retryable` ones are infrastructure failures of a rollout."""

    otherwise = "logs/worker.log in the run directory says more; `aglite up` goes on from the last checkpoint"


class GrammarError(EngineError):
    """What a response must look like is nothing that the engine can enforce: the request is at fault."""


class Undelivered(Exception):
    """A message that could not be delivered, in words without secrets; `lasting`: nor would it be next time."""

    def __init__(self, why: str, *, lasting: bool = False) -> None:
        super().__init__(why)
        self.lasting = lasting
