"""rapt.vllm without an engine: the switch, vLLM's interface, and calls against vLLM's own kernels. test_vllm_engine.py has engines."""

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rapt.vllm


def test_import_is_light():
    """Neither vLLM nor PyTorch is imported with the plug-in's module, nor where the plug-in is off."""
    code = "import sys, rapt.vllm; rapt.vllm.register(); print('vllm' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"RAPT_VLLM": "0"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_switch_refuses_other_words(monkeypatch):
    monkeypatch.setenv("RAPT_VLLM", "yes")
    with pytest.raises(ValueError, match="RAPT_VLLM: got 'yes'; wanted 0 .* or 1"):
        rapt.vllm.register()


@pytest.mark.parametrize(
    "version, supported",
    [("0.32.0", True), ("0.32.1+cpu", True), ("0.31.9", False), ("0.33.0rc1", False), ("1.0", False), ("dev", False)],
)
def test_versions(version, supported):
    assert rapt.vllm.is_supported(version) is supported


def test_entry_point():
    project = Path(__file__).parents[2] / "pyproject.toml"
    if not project.exists():
        pytest.skip("the tests are not in rapt's repository")
    assert re.search(r'(?m)^\[project.entry-points."vllm.general_plugins"\]\nrapt = "rapt.vllm:register"$', project.read_text())


# What the plug-in overrides or calls: a class or function of vLLM, and its parameters.
_BACKENDS = "vllm.v1.attention.backends."
SIGNATURES = {
    _BACKENDS + "cpu_attn:CPUAttentionBackend.get_supported_kernel_block_sizes": "kv_cache_spec",
    _BACKENDS + "cpu_attn:CPUAttentionBackend.get_supported_head_sizes": "",
    _BACKENDS + "cpu_attn:CPUAttentionBackend.get_impl_cls": "",
    _BACKENDS + "cpu_attn:CPUAttentionBackend.get_builder_cls": "",
    _BACKENDS + "cpu_attn:CPUAttentionBackendImpl.__init__": "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window "
    "kv_cache_dtype logits_soft_cap attn_type kv_sharing_target_layer_name sinks",
    _BACKENDS + "cpu_attn:CPUAttentionBackendImpl.forward": "self layer query key value kv_cache attn_metadata output output_scale "
    "output_block_scale",
    _BACKENDS + "cpu_attn:CPUAttentionMetadataBuilder.__init__": "self kv_cache_spec layer_names vllm_config device",
    _BACKENDS + "cpu_attn:CPUAttentionMetadataBuilder.build": "self common_prefix_len common_attn_metadata fast_build",
    _BACKENDS + "mla.cpu_mla:CPUMLAImpl.forward_mqa": "self q kv_c_and_k_pe_cache attn_metadata layer",
    _BACKENDS + "mla.cpu_mla:CPUMLAImpl.do_kv_cache_update": "self kv_c_normed k_pe kv_cache slot_mapping kv_cache_dtype k_scale",
    _BACKENDS + "mla.cpu_mla:CPUMLABackend.get_supported_head_sizes": "",
    _BACKENDS + "mla.cpu_mla:CPUMLABackend.get_impl_cls": "",
    _BACKENDS + "mla.prefill.cpu_sdpa:CPUSDPAMLAPrefillBackend.run_prefill_new_tokens": "self q k v return_softmax_lse out output_scale",
    _BACKENDS + "mla.prefill.cpu_sdpa:CPUSDPAMLAPrefillBackend.run_prefill_context_chunk": "self chunk q k v out",
    _BACKENDS + "mla.prefill.registry:register_mla_prefill_backend": "backend class_path",
    _BACKENDS + "registry:register_backend": "backend class_path is_mamba",
    "vllm._custom_ops:chunk_gated_delta_rule_cpu": "query key value g beta initial_state output_final_state cu_seqlens head_first "
    "use_qk_l2norm_in_kernel initial_state_indices eps",
    "vllm._custom_ops:fused_sigmoid_gating_delta_rule_update_cpu": "A_log dt_bias q k v a b initial_state_source "
    "initial_state_indices cu_seqlens use_qk_l2norm_in_kernel softplus_beta softplus_threshold",
    "vllm._custom_ops:fused_sigmoid_gating_delta_rule_update_spec_cpu": "A_log dt_bias q k v a b initial_state_source "
    "spec_state_indices num_accepted_tokens cu_seqlens use_qk_l2norm_in_kernel softplus_beta softplus_threshold",
    _BACKENDS + "utils:get_dcp_local_seq_lens": "seq_lens dcp_size dcp_rank cp_kv_cache_interleave_size",
    "vllm.v1.worker.block_table:BlockTable.compute_slot_mapping": "self num_reqs query_start_loc positions",
    "vllm.distributed.parallel_state:get_dcp_group": "",
    "vllm.distributed.parallel_state:GroupCoordinator.all_gather": "self input_ dim",
}
# Fields that the plug-in reads, or makes: all of CPUAttentionMetadata's are listed, so that a new one is seen.
METADATA = (
    "num_actual_tokens max_query_len query_start_loc max_seq_len seq_lens block_table slot_mapping scheduler_metadata causal "
    "dynamic_causal use_sdpa_prefill num_decode_tokens sdpa_attn_masks sdpa_start_loc encoder_cache"
)
PARALLEL = "decode_context_parallel_size cp_kv_cache_interleave_size dcp_comm_backend"  # fields of ParallelConfig
READ = "query_start_loc seq_lens num_reqs num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping causal"


@pytest.fixture(scope="module")
def vllm():
    module = pytest.importorskip("vllm", reason="vLLM is not installed")
    if not rapt.vllm.is_supported(module.__version__):
        pytest.fail(f"vLLM {module.__version__} is not in rapt.vllm.SUPPORTED, {rapt.vllm.SUPPORTED}")
    return module


def test_interface(vllm):
    """If this fails, vLLM's interface has moved: follow it in rapt/_vllm_*.py, then change this table and rapt.vllm.SUPPORTED."""
    moved = []
    for path, wanted in SIGNATURES.items():
        module, _, names = path.partition(":")
        found = importlib.import_module(module)
        try:
            for name in names.split("."):
                found = getattr(found, name)
            got = " ".join(inspect.signature(found).parameters)
        except AttributeError as error:
            got = str(error)
        if got != wanted:
            moved.append(f"{path}: got ({got}); wanted ({wanted})")
    from vllm.config import ParallelConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadata
    from vllm.v1.kv_cache_interface import KVCacheLayout

    fields = [field.name for field in dataclasses.fields(CPUAttentionMetadata)]
    if fields != METADATA.split():
        moved.append(f"CPUAttentionMetadata: got {' '.join(fields)}; wanted {METADATA}")
    for kind, read in (CommonAttentionMetadata, READ), (ParallelConfig, PARALLEL):
        missing = set(read.split()) - {field.name for field in dataclasses.fields(kind)}
        if missing:
            moved.append(f"{kind.__name__}: has no {', '.join(sorted(missing))}")
    if CPUAttentionBackend.supported_kv_cache_layouts() != (KVCacheLayout.LBHNC,):
        moved.append("CPUAttentionBackend: another layout of the cache")
    assert not moved, "\n".join(moved)


def test_another_plug_in_keeps_its_backend(vllm, monkeypatch):
    from vllm.v1.attention.backends import registry
    from vllm.v1.attention.backends.mla.prefill import registry as prefills

    tables = registry._ATTN_OVERRIDES, registry._MAMBA_ATTN_OVERRIDES, prefills._MLA_PREFILL_OVERRIDES
    for table in tables:
        for member in list(table):
            monkeypatch.delitem(table, member)
    monkeypatch.setitem(registry._ATTN_OVERRIDES, registry.AttentionBackendEnum.CPU_MLA, "another.Backend")
    monkeypatch.setenv("RAPT_VLLM", "1")
    try:
        rapt.vllm.register()
        rapt.vllm.register()
        assert registry.AttentionBackendEnum.CPU_ATTN.get_path() == "rapt._vllm_attention.Backend"
        assert registry.AttentionBackendEnum.CPU_MLA.get_path() == "another.Backend"
        assert registry.MambaAttentionBackendEnum.GDN_ATTN.get_path() == "rapt._vllm_delta_rule.Backend"
    finally:
        for table in tables:
            table.clear()


def test_an_unknown_version_is_refused(vllm, monkeypatch):
    from rapt import _vllm_log

    said = []
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    monkeypatch.setattr(_vllm_log.logger, "warning", lambda text, *words: said.append(text % words))
    monkeypatch.setattr(rapt.vllm, "_override", lambda: pytest.fail("registered"))
    monkeypatch.delenv("RAPT_VLLM", raising=False)
    rapt.vllm.register()
    assert said == ["rapt: got vLLM 0.99.1; wanted 0.32 or newer, below 0.33. vLLM keeps its own kernels; RAPT_VLLM=0 hides this."]
