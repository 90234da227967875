"""Checkpoints of hflayers, the reference implementation of Hopfield layers, for the layers of this library."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fenchel.hopfield.association import Hopfield


def load_hflayers(module: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load the ``state_dict`` of an hflayers module into the module of this library that is built like it.

    For the five layers of :mod:`fenchel.hopfield`, and any module that contains some of them under the names that they
    have in the original. What is not in an hflayers checkpoint stays as it is: Ω (build the layers with
    ``omega=fenchel.Shannon()`` for the same outputs) and β (``scaling``).

    Args:
        module: with the same arguments as the original.
        state_dict: of the original: names such as ``association_core.in_proj_weight``.

    Raises:
        ValueError: names are missing or left over, or a tensor has another shape; nothing is loaded then.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.hopfield import Hopfield, load_hflayers
        >>> saved = {"in_proj_weight": torch.randn(12, 4), "in_proj_bias": torch.zeros(12)}
        >>> saved |= {"out_proj.weight": torch.randn(4, 4), "out_proj.bias": torch.zeros(4)}
        >>> saved = {f"association_core.{name}": tensor for name, tensor in saved.items()}
        >>> for name in ("norm_stored_pattern", "norm_state_pattern", "norm_pattern_projection"):
        ...     saved |= {f"{name}.weight": torch.ones(4), f"{name}.bias": torch.zeros(4)}
        >>> layer = Hopfield(4, num_heads=2, omega=fenchel.Shannon())
        >>> load_hflayers(layer, saved)
        >>> torch.equal(layer.state_proj.weight, saved["association_core.in_proj_weight"][:4])
        True
    """
    found = dict(state_dict)
    absent: dict[str, list[str]] = {}
    optional: set[str] = set()  # not in a checkpoint of hflayers, or reported under the name that they have there
    for name, layer in module.named_modules():
        if isinstance(layer, Hopfield):
            prefix = f"{name}." if name else ""
            absent |= _translate(layer, prefix, found)
            optional |= {prefix + key for key in ("log_scaling", *(f"omega.{key}" for key in layer.omega.state_dict()))}
    optional |= {ours for names in absent.values() for ours in names}
    expected = module.state_dict()
    missing = [*absent, *(key for key in expected if key not in found and key not in optional)]
    unexpected = [key for key in found if key not in expected]
    if missing or unexpected:
        raise ValueError(
            f"state_dict does not fit this {type(module).__name__}, which must be built with the arguments of the "
            f"original: {_listed('missing', missing)}{'; ' if missing and unexpected else ''}"
            f"{_listed('unexpected', unexpected)}"
        )
    for key, tensor in found.items():
        if tensor.shape != expected[key].shape:
            raise ValueError(
                f"state_dict has a tensor of shape {tuple(tensor.shape)} for {key}, where this "
                f"{type(module).__name__} has {tuple(expected[key].shape)}"
            )
    module.load_state_dict(found, strict=False)


def _translate(layer: Hopfield, prefix: str, found: dict[str, Tensor]) -> dict[str, list[str]]:
    """Rename the tensors of one layer in ``found``, in place; return the names that are absent, with our names."""
    core = f"{prefix}association_core."
    space, patterns = layer.num_heads * layer.hidden_size, layer.num_heads * layer.pattern_size
    projections = [
        ("state_proj", "q_proj_weight", layer.state_proj, space),
        ("stored_proj", "k_proj_weight", layer.stored_proj, space),
        ("pattern_proj", "v_proj_weight", layer.pattern_proj, patterns),
    ]
    present = [each for each in projections if each[2] is not None]
    absent: dict[str, list[str]] = {}
    if f"{core}in_proj_weight" in found:
        parts = _split(found, f"{core}in_proj_weight", [size for *_, size in present])
        for (name, _, _, _), part in zip(present, parts, strict=True):
            found[f"{prefix}{name}.weight"] = part
    else:
        for name, theirs, _, _ in present:
            absent |= _rename(found, core + theirs, f"{prefix}{name}.weight")
    if any(linear is not None and linear.bias is not None for _, _, linear, _ in present):
        if f"{core}in_proj_bias" in found:
            # It has a part for the pattern projection even where that is static and has no use for it.
            sizes = [size for name, _, linear, size in projections if linear is not None or name == "pattern_proj"]
            parts = _split(found, f"{core}in_proj_bias", sizes)
            for (name, _, _, _), part in zip(present, parts, strict=False):
                found[f"{prefix}{name}.bias"] = part
        else:
            absent[f"{core}in_proj_bias"] = [f"{prefix}{name}.bias" for name, *_ in present]
    if layer.out_proj is not None:
        for key in layer.out_proj.state_dict():
            absent |= _rename(found, f"{core}out_proj.{key}", f"{prefix}out_proj.{key}")
    if layer.norm_hopfield_space is not None:
        for key in layer.norm_hopfield_space.state_dict():
            absent |= _rename(found, f"{core}p_norm_{key}", f"{prefix}norm_hopfield_space.{key}")
    for theirs, ours in (("bias_k", "bias_stored"), ("bias_v", "bias_pattern")):
        held = getattr(layer, ours)
        if held is not None:
            absent |= _rename(found, core + theirs, prefix + ours)
            given = found.get(prefix + ours)
            if given is not None and given.numel() == held.numel():
                found[prefix + ours] = given.reshape(held.shape)
    return absent


def _rename(found: dict[str, Tensor], theirs: str, ours: str) -> dict[str, list[str]]:
    """Rename one tensor, in place; return both names if it is absent."""
    if theirs not in found:
        return {theirs: [ours]}
    found[ours] = found.pop(theirs)
    return {}


def _split(found: dict[str, Tensor], name: str, sizes: list[int]) -> list[Tensor]:
    """Remove one tensor and split its rows into the weights of several projections."""
    joined = found.pop(name)
    if joined.shape[0] != sum(sizes):
        raise ValueError(
            f"state_dict has {joined.shape[0]} rows in {name}, where this layer has {' + '.join(map(str, sizes))}"
        )
    return list(torch.split(joined, sizes))


def _listed(what: str, names: list[str]) -> str:
    return f"{what} {', '.join(sorted(names))}" if names else ""
