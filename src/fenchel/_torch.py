"""Everything private of torch that the library relies on, in one file.

A new torch release is tried against this file first: no other file of the library touches a name of torch's that
begins with an underscore.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_map

__all__ = [
    "apply_function",
    "as_autocast",
    "autocast_dtype",
    "below_autograd",
    "beneath_derivatives",
    "concrete",
    "differentiable_once",
    "distributed_rule",
    "fill_distributed_rules",
    "forward_mode",
    "from_cpu",
    "has_tangent",
    "is_batched",
    "is_distributed",
    "is_mapped",
    "is_simple",
    "jagged_parts",
    "known",
    "nested_forward_mode",
    "nested_from_mask",
    "on_cpu",
    "outside",
    "outside_graphs",
    "readable",
    "recomputed",
    "standard_gamma",
    "traced",
    "tracks",
    "tracks_forward",
    "transformed",
    "tree_map",
    "without_transforms",
]

F = TypeVar("F", bound=Callable[..., Any])

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_batched = torch._C._functorch.is_legacy_batchedtensor
_is_compiling, _tracing_state = torch.compiler.is_compiling, torch._C._get_tracing_state
_dispatch_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
is_mapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to a transformation of functions, such as ``torch.func.vmap``."""


def is_batched(t: Tensor) -> bool:
    """Whether ``torch.func.vmap`` maps over a tensor, at any level of nested transformations."""
    while is_mapped(t):
        if torch._C._functorch.is_batchedtensor(t):
            return True
        t = torch._C._functorch.get_unwrapped(t)
    return False


# -- what a tensor is ------------------------------------------------------------------------------------------------


def concrete(*tensors: Tensor) -> bool:
    """Whether tensors hold data that may be read: nothing is traced or mapped, and none is fake.

    Raises a RuntimeError if the memory of one was freed: compiled code, and some of torch's own, would crash.
    """
    # For small inputs the time of a call is that of its Python lines: names are looked up once.
    if _is_compiling() or _tracing_state() is not None or _dispatch_modes():
        return False
    for t in tensors:
        if type(t) not in _PLAIN or t.is_meta or t.is_neg() or is_mapped(t) or _batched(t):
            return False
        try:
            if not t.untyped_storage().nbytes() and t.numel():
                raise RuntimeError(
                    f"a tensor of shape {tuple(t.shape)} holds no data: its storage has been freed (resized to 0 bytes)"
                )
        except NotImplementedError:  # sparse and other layouts have no such storage
            return False
    return True


def is_simple(t: Tensor) -> bool:
    """Whether a plain tensor is certainly ``known``, and not part of forward mode or of ``torch.func``.

    A single quick test, for small inputs. False means that the slower tests have to decide.
    """
    if forward_ad._current_level >= 0 or _transforms() or _is_compiling() or _dispatch_modes():
        return False
    if _tracing_state() is not None:
        return False
    return t.is_cpu and t.data_ptr() != 0 and not t.storage_offset() and not t.is_neg() and not _batched(t)


def traced() -> bool:
    """Whether ``torch.jit.trace`` is at work."""
    return _tracing_state() is not None


def known(*tensors: Tensor) -> bool:
    """Whether the values of tensors may be read at no cost: they are ``concrete``, and no device must be waited for."""
    if not concrete(*tensors):
        return False
    for t in tensors:  # noqa: SIM110 (a generator is slow for small inputs)
        if not t.is_cpu:
            return False
    return True


def readable(*tensors: Tensor) -> bool:
    """Whether Python code may depend on the values of tensors, also of subclasses and under dispatch modes.

    More than ``concrete``: data in subclasses, or seen by a dispatch mode that computes, cannot be handed to kernels,
    but torch's own operations give values that can be read. Those of fake tensors and of traces cannot.
    """
    if _is_compiling() or _tracing_state() is not None:
        return False
    if hasattr(_get_current_dispatch_mode(), "_mode_key"):  # torch's own modes: fake, proxy, functional
        return False
    for t in tensors:  # noqa: SIM110 (a generator would be one more call)
        if t.is_meta or is_mapped(t) or _batched(t) or hasattr(type(t), "_mode_key"):
            return False
    return True


def beneath_derivatives(tensor: Tensor) -> Tensor:
    """A tensor that is not differentiated, such as one of integers, without the levels of ``torch.func``'s derivatives.

    Levels of ``vmap`` stay: there it has several values.
    """
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def on_cpu(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the CPU's memory, differentiable: those of one dtype and device are copied in one piece.

    Tensors that are there already are returned as they are. Meta tensors hold no values: zeros take their place, so
    that a result has the right shape.
    """
    found = list(tensors)
    kinds = {(t.dtype, t.device) for t in tensors if not t.is_cpu}
    for kind in kinds:
        some = [i for i, t in enumerate(tensors) if (t.dtype, t.device) == kind]
        flat = torch.cat([tensors[i].reshape(-1) for i in some])
        flat = apply_function(_Zeros, flat) if flat.is_meta else flat.cpu()
        parts = flat.split([tensors[i].numel() for i in some])
        for i, part in zip(some, parts, strict=True):
            found[i] = part.reshape(tensors[i].shape)
    return tuple(found)


def from_cpu(tensor: Tensor, device: torch.device) -> Tensor:
    """The opposite of ``on_cpu``: a tensor of the CPU's memory on a device, differentiable."""
    if device.type == "cpu":
        return tensor
    moved: Tensor = apply_function(_Shape, tensor) if device.type == "meta" else tensor.to(device)
    return moved


class _Zeros(torch.autograd.Function):
    """Zeros on the CPU in place of a meta tensor, which gets a gradient as if they were its copy."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor, device="cpu")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return from_cpu(grad, torch.device("meta"))


class _Shape(torch.autograd.Function):
    """A meta tensor in place of one on the CPU, which gets a gradient of ones, as a meta tensor has no values."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.to("meta")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.ones_like(grad, device="cpu")


_distributed_rules: dict[str, Callable[..., Any]] = {}


def is_distributed(*values: Any) -> bool:
    """Whether some of these are DTensors, whose rules compute; False in a graph, which has torch's own."""
    for t in values:
        if type(t) not in _PLAIN and isinstance(t, Tensor) and not _is_compiling():
            library = sys.modules.get("torch.distributed.tensor")
            if library is not None and isinstance(t, library.DTensor):
                return True
    return False


def distributed_rule(name: str) -> Callable[..., Any]:
    """A rule for DTensors; the first one imports the package that has them."""
    if not _distributed_rules:
        importlib.import_module("fenchel.distributed.dtensors")
    return _distributed_rules[name]


def fill_distributed_rules(**rules: Callable[..., Any]) -> None:
    """Say how public functions compute on DTensors; called by ``fenchel.distributed``."""
    _distributed_rules.update(rules)


# -- derivatives and transformations ---------------------------------------------------------------------------------


def forward_mode() -> bool:
    """Whether forward mode is at work."""
    return forward_ad._current_level >= 0


def transformed() -> bool:
    """Whether a transformation of functions (``torch.func``) is at work."""
    return bool(torch._C._are_functorch_transforms_active())


def tracks_forward() -> bool:
    """Whether forward mode or a transformation of functions is at work."""
    return forward_ad._current_level >= 0 or bool(torch._C._are_functorch_transforms_active())


def tracks(*args: Any) -> bool:
    """Whether a derivative in either mode could be asked of some of these, if they are tensors."""
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return True
    if torch.is_grad_enabled():
        for t in args:
            if isinstance(t, Tensor) and t.requires_grad:
                return True
    return False


def has_tangent(t: Tensor) -> bool:
    """Whether a tensor carries a tangent of forward mode."""
    return forward_mode() and forward_ad.unpack_dual(t).tangent is not None  # type: ignore[no-untyped-call]


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply`` without its inspection of the signature, which takes as long as a small kernel."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def nested_forward_mode() -> AbstractContextManager[Any]:
    """Turn forward mode on inside the ``jvp`` of an autograd.Function, for the levels around it.

    Torch turns it off there, so that nested levels would silently get zero. What was saved must pass through
    ``outside`` then, or it would bring the tangents that this level is just propagating.
    """
    return forward_ad._set_fwd_grad_enabled(True)


def outside(saved: Any) -> Any:
    """A saved tensor without the tangent of this level of forward mode; anything else as it is."""
    return forward_ad.unpack_dual(saved).primal if isinstance(saved, Tensor) else saved  # type: ignore[no-untyped-call]


def below_autograd() -> AbstractContextManager[Any]:
    """Call operators without their derivatives, which the caller adds."""
    return torch._C._AutoDispatchBelowAutograd()


def without_transforms() -> AbstractContextManager[Any]:
    """Work on plain tensors although a transformation of functions is at work."""
    return torch._C._DisableFuncTorch()


def recomputed(function: Callable[..., Any], *tensors: Tensor, random: bool = False) -> Any:
    """``function(*tensors)``, which keeps nothing but the tensors, and is computed again to be differentiated.

    Derivatives of every order in reverse mode. ``function`` must not read other tensors that require a gradient.

    Args:
        function: maps tensors to a tensor or a tuple of tensors.
        tensors: its arguments, at least one.
        random: whether it draws random numbers on the CPU, which are then drawn again the same.
    """
    return apply_function(_Recomputed, function, random, *tensors)


class _Recomputed(torch.autograd.Function):
    """See ``recomputed``.

    It is computed again on detached copies: one tensor may depend on another, and its gradient must not be counted
    twice. The derivative is a recomputed function too.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], random: bool, *tensors: Tensor) -> Any:
        ctx.function, ctx.state = function, torch.get_rng_state() if random else None
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, function, state = ctx.saved_tensors, ctx.function, ctx.state
        needed = ctx.needs_input_grad[2:]

        def derivative(*given: Tensor) -> tuple[Tensor, ...]:
            differentiated = torch.is_grad_enabled()
            # In a second derivative these are copies already.
            fresh = given if differentiated else tuple(map(_leaf, given, (*needed, *(False for _ in grads))))
            own, upstream = fresh[: len(tensors)], fresh[len(tensors) :]
            with torch.enable_grad(), torch.random.fork_rng(devices=[], enabled=state is not None):
                if state is not None:
                    torch.set_rng_state(state)
                outputs = function(*own)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            wanted = [t for t, is_needed in zip(own, needed, strict=True) if is_needed]
            reached = [(o, g) for o, g in zip(outputs, upstream, strict=True) if o.requires_grad]
            if not reached:
                return tuple(map(torch.zeros_like, wanted))
            ends, directions = zip(*reached, strict=True)
            found = torch.autograd.grad(ends, wanted, directions, create_graph=differentiated, allow_unused=True)
            return tuple(torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True))

        with torch.autocast(tensors[0].device.type, enabled=False):
            if torch.is_grad_enabled():
                found = iter(apply_function(_Recomputed, derivative, False, *tensors, *grads))
            else:
                found = iter(derivative(*tensors, *grads))
        return None, None, *(next(found) if is_needed else None for is_needed in needed)


def _leaf(tensor: Tensor, needed: bool) -> Tensor:
    return tensor.detach().requires_grad_(needed)


def differentiable_gradients(
    function: Callable[..., Any], inputs: Sequence[Any], needed: Sequence[bool], grads: Sequence[Tensor]
) -> list[Any]:
    """The gradients of ``function(*inputs)`` that are needed, in operations that can be differentiated again; or None.

    Args:
        function: maps the inputs to a tensor or a tuple of tensors.
        inputs: tensors, or anything else where no gradient is needed.
        needed: which gradients are needed.
        grads: those of the results.
    """
    fresh = [_alias(each) if is_needed else each for each, is_needed in zip(inputs, needed, strict=True)]
    wanted = [each for each, is_needed in zip(fresh, needed, strict=True) if is_needed]
    again = torch.is_grad_enabled()
    found = iter(torch.autograd.grad(function(*fresh), wanted, grads, create_graph=again, allow_unused=True))
    return [next(found) if is_needed else None for is_needed in needed]


def _alias(t: Tensor) -> Tensor:
    """A view, differentiable: a tensor may depend on another, or be given twice, and its gradient is counted once."""
    return t.view_as(t) if t.requires_grad else t.detach().requires_grad_()


def differentiable_once(name: str, instead: str, gradients: Sequence[Any], *inputs: Any) -> tuple[Any, ...]:
    """The gradients of a backward pass that has no derivative of its own: to differentiate them again is an error.

    Args:
        name: what the user called, for the error.
        instead: what to use instead, for the error.
        gradients: of the backward pass; None where there is none.
        inputs: what the gradients depend on. Only tensors count.
    """
    leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    if not torch.is_grad_enabled() or not leaves:
        return tuple(gradients)
    message = f"{name} is differentiable once; {instead}"
    return tuple(g if g is None else apply_function(_Last, message, g, *leaves) for g in gradients)


class _Last(torch.autograd.Function):
    """The identity on a gradient that cannot be differentiated again: its backward pass raises."""

    @staticmethod
    def forward(ctx: Any, message: str, gradient: Tensor, *leaves: Tensor) -> Tensor:
        ctx.message = message
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        raise NotImplementedError(ctx.message)


# -- the compiler ----------------------------------------------------------------------------------------------------


def outside_graphs(name: str, why: str = "works by rounds that depend on the data") -> Callable[[F], F]:
    """Break the graph of ``torch.compile`` around a function; under ``fullgraph=True`` and ``torch.export``, raise.

    As ``torch.compiler.disable``, but that imports the compiler at once; here it is imported by the first compilation.
    The compiler recognizes such functions by their attributes, and must skip the frame of the wrapper.

    Args:
        name: what the user called, for the reason that is given.
        why: that reason.
    """
    reason = f"{name} {why}: it cannot be part of a compiled or exported graph"

    def wrap(function: F) -> F:
        disabled: Callable[[], Any] = functools.cache(functools.partial(torch.compiler.disable, function))

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # a non-strict export, which runs the code
                raise RuntimeError(reason)
            if _tracing_state() is not None:  # what is computed outside of torch would be a constant of the graph
                raise RuntimeError(f"{reason}, nor of one that torch.jit.trace records; torch.export takes the others")
            # Until the compiler is loaded, there is none to turn off.
            return (disabled() if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

        outer: Any = functools.wraps(function)(call)
        outer._torchdynamo_disable = True
        outer._torchdynamo_disable_msg = reason
        # If the function itself is compiled, the error is that of the function that it calls, with the reason.
        outer._torchdynamo_orig_callable = function
        outer._torchdynamo_wrapper_id = id(outer)
        return cast(F, outer if _skip(call.__code__) else disabled())

    return wrap


def _skip(code: CodeType) -> bool:
    """Make the compiler's frame hook skip this code, without importing it; False if torch has no such hook."""
    hook: Any = torch._C._dynamo.eval_frame
    if hasattr(hook, "set_code_exec_strategy"):
        hook.set_code_exec_strategy(code, hook._FrameExecStrategy(hook._FrameAction.SKIP, hook._FrameAction.DEFAULT))
    elif hasattr(hook, "skip_code"):
        hook.skip_code(code)
    else:
        return False
    return True


# -- operations without a public name --------------------------------------------------------------------------------


def standard_gamma(concentration: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Samples of gamma distributions with scale 1, differentiable in the concentration."""
    return torch._standard_gamma(concentration, generator=generator)


def nested_from_mask(tensor: Tensor, mask: Tensor) -> Tensor:
    """A nested tensor of the rows of (B, L, D) that a mask (B, L) keeps, which must be the first of each."""
    return torch._nested_tensor_from_mask(tensor, mask, mask_check=False)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast is set to on a device; None where it is off, or the device has none."""
    kind = device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def as_autocast(dtype: torch.dtype, *tensors: Any) -> tuple[Any, ...]:
    """Tensors as torch's own operations get them under autocast to a dtype: float64, integers and None stay."""
    narrow = (isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 for t in tensors)
    return tuple(t.to(dtype) if changes else t for t, changes in zip(tensors, narrow, strict=True))


def jagged_parts(nested: Tensor) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """The values, offsets and lengths (None without gaps) of a jagged nested tensor, and its ragged dimension."""
    return nested.values(), nested.offsets(), nested.lengths(), nested._ragged_idx  # type: ignore[attr-defined]
