"""Recipes: what is computed. Frozen dataclasses, strict TOML, `--set` overrides. No torch."""
