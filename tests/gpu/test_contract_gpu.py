"""The one contract suite, on the device."""

from test_contract import test_contract  # noqa: F401
