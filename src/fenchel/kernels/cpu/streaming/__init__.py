"""Attention, output layers and memories: blocks of scores and supports."""
