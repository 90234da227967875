"""Numba kernels for the CPU, in folders by what they serve."""
