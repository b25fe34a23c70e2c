"""The version of locant."""

__version__ = "0.1.0"
