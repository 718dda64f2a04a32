"""A plug-in for vLLM on CPUs, which vLLM finds once rapt is installed in the same environment.

    pip install rapt-attention        # then run vLLM as before: LLM(...), vllm serve, tensor parallelism
    RAPT_VLLM=0 vllm serve ...        # vLLM's own kernels

rapt computes decoder, encoder and cross attention over vLLM's paged cache, in place (grouped heads, sliding windows,
sinks, softcap, ALiBi, chunked prefill, prefix caching, fp8 caches, decode context parallelism); prefill and decode of
multi-head latent attention (MLA: DeepSeek); and the gated delta rule (Qwen3-Next, Qwen3.5). vLLM's own operators
compute calls that rapt does not support, and a line in vLLM's log states the reason.

SUPPORTED has the versions of vLLM that this plug-in supports. With another version it changes nothing and logs a
warning.
"""

from __future__ import annotations

import os
import re
from typing import Any

__all__ = ["SUPPORTED", "register"]

SUPPORTED = ((0, 32), (0, 33))
"""The first release of vLLM that the plug-in supports, and the first later one that it does not."""

_OVERRIDES = {"CPU_ATTN": "rapt._vllm_attention.Backend", "CPU_MLA": "rapt._vllm_mla.Backend"}
_MLA_PREFILL = "rapt._vllm_mla.PrefillBackend"
_DELTA_RULE = "rapt._vllm_delta_rule.Backend"


def register() -> None:
    """Registers rapt's classes in place of vLLM's for CPUs.

    vLLM calls this in each of its processes, by the entry point "rapt" of the group "vllm.general_plugins". Further
    calls change nothing. Does nothing if the environment's RAPT_VLLM is 0, on devices other than CPUs, and with
    versions outside SUPPORTED, for which it logs a warning. A backend that another plug-in has replaced stays. Raises
    ValueError for a RAPT_VLLM other than 0 and 1.
    """
    wanted = os.environ.get("RAPT_VLLM", "1")
    if wanted not in ("0", "1"):
        raise ValueError(f"RAPT_VLLM: got {wanted!r}; wanted 0 (vLLM's own kernels) or 1 (rapt's)")
    if wanted == "0":
        return
    import vllm

    from rapt._vllm_log import logger

    if not is_supported(vllm.__version__):
        first, last = (".".join(map(str, release)) for release in SUPPORTED)
        wanted = f"{first} or newer, below {last}"
        logger.warning("rapt: got vLLM %s; wanted %s. vLLM keeps its own kernels; RAPT_VLLM=0 hides this.", vllm.__version__, wanted)
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _override()


def is_supported(version: str) -> bool:
    """Whether the plug-in supports a version of vLLM, such as "0.32.0+cpu"."""
    release = re.match(r"(\d+)\.(\d+)", version)
    return release is not None and SUPPORTED[0] <= (int(release[1]), int(release[2])) < SUPPORTED[1]


def _override() -> None:
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum, register_backend

    from rapt._vllm_log import say_left

    def free(member: Any, path: str) -> bool:
        if member.is_overridden() and member.get_path() != path:
            say_left(member.name, f"{member.get_path()} has taken its place")
        return not member.is_overridden()

    for name, path in _OVERRIDES.items():
        if free(AttentionBackendEnum[name], path):
            register_backend(AttentionBackendEnum[name], path)
    if free(MLAPrefillBackendEnum.CPU, _MLA_PREFILL):
        register_mla_prefill_backend(MLAPrefillBackendEnum.CPU, _MLA_PREFILL)
    if free(MambaAttentionBackendEnum.GDN_ATTN, _DELTA_RULE):
        register_backend(MambaAttentionBackendEnum.GDN_ATTN, _DELTA_RULE, is_mamba=True)
