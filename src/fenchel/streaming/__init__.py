"""Engines that never hold the whole matrix of scores: attention, output layers, and passes over stored patterns."""
