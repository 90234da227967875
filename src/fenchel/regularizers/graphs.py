"""What runs by rounds that depend on the data stays out of compiled graphs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(name: str, why: str = "works by rounds that depend on the data") -> Callable[[F], F]:
    """Break the graph of ``torch.compile`` around a function; under ``fullgraph=True`` and ``torch.export``, raise.

    As ``torch.compiler.disable``, which would import the compiler at once: here that is left to whoever compiles. The
    compiler knows such functions by their attributes, and has to leave the frame alone that turns it off.

    Args:
        name: what the user called, for the reason that is given.
        why: that reason.
    """
    reason = f"{name} {why}: it cannot be part of a compiled or exported graph"

    def wrap(function: F) -> F:
        disabled: Callable[[], Any] = functools.cache(functools.partial(torch.compiler.disable, function))

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # an export that runs the code instead of reading it
                raise RuntimeError(reason)
            # Until the compiler is loaded, there is none to turn off.
            return (disabled() if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

        outside: Any = functools.wraps(function)(call)
        outside._torchdynamo_disable = True
        outside._torchdynamo_disable_msg = reason
        # So that to compile the function itself leads to what it calls, which says the reason.
        outside._torchdynamo_orig_callable = function
        outside._torchdynamo_wrapper_id = id(outside)
        return cast(F, outside if _skip(call.__code__) else disabled())

    return wrap


def _skip(code: CodeType) -> bool:
    """Tell the hook that watches frames to pass these by, without the compiler; whether this torch knows how to."""
    hook: Any = torch._C._dynamo.eval_frame
    if hasattr(hook, "set_code_exec_strategy"):
        hook.set_code_exec_strategy(code, hook._FrameExecStrategy(hook._FrameAction.SKIP, hook._FrameAction.DEFAULT))
    elif hasattr(hook, "skip_code"):
        hook.skip_code(code)
    else:
        return False
    return True
