"""What flash-attn and PyTorch raise for a bad call: their C++ checks are RuntimeErrors, and callers catch those."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from relampago.errors import InvalidInput

Function = TypeVar("Function", bound=Callable[..., Any])


class Refused(InvalidInput, RuntimeError):
    """An argument is wrong: an `InvalidInput` that is also the RuntimeError the original's callers expect."""


def refuses(function: Function) -> Function:
    """Let a function raise `Refused` where it would raise `InvalidInput`."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Refused:
            raise
        except InvalidInput as error:
            raise Refused(str(error)) from error

    return wrapped  # type: ignore[return-value]


def expect(holds: bool, message: str, *values: Any) -> None:
    """Raise `Refused` unless a condition holds; the message is formatted only then, since a graph traces no strings."""
    if not holds:
        raise Refused(message.format(*values))
