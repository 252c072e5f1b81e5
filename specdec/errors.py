"""Every error this package raises on purpose.

SpecdecError
├── ConfigError            a setting is wrong; raised before anything is loaded or served
│   └── UnsupportedModelError   the model cannot be decoded exactly here; says why
├── InvalidRequestError    a request is wrong (HTTP 400); names the field and the fix
│   └── ContextLengthError      prompt plus completion do not fit the context
├── OverloadedError        no room to admit the request now (HTTP 429); retry later
├── DeadlineExceededError  the request's own deadline passed (HTTP 504)
└── WorkerError            a worker call did not give an answer
├── WorkerUnavailableError  worth repeating, here or on another replica
└── WorkerRequestError      the worker refused the call; repeating it cannot help
"""

from __future__ import annotations


class SpecdecError(Exception):
    """Base of every deliberate error of this package."""


class ConfigError(SpecdecError):
    """A setting is wrong. The message names the setting and the fix."""


class UnsupportedModelError(ConfigError):
    """The model's architecture cannot be decoded exactly by this engine."""


class InvalidRequestError(SpecdecError):
    """A request cannot be served as it is.

    Attributes:
        param: the offending field, in the caller's spelling (``"top_p"``, ``"messages[0].role"``).
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt with the tokens asked for, is longer than the context."""


class OverloadedError(SpecdecError):
    """The server is at its admission limit.

    Attributes:
        retry_after_s: seconds after which a retry is sensible.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(SpecdecError):
    """The request did not finish within its deadline."""


class WorkerError(SpecdecError):
    """A draft or target worker gave no usable answer."""


class WorkerUnavailableError(WorkerError):
    """The worker is dead, restarting, overloaded or late: the same call may be repeated anywhere."""


class WorkerRequestError(WorkerError):
    """The worker refused the call for what it says: repeating the call cannot help."""
