"""Measured tiles: `tables/<arch>.toml`, and the search that proposes rows for them."""
