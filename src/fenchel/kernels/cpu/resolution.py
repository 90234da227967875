"""Which implementation of a built-in function Numba calls: found once per process, and not at every call.

For ``a + b`` of two integers Numba tries ten signatures that do not fit, of texts and lists and whole arrays, with an
error message for each, before it comes to the one that does, and so again wherever there is a sum. That is a tenth of
the time of a compilation. Here what was found for some types and options is found again at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_known: dict[Any, tuple[Any, Any, Any]] = {}  # signature and implementation; the function, so that its id stays its own


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Keep resolutions while Numba compiles, which it does in one thread at a time: the caller holds its lock.

    Does nothing with a version of Numba that looks for implementations elsewhere.
    """
    try:
        from numba.core.targetconfig import ConfigStack
        from numba.core.types.functions import BaseFunction

        owner: Any = BaseFunction
        stack: Any = ConfigStack
        search, options_now = owner.get_call_type, stack.top_or_none
    except (ImportError, AttributeError):
        yield
        return
    if getattr(search, "remembers", False):  # a compilation within another
        yield
        return
    options: list[Any] = [None, None]  # the last ones that were seen, and their text

    def get_call_type(function: Any, context: Any, args: Any, kws: Any) -> Any:
        top = options_now()
        if top is None or not hasattr(top, "summary") or not hasattr(function, "_impl_keys"):
            return search(function, context, args, kws)
        if options[0] is not top:
            options[:] = top, top.summary()
        key = id(function), id(context), tuple(args), tuple(dict(kws).items()), options[1]
        found = _known.get(key)
        if found is not None:
            function._impl_keys[found[0].args] = found[1]
            return found[0]
        signature = search(function, context, args, kws)
        if signature is not None and signature.args in function._impl_keys:
            _known[key] = signature, function._impl_keys[signature.args], (function, context)
        return signature

    get_call_type.remembers = True  # type: ignore[attr-defined]
    owner.get_call_type = get_call_type
    try:
        yield
    finally:
        owner.get_call_type = search
