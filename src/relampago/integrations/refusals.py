"""What flash-attn and PyTorch raise for a bad call: their C++ checks are RuntimeErrors, and callers catch those."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

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
        except (AttributeError, TypeError) as error:
            if (said := no_tensor(function, args, kwargs)) is not None:
                raise Refused(said) from error
            raise

    return wrapped  # type: ignore[return-value]


def no_tensor(function: Callable[..., Any], args: Any, kwargs: Any) -> str | None:
    """Which argument a function stumbled over since it is no tensor; None if that is not why. Asked afterwards, so
    that a call costs nothing."""
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None
    for name, value in given.items():
        kinds = signature.parameters[name].annotation.split(" | ")
        missing = value is None and "None" not in kinds
        odd = value is not None and set(kinds) <= {"Tensor", "None"}
        if "Tensor" in kinds and (missing or odd) and not isinstance(value, Tensor):
            return f"{name} is a {type(value).__name__}; expected a tensor"
    return None


def expect(holds: bool, message: str, *values: Any) -> None:
    """Raise `Refused` unless a condition holds; the message is formatted only then, since a graph traces no strings."""
    if not holds:
        raise Refused(message.format(*values))
