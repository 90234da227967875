"""Integrations with other libraries, one module per library, each imported by its full name.

``fenchel.integrations.transformers`` is for Hugging Face transformers, ``fenchel.integrations.sklearn`` for
scikit-learn. Importing this package imports no other library.
"""

__all__: list[str] = []
