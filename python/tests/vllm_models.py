"""Tiny random models in folders, as vLLM loads them."""

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 512
_COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Type of config, and what it has beside _COMMON.
MODELS = {
    "llama": ("Llama", {"head_dim": 64}),
    "mqa": ("Llama", {"head_dim": 64, "num_key_value_heads": 1}),
    "llama80": ("Llama", {"head_dim": 80, "hidden_size": 160, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": 48}),  # a window in all layers
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 32, "query_pre_attn_scalar": 32}),  # softcap, a window in some layers
    "gpt_oss": (  # sinks, a window in some layers
        "GptOss",
        {"head_dim": 32, "sliding_window": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),  # ALiBi
    "bert": ("Bert", {}),  # an encoder
    "whisper": (  # an encoder of two seconds of sound, and cross attention
        "Whisper",
        {
            "d_model": 128,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "num_mel_bins": 8,
            "max_source_positions": 100,
            "max_target_positions": 64,
            "decoder_start_token_id": 3,
            "suppress_tokens": [],
            "begin_suppress_tokens": [],
        },
    ),
    "deepseek": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": 64,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 48,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "head_dim": 64,
            "num_hidden_layers": 4,
            "mlp_only_layers": [0, 1, 2],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
}


def make(model: str, folder: str, dtype: torch.dtype = torch.float32) -> str:
    """Writes the model and a tokenizer of the words t0 to t511, and returns the folder."""
    kind, sizes = MODELS[model]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(_COMMON | sizes))
    task = {"Bert": "Model", "Whisper": "ForConditionalGeneration"}.get(kind, "ForCausalLM")
    made = getattr(transformers, kind + task)(config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1:  # wide enough for logits without near-ties; where tied, small, or tokens repeat themselves
                parameter.normal_(std=0.02 if "embed" in name else 0.08)
    made.to(dtype).save_pretrained(folder)
    if kind == "Whisper":
        special = {"unk_token": "t0", "pad_token": "t0", "bos_token": "t1", "eos_token": "t2"}
        tokenizer = transformers.WhisperTokenizer(vocab={f"t{i}": i for i in range(VOCABULARY)}, merges=[], **special)
        sound = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=2)
        transformers.WhisperProcessor(sound, tokenizer).save_pretrained(folder)
        return folder
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t0", pad_token="t0", bos_token="t1", eos_token="t2"
    )
    tokenizer.save_pretrained(folder)
    return folder
