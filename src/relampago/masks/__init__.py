"""Masks: what a user writes (spec, blocks) and the one statement of what it means (rules)."""
