"""Names without what wrappers put into them.

_orig_mod.layers.0._checkpoint_wrapped_module.weight
    ── clean ──────────> layers.0.weight
    ── clean_as_fsdp1 ─> _orig_mod.layers.0.weight
"""

from __future__ import annotations

_COMPILED = "_orig_mod."
_WRAPPED = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def clean(name: str) -> str:
    """A full name without the parts of torch.compile, checkpoint wrappers and FSDP1."""
    return clean_as_fsdp1(name.replace(_COMPILED, ""))


def clean_as_fsdp1(name: str) -> str:
    """The same, but torch.compile's prefix stays: torch's FSDP1 keeps it in its state dicts."""
    for prefix in _WRAPPED:
        name = name.replace(prefix, "")
    return name
