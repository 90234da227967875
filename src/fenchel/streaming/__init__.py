"""Engines that never hold the whole matrix of scores: attention, output layers, and passes over stored patterns."""

from fenchel.streaming.plan import Plan, using

__all__ = ["Plan", "using"]
