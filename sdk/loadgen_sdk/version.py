"""The version of this package and of the generator: one for both."""

__version__ = "0.1.0"
