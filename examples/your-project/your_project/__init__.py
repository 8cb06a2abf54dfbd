"""A project that uses vtensor."""

from your_project.history import History

__all__ = ["History"]
