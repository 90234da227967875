"""Integrations with other libraries. Each is a module of its own, imported by its full name, and needs that library.

``fenchel.integrations.transformers`` is for Hugging Face transformers. Importing this package imports none of them.
"""

__all__: list[str] = []
