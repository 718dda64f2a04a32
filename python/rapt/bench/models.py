"""Whole models of transformers, made from configs with random weights, attending by "sdpa" and by "rapt": forwards, or steps of
training."""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import rapt.transformers
from rapt._chart import title_of
from rapt.bench.report import Progress, ratio_text, time_text
from rapt.bench.sets import DTYPES
from rapt.bench.timing import CLOCKS, add_ratio, interleave, statistics_of

SIDES = ("sdpa", "rapt")
PEER = "sdpa"
RATIOS = {"back_to_back": "vs_sdpa"}
_hf: Any = transformers  # much of it is untyped
_functions: Any = ALL_ATTENTION_FUNCTIONS


@dataclass(frozen=True)
class Model:
    """Sizes of a model and of its input. `length` is that of the attention: tokens, patches and one, or frames; of "decode"
    the keys in the cache before the one new token."""

    name: str
    kind: str
    batch: int
    length: int
    layers: int
    hidden: int
    heads: int
    inner: int
    kv_heads: int
    vocabulary: int = 0


MODELS = [
    Model("BERT base, 8 x 128", "bert", 8, 128, 12, 768, 12, 3072, 12, 30522),
    Model("MiniLM-L6, 32 x 64", "bert", 32, 64, 6, 384, 12, 1536, 12, 30522),
    Model("ViT-B/16, 8 x 197", "vit", 8, 197, 12, 768, 12, 3072, 12),
    Model("Whisper base encoder, 1 x 1500", "whisper", 1, 1500, 6, 512, 8, 2048, 8),
    Model("Qwen3-Next-like, prefill 1024", "linear", 1, 1024, 8, 1024, 8, 2816, 2, 32000),
    Model("Llama-like, prefill 2048", "prefill", 1, 2048, 16, 1024, 16, 2816, 4, 32000),
    Model("Llama-like, decode after 1024", "decode", 1, 1024, 16, 1024, 16, 2816, 4, 32000),
]


def quick() -> list[Model]:
    """The same with one layer of each kind and an eighth of the sizes."""
    small = []
    for m in MODELS:
        side = max(1, int((m.length // 8) ** 0.5))  # of an image
        length = side**2 + 1 if m.kind == "vit" else m.length // 8
        sizes: Any = {"hidden": m.hidden // 8, "inner": m.inner // 8, "vocabulary": m.vocabulary // 8}
        layers = 4 if m.kind == "linear" else 1
        small.append(replace(m, name=f"{m.name} (quick)", layers=layers, batch=max(1, m.batch // 8), length=length, **sizes))
    return small


def build(m: Model) -> tuple[Any, dict[str, Any]]:
    """The model, attending by "sdpa", and what a forward is given."""
    torch.manual_seed(0)
    common = {"hidden_size": m.hidden, "num_hidden_layers": m.layers, "num_attention_heads": m.heads, "intermediate_size": m.inner}
    tokens = torch.randint(m.vocabulary or 1, (m.batch, m.length))
    inputs: dict[str, Any]
    sizes: dict[str, Any]
    if m.kind == "bert":
        made = _hf.BertModel._from_config(_hf.BertConfig(**common, vocab_size=m.vocabulary), attn_implementation="sdpa")
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}  # as a tokenizer gives it
    elif m.kind == "vit":
        size = 16 * round((m.length - 1) ** 0.5)
        made = _hf.ViTModel._from_config(_hf.ViTConfig(**common, image_size=size, patch_size=16), attn_implementation="sdpa")
        inputs = {"pixel_values": torch.randn(m.batch, 3, size, size)}
    elif m.kind == "whisper":
        sizes = {"d_model": m.hidden, "encoder_layers": m.layers, "encoder_attention_heads": m.heads, "encoder_ffn_dim": m.inner}
        config = _hf.WhisperConfig(**sizes, decoder_layers=1, decoder_attention_heads=m.heads, max_source_positions=m.length)
        made = _hf.WhisperModel._from_config(config, attn_implementation="sdpa").encoder
        inputs = {"input_features": torch.randn(m.batch, config.num_mel_bins, 2 * m.length)}
    elif m.kind == "linear":  # but for every fourth layer
        size = m.hidden // m.heads
        kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(m.layers)]
        sizes = common | {"num_key_value_heads": m.kv_heads, "head_dim": size, "vocab_size": m.vocabulary, "layer_types": kinds}
        sizes |= {"linear_num_key_heads": m.heads, "linear_num_value_heads": 2 * m.heads, "num_experts": 0}
        config = _hf.Qwen3NextConfig(**sizes, linear_key_head_dim=size, linear_value_head_dim=size, tie_word_embeddings=True)
        made = _hf.Qwen3NextForCausalLM._from_config(config, attn_implementation="sdpa")
        inputs = {"input_ids": tokens, "use_cache": True, "logits_to_keep": 1}
    else:
        sizes = common | {"num_key_value_heads": m.kv_heads, "vocab_size": m.vocabulary}
        config = _hf.LlamaConfig(**sizes, tie_word_embeddings=True)
        made = _hf.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
        inputs = {"input_ids": tokens, "use_cache": True, "logits_to_keep": 1}  # as generate() does it
    return made.eval(), inputs


class Side:
    """A model with its input. Calling it is one forward, which returns the output."""

    def __init__(self, model: Any, inputs: dict[str, Any], decode: bool) -> None:
        self.model, self.inputs, self.cache = model, inputs, None
        self.attention_s, self.shares = 0.0, list[float]()
        if decode:
            self.cache = model(**inputs).past_key_values
            self.inputs = inputs | {"input_ids": inputs["input_ids"][:, :1], "past_key_values": self.cache}

    def __call__(self) -> Tensor:
        self.attention_s, start = 0.0, time.perf_counter()
        out: Tensor = self.model(**self.inputs)[0]
        if self.cache is not None:
            self.cache.crop(-1)
        self.shares.append(self.attention_s / (time.perf_counter() - start))
        return out

    @contextmanager
    def clocked(self) -> Iterator[None]:
        """Within, attention_s is the time that a forward spent inside transformers' attention function."""
        name = self.model.config._attn_implementation
        attention = _functions[name]

        def clock(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = attention(*args, **kwargs)
            self.attention_s += time.perf_counter() - start
            return result

        _functions[name] = clock
        try:
            yield
        finally:
            del _functions[name]


class Step:
    """A model in training, with its input. Calling it is one step: forward, loss, backward, AdamW."""

    def __init__(self, model: Any, inputs: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        self.model, self.inputs, self.optimizer = model, inputs, optimizer

    def backward(self) -> None:
        self.optimizer.zero_grad()
        out: Tensor = self.model(**self.inputs)[0]
        # Of half of the numbers: those of one sign would leave nothing to learn from behind a normalisation.
        out.float().chunk(2, -1)[0].square().mean().backward()  # type: ignore[no-untyped-call]

    def __call__(self) -> None:
        self.backward()
        self.optimizer.step()

    def gradients(self) -> Tensor:
        self.backward()
        return torch.cat([p.grad.flatten().float() for p in self.model.parameters() if p.grad is not None])


class Pair:
    """A model attending by "sdpa" and one by "rapt". They share their weights, so that caches and memory are as with one."""

    def __init__(self, case: Model, dtype: torch.dtype, device: str = "cpu", train: bool = False) -> None:
        rapt.transformers.register()
        self.case = case
        with torch.inference_mode(not train):
            self._make(case, dtype, device, train)

    def _make(self, case: Model, dtype: torch.dtype, device: str, train: bool) -> None:
        model, inputs = build(case)
        model = model.to(device, dtype)
        for name, x in inputs.items():
            if isinstance(x, Tensor):
                inputs[name] = x.to(device, dtype if x.is_floating_point() else None)
        shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
        other = copy.deepcopy(model, shared)
        other.set_attn_implementation("rapt")
        self.sides: dict[str, Any]
        if not train:
            self.sides = {name: Side(m, inputs, case.kind == "decode") for name, m in zip(SIDES, (model, other))}
            return
        inputs = {name: x for name, x in inputs.items() if name != "logits_to_keep"}
        if "use_cache" in inputs:
            inputs["use_cache"] = False
        for each in (model.train(), other.train()):
            for module in each.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        self.sides = {name: Step(m, inputs, optimizer) for name, m in zip(SIDES, (model, other))}


def run_pair(pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    sides = pair.sides
    row: dict[str, Any] = asdict(pair.case)
    if options.train:
        outs = [side.gradients() for side in sides.values()]
        clocked: Any = nullcontext()
    else:
        outs = [side().float() for side in sides.values()]
        clocked = ExitStack()
        for side in sides.values():
            side.shares.clear()
            clocked.enter_context(side.clocked())
    row |= {"difference": float((outs[1] - outs[0]).abs().max()), "largest": float(outs[0].abs().max())}
    with clocked:
        budget = {"seconds": options.seconds, "samples": options.samples, "sample_s": options.sample_ms * 1e-3}
        samples = dict(zip(sides, interleave([list(sides.values())], pause=False, clock=CLOCKS[options.device], **budget)))
    for name, side in sides.items():
        # A clock of the CPU's says nothing of what is only being queued, nor of a backward.
        share = statistics.median(side.shares) if options.device == "cpu" and not options.train else None
        row[name] = statistics_of(samples[name]) | {"attention": share}
    add_ratio(row, "vs_sdpa", samples["sdpa"], samples["rapt"])
    return row


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    cases = [m for m in (quick() if options.quick else MODELS) if not (options.train and m.kind == "decode")]
    rows = []
    with Progress(len(options.threads) * len(options.dtype) * len(cases)) as progress:
        for case, dtype in itertools.product(cases, options.dtype):
            pair = None
            for threads in options.threads:
                progress.begin(f"{title_of(dtype, threads)}, {case.name}")
                if threads:
                    torch.set_num_threads(threads)
                pair = pair or Pair(case, DTYPES[dtype], options.device, options.train)
                with torch.inference_mode(not options.train):
                    rows.append({"dtype": dtype, "threads": threads} | run_pair(pair, options))
    order = [(threads, dtype) for threads in options.threads for dtype in options.dtype]
    return sorted(rows, key=lambda row: order.index((row["threads"], row["dtype"])))


HEAD = ["model", "sdpa ms", "rapt ms", "sdpa/rapt, best", "attention, sdpa", "attention, rapt", "difference (of)"]


def cells_of(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        *(time_text(row[name]) for name in SIDES),
        ratio_text(row, "vs_sdpa"),
        *("-" if (share := row[name]["attention"]) is None else f"{100 * share:.1f}%" for name in SIDES),
        f"{row['difference']:.1e} ({row['largest']:.2g})",
    ]
