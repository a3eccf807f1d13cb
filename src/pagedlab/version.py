"""The version, kept apart so that a trace header needs no import of package metadata."""

__version__ = "0.1.0"
