"""Faults of the masks and scores that a call names."""

from __future__ import annotations

from ..spec.attention_spec import AttentionSpec
from ..spec.fragment_checks import check_fragments
from .fragments import KNOWN, is_mask, no_mask
from .table import AttentionCall


def naming_violations(call: AttentionCall) -> list[str]:
    """Every fault of the fragments that a call names, whatever it passes to them."""
    if not is_mask(call.mask):
        return [no_mask(call.mask)]
    named = call.score_mod if isinstance(call.score_mod, str) else False
    spec = AttentionSpec(head_dim=1, mask=call.mask, score_mod=named)
    return [f"{violation.reason}." for violation in check_fragments(spec, KNOWN)]
