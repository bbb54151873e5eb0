"""`DotProductAttention`: the module, its state and its calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...call.kept import Kept
from ...call.recipe import in_force
from ...call.taking import fields_of
from ...errors import SpecError
from ...spec.layouts import parse
from .arguments import OLDER, method_taking
from .backends import (
    FlashAttention,
    FusedAttention,
    UnfusedDotProductAttention,
    world_size,
)
from .calls import (
    LENGTHS,
    TENSORS,
    Call,
    Carriers,
    Settings,
    Sizes,
    carriers_of,
    form_of,
    form_of_arguments,
    sequences_of,
    tensors_of,
    three_of,
)
from .choice import Facts, backend_of, choices
from .core import Output, PlannedCall, Words, plan_of
from .environment import NONDETERMINISTIC, enabled
from .masks import check_set_window_size, ends_at_corner, mask_name
from .names import AttnTypes, SoftmaxType
from .over_group import over_group
from .recipes import ModuleScales, recipe_in_force
from .rng import checkpointed

FORMATS = ("sbhd", "bshd", "thd")
KV_FORMAT = "bshd"  # of caches
_CALL = fields_of(Call, OLDER)


def _by_form(
    module: DotProductAttention, args: tuple[Any, ...], given: dict[str, Any]
) -> Output | None:
    """The result of a call whose arguments, as they are given, tell its form; None of others.
    Raises: as `DotProductAttention.forward` does."""
    if torch.compiler.is_compiling() or in_force.recipe is not None or module.is_spread:
        return None
    if (form := form_of_arguments(args, given)) is None:
        return None
    plan = module.plan_by_form(form, args, given)
    if not plan.reads:
        return plan(args[:3], None, {})
    more = {"softmax_offset": module.softmax_offset}
    return plan(args[:3], _CALL.filled("forward", args, given), more)


class DotProductAttention(nn.Module):
    """Attention with TransformerEngine's arguments, computed by attngen.

    Calls take query_layer, key_layer and value_layer in `qkv_format`, or packed tensors, qkv_layer
    or kv_layer, on which the gradient then lands, and return […, h · d_v], or that and the largest
    logits [h] with return_max_logit. docs/guide/transformer-engine.md says what differs.
    """

    _plans: Kept[PlannedCall]

    @method_taking(Settings)
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        kv = settings.kv_channels
        dim, dim_v = (kv, kv) if isinstance(kv, int) else kv
        self.name = settings.name
        self.qkv_format = settings.qkv_format
        self.attn_mask_type = mask_name(settings.attn_mask_type)
        self.window_size = check_set_window_size(self.attn_mask_type, settings.window_size)
        self.bottom_right_diagonal = settings.bottom_right_diagonal
        self.tp_group = settings.tp_group
        self.tp_size = settings.tp_size if self.tp_group is None else world_size(self.tp_group)
        self.get_rng_state_tracker = settings.get_rng_state_tracker
        self.num_attention_heads = settings.num_attention_heads
        self.layer_number = 1 if settings.layer_number is None else settings.layer_number
        self.set_context_parallel_group(
            settings.cp_group, settings.cp_global_ranks, settings.cp_stream, settings.cp_comm_type
        )
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = dim, dim_v
        self.num_gqa_groups = settings.num_gqa_groups or settings.num_attention_heads
        self.num_gqa_groups_per_partition = self.num_gqa_groups // self.tp_size
        assert settings.num_attention_heads % self.num_gqa_groups == 0, (
            "num_attention_heads must be a multiple of num_gqa_groups"
        )
        assert settings.attention_type in AttnTypes, f"attention_type: one of {AttnTypes}"
        self.attention_type = settings.attention_type
        self.deterministic = not enabled(NONDETERMINISTIC) or (
            torch.are_deterministic_algorithms_enabled()
        )
        self.attention_dropout = settings.attention_dropout
        self.return_max_logit = bool(settings.return_max_logit)
        self.rng_states_tracker = None
        self._make_softmax(settings.softmax_type)
        context: Callable[[], Any] = nullcontext
        if settings.get_rng_state_tracker is not None and not settings.sequence_parallel:
            self.rng_states_tracker = settings.get_rng_state_tracker()
            context = self.rng_states_tracker.fork
        scale = settings.softmax_scale
        self.softmax_scale = 1 / math.sqrt(dim) if scale is None else scale
        self._fp8 = ModuleScales()
        self._make_backends(context)
        self.register_load_state_dict_post_hook(_allow_absent_state)  # type: ignore[no-untyped-call]

    def _make_softmax(self, kind: str) -> None:
        """The softmax and its sinks, [h / tp]: zeros that are no state, or a parameter."""
        SoftmaxType[kind]
        self.softmax_type = kind
        self.softmax_offset: Tensor | nn.Parameter | None = None
        if kind == "vanilla":
            return
        offset = torch.zeros(self.num_attention_heads // self.tp_size, device=_device())
        self.softmax_offset = nn.Parameter(offset) if kind == "learnable" else offset

    def _make_backends(self, context: Callable[[], Any]) -> None:
        given: dict[str, Any] = dict(
            softmax_scale=self.softmax_scale,
            attention_dropout=self.attention_dropout,
            attention_dropout_ctx=context,
            attention_type=self.attention_type,
            layer_number=self.layer_number,
            deterministic=self.deterministic,
            softmax_type=self.softmax_type,
            return_max_logit=self.return_max_logit,
        )
        self.flash_attention = FlashAttention(**given)
        self.fused_attention = FusedAttention(**given)
        self.unfused_attention = UnfusedDotProductAttention(**given)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Have this group, which a module of one part of the heads only keeps."""
        self.tp_group = tp_group

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Have calls of this rank's positions over a group, or for "a2a+p2p" two, inner and outer:
        p2p, all_gather, a2a or a2a+p2p. Ranks and streams are the group's own.
        """
        self.cp_group = cp_group
        self.is_spread = cp_group is not None and world_size(cp_group) > 1
        self.cp_global_ranks = cp_global_ranks
        self.cp_stream = cp_stream
        self.cp_comm_type = cp_comm_type

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, which plans of calls may depend on."""
        super().__setattr__(name, value)
        self.__dict__["_plans"] = Kept()

    def __getstate__(self) -> dict[str, Any]:
        """Attributes for copies and pickles, which make plans of their own."""
        return {**self.__dict__, "_plans": Kept()}

    # ---- state

    def get_extra_state(self) -> Tensor:
        """State of FP8 scales, uint8: the module's own, or as it was loaded; empty without."""
        return self._fp8.state()

    def set_extra_state(self, state: Any) -> None:
        """Take state of FP8 scales; TransformerEngine's is kept, so that it can be saved again.
        state: a uint8 tensor, bytes, or None."""
        self._fp8.load(state)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **given: Any
    ) -> None:
        """Take the extra state of TransformerEngine 1.6 and 1.7 under its name of then."""
        now, then = f"{prefix}_extra_state", f"{prefix}fused_attention._extra_state"
        if then in state_dict:
            state = state_dict.pop(then)
            state_dict.setdefault(now, state)
        super()._load_from_state_dict(state_dict, prefix, *args, **given)

    # ---- calls

    @method_taking(Call, quickly=_by_form)
    def forward(self, call: Call) -> Output:
        """The output […, h · d_v], or that and the largest logits.

        Raises: AssertionError for a mask or window that there is not; SpecError for what is not
            there, and as `attngen.attention` does; ValueError where no backend may compute it.
        """
        if self.is_spread:
            return over_group(self, call)
        plan = self._plan_of(call) if torch.compiler.is_compiling() else self._kept_plan_of(call)
        more: dict[str, Any] = {"softmax_offset": self.softmax_offset}
        carriers = tensors_of(call)
        if (cache := call.inference_params) is not None:
            q, k, v = carriers
            axes = self.qkv_format if call.qkv_format is None else call.qkv_format
            with torch.no_grad():  # caches have no gradient
                keys, values, ends_q, ends_kv, *_ = cache.append(self.layer_number, k, v, axes)
            carriers = Carriers(q, keys, values)
            more |= {"cu_seqlens_q": ends_q, "cu_seqlens_kv": ends_kv}
            if cache.reads_pages:
                more["page_table"] = cache.cache_manager.page_table
        attend = None if in_force.recipe is None else self._fp8.layer_for(carriers.q.device)
        if call.checkpoint_core_attention:
            return checkpointed(lambda: plan(carriers, call, more, attend), self.rng_states_tracker)
        found = plan(carriers, call, more, attend)
        return self._in_8_bits(found) if call.fp8_output else found

    def _in_8_bits(self, found: Output) -> Output:
        """Results whose output is an FP8 tensor, under a recipe."""
        if isinstance(found, Tensor):
            return self._fp8.output(found)
        out, max_logit = found
        return self._fp8.output(out), max_logit

    def plan_by_form(self, form: Any, args: tuple[Any, ...], given: dict[str, Any]) -> PlannedCall:
        """The plan of a call whose arguments, as they are given, have this form."""
        number = choices.number()  # first, as it may forget
        return self._plans.find((number, form), self._plan_as_given, args, given)

    def _plan_as_given(self, args: tuple[Any, ...], given: dict[str, Any]) -> PlannedCall:
        """The plan of a call of these arguments. Raises: as `forward` does."""
        return self._plan_of(_CALL.filled("forward", args, given))

    def _kept_plan_of(self, call: Call) -> PlannedCall:
        """The plan of calls like this one, made once; anew where an attribute of the module was
        set, or backends are to be chosen anew. Raises: as `_plan_of` does."""
        number = choices.number()  # first, as it may forget
        key = (number, recipe_in_force(), form_of(call))
        return self._plans.find(key, lambda: self._plan_of(call))

    def _plan_of(self, call: Call) -> PlannedCall:
        """The plan of a call. Raises: as `forward` does."""
        axes = self.qkv_format if call.qkv_format is None else call.qkv_format
        assert axes in FORMATS, f"qkv_format={axes!r}; allowed: {', '.join(FORMATS)}"
        given = call.attn_mask_type
        mask = self.attn_mask_type if given is None else mask_name(given)
        self._refuse(call, axes, mask)
        layout, carriers = carriers_of(call, axes)
        sizes = self._sizes_of(layout, carriers)
        present = {name for name in TENSORS if getattr(call, name) is not None}
        if self.softmax_offset is not None:
            present.add("softmax_offset")
        batch = sequences_of(layout, carriers)
        if (cache := call.inference_params) is not None:
            if mask == "padding_causal":
                mask = "padding_causal_bottom_right"  # new queries are the last ones
            layout = "paged_kv_" * bool(cache.reads_pages) + three_of(axes, KV_FORMAT)
            present = present - {*LENGTHS} | {"cu_seqlens_q", "cu_seqlens_kv"}
            batch = cache.max_batch_size if batch is None else batch
        words = self._words_of(call, layout, mask)
        bias = call.core_attention_bias
        facts = Facts(
            dtype=carriers.q.dtype,
            training=self.training and cache is None,
            deterministic=self.deterministic,
            max_logit=self.return_max_logit,
            num_splits=call.num_splits,
            bias_has_gradient=bias is not None and bias.requires_grad,
            recipe=None if parse(layout).paged else recipe_in_force(),  # pages stay in 16 bits
        )
        backend = backend_of(words, sizes, facts, cache)
        how = self.fused_attention.how(call.num_splits, backend)
        on_kernels = backend != "reference" and carriers.q.is_cuda
        trains = self.training or sizes.have_backward
        if cache is not None or (on_kernels and not trains):
            how = replace(how, forward_alone=True)
        return plan_of(words, how, batch, present)

    def _refuse(self, call: Call, axes: str, mask: str) -> None:
        """Raises: SpecError for what is not there, AssertionError for what does not fit."""
        if call.score_mod is not None:
            raise SpecError(
                "score_mod is a callback of cuDNN's graphs; attngen.attention has one of its own"
            )
        alibi = call.core_attention_bias_type == "alibi"
        assert alibi or call.alibi_slopes is None, "alibi_slopes: core_attention_bias_type is alibi"
        assert not alibi or call.core_attention_bias is None, "alibi takes no core_attention_bias"
        padding = "padding" in mask
        assert padding or axes != "thd", f"qkv_format='thd' needs a padding mask; got {mask!r}"
        assert padding or call.inference_params is None, (
            f"a KV cache needs a padding mask; got {mask!r}"
        )

    def _words_of(self, call: Call, layout: str, mask: str) -> Words:
        window = self.window_size if call.window_size is None else call.window_size
        corner = (call.bottom_right_diagonal, self.bottom_right_diagonal)
        scale = self.softmax_scale
        is_plain = scale == 1 / math.sqrt(self.hidden_size_per_attention_head_k)
        return Words(
            layout=layout,
            mask=mask,
            window=check_set_window_size(mask, window),
            bottom_right=ends_at_corner(mask, *corner),
            softmax=self.softmax_type,
            bias=call.core_attention_bias_type,
            softmax_scale=None if is_plain else scale,
            dropout=self.attention_dropout if self.training else 0.0,
        )

    def _sizes_of(self, layout: str, carriers: Carriers) -> Sizes:
        """The sizes of a call. Raises: SpecError where they are not the module's."""
        found = Sizes.of(layout, carriers)
        wanted = {
            "head dim of queries and keys": (found.dim, self.hidden_size_per_attention_head_k),
            "head dim of values": (found.dim_v, self.hidden_size_per_attention_head_v),
            "key/value heads": (found.groups, self.num_gqa_groups_per_partition),
        }
        wrong = [f"{name}: {x}, of the module {y}" for name, (x, y) in wanted.items() if x != y]
        if wrong:
            raise SpecError(wrong)
        return found


def _device() -> torch.device:
    """The current CUDA device; without one the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def _allow_absent_state(module: nn.Module, keys: Any) -> None:
    """Checkpoints of other attention have no state of FP8 scales."""
    keys.missing_keys[:] = [x for x in keys.missing_keys if not x.endswith("_extra_state")]
