"""Sizes and thresholds of validations, one TOML file each."""
