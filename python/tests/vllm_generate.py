"""Runs models through vLLM and writes what they give: vllm_generate.py FOLDER NAME... (one engine after another, in one process).

FOLDER/NAME is the model; FOLDER/out.RAPT_VLLM.json gets {NAME: {"tokens" or "vectors", "taken": layers by rapt, "left": others}}.
"""

import gc
import json
import os
import random
import re
import sys
import time

import numpy

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # layers() goes to processes of its own
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

_SHARED = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
# Keyword arguments of engines, beside those that all have.
ENGINES = {
    "llama": {"block_size": 32, "enable_prefix_caching": True, "max_num_batched_tokens": 128},  # prompts in chunks
    "llama80": {"block_size": 16 if os.environ["RAPT_VLLM"] == "1" else 32},  # vLLM's own kernels take multiples of 32
    "deepseek": {"block_size": None},  # vLLM's CPU backend has one size
    "qwen3_next": {"block_size": None, "dtype": "bfloat16"},  # vLLM's operators have no other type
    "llama_fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "whisper": {"max_model_len": 64},
    "llama_tp2": {"tensor_parallel_size": 2},
    "mqa_dcp2": {"max_num_batched_tokens": 128} | _SHARED,
    "mqa_a2a": {"dcp_comm_backend": "a2a", "dcp_kv_cache_interleave_size": 8, "enable_prefix_caching": True} | _SHARED,
}
LENGTHS = (5, 17, 64, 130, 257, 33)


def layers(model):
    """Of each layer's attention, whether rapt computes it."""
    return [
        any(kind.__module__.startswith("rapt.") for kind in type(module.impl).__mro__)  # vLLM derives cross attention's class
        for module in model.modules()
        if hasattr(module, "impl")
    ]


def sound(n, tokens):
    """A prompt of n samples of noise for the encoder, and of tokens for the decoder."""
    audio = numpy.random.default_rng(n).standard_normal(n).astype("float32"), 16000
    decoder = [3, *(random.randrange(4, 512) for _ in range(tokens - 1))]
    return {
        "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": audio}},
        "decoder_prompt": {"prompt_token_ids": decoder},
    }


def run(folder, name):
    from vllm import LLM, SamplingParams

    given = {"dtype": "float32", "block_size": 64, "enable_prefix_caching": False, "max_model_len": 1024} | ENGINES.get(name, {})
    llm = LLM(
        os.path.join(folder, re.sub("_(fp8|tp2|dcp2|a2a)$", "", name)),
        enforce_eager=True,
        max_num_seqs=8,
        disable_log_stats=True,
        **given,
    )
    random.seed(1)
    prompts = [{"prompt_token_ids": [random.randrange(3, 512) for _ in range(n)]} for n in LENGTHS]
    if name == "whisper":
        prompts = [sound(n, tokens) for n, tokens in ((32000, 3), (16000, 1), (25000, 5))]
    if name == "bert":
        made = {"vectors": [list(o.outputs.embedding) for o in llm.embed(prompts, use_tqdm=False)]}
    else:
        sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        first, again = (llm.generate(prompts, sampling, use_tqdm=False) for _ in range(2))  # the second with prefixes in the cache
        made = {"tokens": [[list(o.outputs[0].token_ids) for o in outputs] for outputs in (first, again)]}
    taken = llm.apply_model(layers)[0]
    made["prompts"] = [prompt.get("prompt_token_ids") for prompt in prompts]
    return made | {"taken": sum(taken), "left": len(taken) - sum(taken)}


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    results = {}
    for name in names:
        begin = time.time()
        try:
            results[name] = run(folder, name)
        except Exception as error:  # the others go on
            results[name] = {"error": f"{type(error).__name__}: {error}"[-2000:]}
        print(f"{name}: {time.time() - begin:.1f} s", file=sys.stderr, flush=True)
        gc.collect()
        with open(os.path.join(folder, f"out.{os.environ['RAPT_VLLM']}.json"), "w") as file:
            json.dump(results, file)
