"""Hugging Face transformers: attention with any Ω in its models, entmax sampling, and a loss for ``Trainer``.

Needs ``pip install 'fenchel[transformers]'``.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fenchel._checks import check_positive
from fenchel.losses import fy_loss, is_kept
from fenchel.regularizers import Gini, Regularizer, Tsallis
from fenchel.regularizers.base import check_omega
from fenchel.regularizers.rows import combine_masks
from fenchel.streaming.dot_product import attention

try:
    from transformers import AttentionInterface, AttentionMaskInterface, LogitsProcessor, PreTrainedModel
    from transformers.masking_utils import sdpa_mask
    from transformers.utils.output_capturing import _active_collector
except ImportError as error:
    raise ImportError(
        f"fenchel.integrations.transformers needs transformers 5.4 or newer ({error}): "
        "pip install 'fenchel[transformers]'",
        name="transformers",
    ) from error

__all__ = ["EntmaxLogitsProcessor", "TrainerLoss", "register", "unregister"]

_BUILT_IN = {"entmax15": lambda: Tsallis(1.5), "sparsemax": Gini}
_NAME = re.compile(r"[A-Za-z]\w*")
_RESERVED_WORDS = ("flash", "sdpa", "flex_attention")
_registered: dict[str, Attention] = {}

_REFUSED = {
    "cache": "continuous batching and its paged cache",
    "indices": "attention to keys that an index chooses",
    "block_indices": "attention to blocks of keys that an index chooses",
}
"""Arguments of attention functions that are refused, because ignoring them would change the result."""


def register(name: str | None = None, omega: Regularizer | None = None) -> None:
    r"""Register an attention with :math:`\operatorname{argmax}_\Omega` in place of softmax for transformers' models.

    ``register()`` registers ``attn_implementation="entmax15"`` and ``"sparsemax"``, ``register(name, omega)`` any Ω.
    They work in every model that selects its attention by name, with causal, padding, sliding-window, packed and custom
    masks, caches, grouped queries, position biases, soft-capping and sinks. ``Shannon()`` gives the result of
    ``"eager"``.

    A regularizer on an attention module, ``layer.self_attn.omega = …``, takes precedence over the registered one. So
    each layer can have its own alpha, or one per head, that is trained and saved with the model.

    ``model.save_pretrained(folder)`` writes the names and the regularizers to ``config.json``, and
    ``from_pretrained(folder)`` registers the names and restores the regularizers in any process that has imported this
    module; without the import, transformers raises an error for the name. A regularizer that cannot be written to a
    file (``Custom``) gives a warning.

    Models that do not select their attention by name (Bloom, GPT-J, GPT-Neo, Falcon, DeBERTa, …) raise an error if they
    are given such a name.

    A query without any allowed key (padding) gets zeros. ``output_attentions=True`` returns weights before dropout.

    Args:
        name: for ``attn_implementation``: a word that transformers does not use, or that was registered here before.
        omega: the regularizer of that name.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.integrations.transformers import register
        >>> from transformers import LlamaConfig, LlamaModel
        >>> register("entmax", fenchel.Tsallis(1.25))
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=4, num_hidden_layers=1, vocab_size=9)
        >>> model = LlamaModel(LlamaConfig(**sizes, num_key_value_heads=2, attn_implementation="entmax"))
        >>> model(torch.tensor([[1, 2, 3]]), output_attentions=True).attentions[0].shape
        torch.Size([1, 4, 3, 3])
        >>> for layer in model.layers:
        ...     layer.self_attn.omega = fenchel.Tsallis(1.5, learnable=True, shape=(4, 1, 1))
        >>> unregister("entmax")

    References: Peters, Niculae & Martins (2019); Correia, Niculae & Martins (2019).
    """
    if name is None:
        if omega is not None:
            raise ValueError("omega must be registered under a name: register(name, omega)")
        for known, make in _BUILT_IN.items():
            register(known, make())
        return
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    if omega is None:
        raise ValueError(f"name needs an omega: register({name!r}, fenchel.Tsallis(1.5)); register() for the built-in")
    check_omega(omega)
    if not _NAME.fullmatch(name) or any(word in name for word in _RESERVED_WORDS):
        raise ValueError(
            "name must be letters, digits and underscores, and must not contain "
            f"{', '.join(map(repr, _RESERVED_WORDS))}, to which transformers gives a meaning; got {name!r}"
        )
    taken = {"eager", *AttentionInterface().valid_keys(), *AttentionMaskInterface().valid_keys()} - set(_registered)
    if name in taken:
        raise ValueError(f"name must not be one of transformers' own, {', '.join(sorted(taken))}, got {name!r}")
    _registered[name] = Attention(omega)
    AttentionInterface.register(name, _registered[name])
    AttentionMaskInterface.register(name, make_mask)


def unregister(name: str | None = None) -> None:
    """Remove a name that was registered, or all of them. Models that use it raise an error afterwards.

    Example:
        >>> from fenchel.integrations.transformers import register, unregister
        >>> register("entmax", Tsallis(1.25))
        >>> unregister("entmax")
    """
    if name is not None and name not in _registered:
        raise ValueError(f"name must be one that was registered, {sorted(_registered)}, got {name!r}")
    for each in list(_registered) if name is None else [name]:
        del _registered[each]
        # The interfaces have no public function that removes a global name.
        AttentionInterface._global_mapping.pop(each, None)
        AttentionMaskInterface._global_mapping.pop(each, None)


class Attention:
    """``fenchel.attention`` with the signature of transformers' attention functions, made by :func:`register`."""

    def __init__(self, omega: Regularizer) -> None:
        self.omega = omega

    def __repr__(self) -> str:
        return f"Attention({self.omega!r})"

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        position_bias: Tensor | None = None,
        s_aux: Tensor | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        output_attentions: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The output (batch, L, heads, …) for queries (batch, heads, L, E) and keys and values (batch, groups, S, …).

        Without a mask every query attends to every key, as for ``"eager"``, unless ``is_causal`` is True;
        ``module.is_causal`` is ignored.
        """
        for name, what in _REFUSED.items():
            if options.get(name) is not None:
                raise NotImplementedError(
                    f"fenchel's attention does not support {what} ({name}); use 'eager' or 'sdpa'"
                )
        if attention_mask is not None and attention_mask.dim() != 4:
            raise ValueError(
                f"attention_mask must have shape (batch, heads or 1, queries, keys), got {tuple(attention_mask.shape)}"
            )
        if attention_mask is None and sliding_window is not None and key.shape[-2] > sliding_window:
            raise ValueError(
                f"attention_mask must be given for a window of {sliding_window} of {key.shape[-2]} keys, got None"
            )
        if attention_mask is None and is_causal and query.shape[-2] > 1:
            if query.shape[-2] != key.shape[-2]:
                raise ValueError(
                    f"attention_mask must be given for {query.shape[-2]} queries and {key.shape[-2]} keys, got None "
                    "and is_causal=True"
                )
            length = query.shape[-2]
            attention_mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril()
            _mark_causal(attention_mask)
        own = getattr(module, "omega", None)
        omega = own if isinstance(own, Regularizer) else self.omega
        dropout = dropout if module.training else 0.0
        weights: Tensor | None = None
        sink = None if s_aux is None else s_aux.reshape(-1, 1, 1)
        if softcap is not None:
            mask = combine_masks(attention_mask, position_bias)
            output, weights = _with_score_matrix(query, key, value, omega, mask, dropout, scaling, softcap, s_aux)
        else:
            wanted = bool(output_attentions) or _captures_weights()
            causal = not wanted and position_bias is None and _is_causal(attention_mask)
            if causal:
                # Keys beyond the queries are the unused part of a static cache.
                attention_mask, key, value = None, key[..., : query.shape[-2], :], value[..., : query.shape[-2], :]
            mask = combine_masks(attention_mask, position_bias)
            given: Any = {"attn_mask": mask, "is_causal": causal, "scale": scaling, "dropout_p": dropout, "sink": sink}
            given["return_weights"] = wanted
            found: Any = attention(query, key, value, omega, **given)
            output, weights = found if wanted else (found, None)
        return output.transpose(1, 2).contiguous(), weights


def _captures_weights() -> bool:
    """Whether transformers collects weights from attention modules without passing ``output_attentions`` to them."""
    if torch.compiler.is_compiling():
        return False
    return any(str(key).endswith("attentions") for key in _active_collector.get() or ())


def _with_score_matrix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Regularizer,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention with soft-capped scores, and sinks if there are any, computed from the matrix of scores."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    exact = torch.promote_types(query.dtype, torch.float32)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query.to(exact) * scale) @ key.to(exact).transpose(-2, -1)
    scores = softcap * torch.tanh(scores / softcap)
    allowed = mask if mask is not None and mask.dtype == torch.bool else None
    if mask is not None and allowed is None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
        allowed = allowed if allowed is None else F.pad(allowed, (0, 1), value=True)
    weights = omega.argmax(scores, dim=-1, mask=allowed)[..., : key.shape[-2]].to(value.dtype)
    return F.dropout(weights, dropout) @ value, weights


# -- masks -----------------------------------------------------------------------------------------------------------

_CAUSAL = "_fenchel_causal"


def make_mask(
    *, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, **options: Any
) -> Tensor | None:
    """The boolean mask for transformers' mask interface; None only if every query may attend to every key.

    Where transformers would use the flag ``is_causal`` instead of a mask, a causal mask is made and marked, so that
    :class:`Attention` need not read its values. A model that does not select its attention by name would add the
    boolean mask to its scores; it raises an error.
    """
    if not torch.compiler.is_compiling():
        _check_selects_by_name(type(options.get("config")))
    mask: Tensor | None = sdpa_mask(attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip, **options)
    if mask is not None or not allow_is_causal_skip or options["q_length"] == 1:
        return mask
    full: Tensor = sdpa_mask(attention_mask=None, allow_is_causal_skip=False, **options)
    if not torch.compiler.is_compiling() and int(options.get("q_offset", 0)) == int(options.get("kv_offset", 0)):
        _mark_causal(full)
    return full


def _mark_causal(mask: Tensor) -> None:
    """Mark a mask as causal for :func:`_is_causal`; the mark is invalid after a change of the mask in place."""
    if not torch.compiler.is_compiling() and not mask.is_inference():
        setattr(mask, _CAUSAL, mask._version)


def _check_selects_by_name(config: Any) -> None:
    if not _selects_by_name(config):
        raise ValueError(
            f"{config.model_type} models have an attention of their own, and do not look it up by "
            "name: attn_implementation must be 'eager', or what transformers has for them; in a model of several parts "
            "name those that have others, as in attn_implementation={'text_config': 'entmax15'}"
        )


@functools.cache
def _selects_by_name(config: type) -> bool:
    """Whether the models of a configuration select attention by name; True for models outside of transformers."""
    name = config.__module__.replace("configuration_", "modeling_")
    if name not in sys.modules:
        return True
    models: list[Any] = [each for each in vars(sys.modules[name]).values() if isinstance(each, type)]
    own = [each for each in models if issubclass(each, PreTrainedModel) and each.__module__ == name]
    return all(each._can_set_attn_implementation() for each in own)


def _is_causal(mask: Tensor | None) -> bool:
    """Whether a mask was marked as causal and not changed since."""
    if mask is None or torch.compiler.is_compiling() or mask.is_inference():
        return False
    return getattr(mask, _CAUSAL, None) == mask._version


# -- saving and loading ----------------------------------------------------------------------------------------------

_CONFIG_KEY = "fenchel"
"""The key in ``config.json`` of regularizers by registered name, and by module for those on modules."""


def _own_omegas(model: PreTrainedModel) -> dict[str, Regularizer]:
    """Regularizers that are attributes of modules of a model, by the names of the modules in the base model."""
    prefix = f"{model.base_model_prefix}."
    found = {}
    for name, module in model.named_modules():
        own = None if isinstance(module, Regularizer) else getattr(module, "omega", None)
        if isinstance(own, Regularizer) and not type(module).__module__.startswith("fenchel."):
            found[name.removeprefix(prefix)] = own
    return found


def _names(config: Any) -> str | dict[str, str] | None:
    """The registered names in a configuration, in the form of ``attn_implementation``: a dictionary if parts differ."""
    parts = {"": config} | {key: getattr(config, key, None) for key in config.sub_configs}
    found = {key: getattr(part, "_attn_implementation", None) for key, part in parts.items() if part is not None}
    ours = {key: name for key, name in found.items() if name in _registered}
    if len(set(found.values())) == 1 and ours:
        return str(ours[""])
    return ours or None


@contextlib.contextmanager
def _recorded(model: PreTrainedModel) -> Iterator[None]:
    """A context in which the configuration of a model has its regularizers as attributes, which are saved."""
    names = _names(model.config)
    used = set(names.values() if isinstance(names, dict) else [names]) - {None}
    record: dict[str, dict[str, Any]] = {
        "names": {str(name): _registered[str(name)].omega.config() for name in used},
        "modules": {name: omega.config() for name, omega in _own_omegas(model).items()},
    }
    lost = [name for kind in record.values() for name, config in kind.items() if config is None]
    if lost:
        warnings.warn(
            f"a file cannot hold the regularizers of {', '.join(map(str, lost))}: register the name, or put the "
            "regularizer on the module in __init__ of a subclass of the model, before you load what is saved now",
            stacklevel=4,
        )
    record["modules"] = {name: config for name, config in record["modules"].items() if config is not None}
    attributes = vars(model.config)
    before = {key: attributes.pop(key) for key in (_CONFIG_KEY, "attn_implementation") if key in attributes}
    try:
        if names is not None:
            attributes["attn_implementation"] = names
        if any(record.values()):
            attributes[_CONFIG_KEY] = record
        yield
    finally:
        for key in (_CONFIG_KEY, "attn_implementation"):
            attributes.pop(key, None)
        attributes.update(before)


def _prepare(config: Any) -> None:
    """Register the names in a configuration before its model is built; raise an error for names that it cannot use."""
    record = getattr(config, _CONFIG_KEY, None)
    name = str(getattr(config, "_attn_implementation", None))
    saved: Mapping[str, Any] = record.get("names", {}) if isinstance(record, Mapping) else {}
    if name in saved and name not in _registered and saved[name] is not None:
        register(name, Regularizer.from_config(saved[name]))
    elif (
        name in saved
        and name in _registered
        and saved[name] != _registered[name].omega.config()
        and saved[name] is not None
    ):
        warnings.warn(
            f"the model was saved with {Regularizer.from_config(saved[name])!r} as {name!r}; what is registered under "
            f"that name now is used, {_registered[name].omega!r}",
            stacklevel=4,
        )
    if name in _registered:
        _check_selects_by_name(type(config))


def _restore_omegas(model: PreTrainedModel) -> None:
    """Set the saved regularizers of modules, after a model is built and before its tensors are loaded."""
    record = getattr(model.config, _CONFIG_KEY, None)
    saved: Mapping[str, Any] = record.get("modules", {}) if isinstance(record, Mapping) else {}
    modules = dict(model.named_modules()) if saved else {}
    for name, config in saved.items():
        module = modules.get(name, modules.get(f"{model.base_model_prefix}.{name}"))
        if module is not None and not isinstance(getattr(module, "omega", None), Regularizer):
            module.omega = Regularizer.from_config(config)


def _install() -> None:
    """Patch ``PreTrainedModel`` so that models save and load their regularizers; a second call changes nothing."""
    make, finish, save = PreTrainedModel.__init__, PreTrainedModel.post_init, PreTrainedModel.save_pretrained
    choose = PreTrainedModel.set_attn_implementation
    if getattr(make, "_by_fenchel", False):
        return

    @functools.wraps(make)
    def __init__(self: Any, config: Any, *inputs: Any, **options: Any) -> None:
        _prepare(config)
        make(self, config, *inputs, **options)

    @functools.wraps(finish)
    def post_init(self: Any) -> None:
        finish(self)
        _restore_omegas(self)

    @functools.wraps(save)
    def save_pretrained(self: Any, *inputs: Any, **options: Any) -> Any:
        with _recorded(self):
            return save(self, *inputs, **options)

    @functools.wraps(choose)
    def set_attn_implementation(self: Any, attn_implementation: Any, *inputs: Any, **options: Any) -> Any:
        whole = attn_implementation.get("") if isinstance(attn_implementation, Mapping) else attn_implementation
        if whole in _registered:
            _check_selects_by_name(type(self.config))  # transformers would log a message and use softmax
        return choose(self, attn_implementation, *inputs, **options)

    __init__._by_fenchel = True  # type: ignore[attr-defined]
    PreTrainedModel.__init__ = __init__
    PreTrainedModel.post_init = post_init
    PreTrainedModel.save_pretrained = save_pretrained
    PreTrainedModel.set_attn_implementation = set_attn_implementation


_install()


# -- generation ------------------------------------------------------------------------------------------------------


class EntmaxLogitsProcessor(LogitsProcessor):  # type: ignore[misc]
    r"""Entmax sampling in ``generate``: maps logits (batch, V) to :math:`\log \operatorname{argmax}_{T\Omega}(s)`.

    Words outside of the support get −inf, and are never drawn. It is for models that were trained with the loss of the
    same Ω. No other truncation is needed, so pass ``top_k=0`` (transformers' default is 50). Beam search and beam
    sampling add up these logarithms; they call it with log-softmax, which differs from logits by a constant.

    Args:
        omega: the regularizer; ``Tsallis(1.5)`` by default.
        temperature: T > 0. The temperature of ``generate`` is applied afterwards, as a power of the probabilities.

    Example:
        >>> import torch
        >>> from fenchel.integrations.transformers import EntmaxLogitsProcessor
        >>> EntmaxLogitsProcessor()(torch.tensor([[1]]), torch.tensor([[2.0, 1.4, 0.2]])).exp()
        tensor([[0.7073, 0.2927, 0.0000]])

    In a call: ``model.generate(…, do_sample=True, top_k=0, logits_processor=[EntmaxLogitsProcessor()])``.

    References: Martins, Marinho & Martins (2020).
    """

    def __init__(self, omega: Regularizer | None = None, *, temperature: float = 1.0) -> None:
        self.omega = Tsallis(1.5) if omega is None else check_omega(omega)
        self.temperature = check_positive(temperature, "temperature")

    def __repr__(self) -> str:
        return f"EntmaxLogitsProcessor({self.omega!r}, temperature={self.temperature:g})"

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Log-probabilities of the shape and dtype of ``scores``, (batch, V)."""
        omega = self.omega if self.temperature == 1.0 else self.temperature * self.omega
        logs = omega.log_argmax(scores.to(torch.promote_types(scores.dtype, torch.float32)), dim=-1)
        return logs.to(scores.dtype)


# -- training --------------------------------------------------------------------------------------------------------


class TrainerLoss:
    r"""A Fenchel-Young loss for ``transformers.Trainer(compute_loss_func=…)``.

    .. math:: \frac1n \sum_t L_\Omega(s_t, y_t)

    n is the number of labels in the whole batch, over all steps of gradient accumulation, if the Trainer counts them,
    else in this call. With ``compute_loss_func`` the Trainer does not pass labels to the model, so that
    encoder-decoders need ``decoder_input_ids``: ``DataCollatorForSeq2Seq(tokenizer, model)`` adds them.

    Args:
        omega: the regularizer; ``Tsallis(1.5)`` by default.
        shift_labels: True for causal language models, where position t predicts label t + 1; False for masked language
            models, encoder-decoders and classifiers.
        ignore_index: a label that is left out.
        label_smoothing: the share of each label that is spread uniformly over all classes.

    Example:
        >>> import torch
        >>> from fenchel.integrations.transformers import TrainerLoss
        >>> loss = TrainerLoss(shift_labels=True)
        >>> outputs = {"logits": torch.tensor([[[0.5, 0.0], [0.0, 3.0], [9.0, 9.0]]])}
        >>> labels = torch.tensor([[-100, 0, 1]])
        >>> loss(outputs, labels), loss(outputs, labels, num_items_in_batch=4)
        (tensor(0.0922), tensor(0.0461))

    In a call: ``Trainer(model, arguments, train_dataset=…, compute_loss_func=TrainerLoss(shift_labels=True))``.

    References: Blondel, Martins & Niculae (2020); Peters, Niculae & Martins (2019), section 3.2.
    """

    def __init__(
        self,
        omega: Regularizer | None = None,
        *,
        shift_labels: bool,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> None:
        self.omega = Tsallis(1.5) if omega is None else check_omega(omega)
        self.shift_labels = shift_labels
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing

    def __repr__(self) -> str:
        return f"TrainerLoss({self.omega!r}, shift_labels={self.shift_labels})"

    def __call__(self, outputs: Any, labels: Tensor | None, num_items_in_batch: float | Tensor | None = None) -> Tensor:
        """The loss, a scalar, of the outputs of a model: a mapping or a tuple with logits (…, V)."""
        if labels is None:
            raise ValueError("labels must be in the batch, got None; name them by TrainingArguments(label_names=…)")
        logits: Tensor = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        labels = labels.to(logits.device)
        if self.shift_labels:
            if labels.dim() < 2 or logits.shape[:-1] != labels.shape:
                raise ValueError(
                    f"labels must have shape {tuple(logits.shape[:-1])}, (…, length), to be shifted, "
                    f"got {tuple(labels.shape)}"
                )
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        # In float32, as transformers does: half precision is too coarse for sums over large vocabularies.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = fy_loss(
            logits,
            labels,
            self.omega,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )
        count = is_kept(labels, self.ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)
