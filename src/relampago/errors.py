"""The two exceptions a user of relampago can meet."""


class InvalidInput(ValueError):
    """An argument is wrong; the message names it, what came and what was expected."""


class Unsupported(NotImplementedError):
    """The call is well-formed, but no backend (or not the one asked for) can run it."""
