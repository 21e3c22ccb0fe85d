"""Adapters to other libraries, each imported by its full name and only with that library: relampago needs none."""
