"""Generation of text by models of transformers with random weights: time to the first token, tokens a second and memory, by length
of the prompt, for each attention and cache."""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

import rapt.transformers
from rapt._chart import title_of
from rapt.bench.ops import peak_growth
from rapt.bench.report import Progress, ratio_text, time_text
from rapt.bench.sets import DTYPES
from rapt.bench.timing import CLOCKS, add_ratio, statistics_of

RATIOS: dict[str, str] = {}  # a mean over lengths says nothing
PEER = "sdpa"
_hf: Any = transformers  # much of it is untyped

_SIZES: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "vocab_size": 32000}
_SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 512}
_HEADS: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
_FEW: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_COMMON: dict[str, Any] = {"max_position_embeddings": 1 << 20, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_COMMON |= {"tie_word_embeddings": False}  # or tokens repeat themselves


def _qwen3_next(quick: bool) -> Any:
    heads = {"linear_num_key_heads": 2 if quick else 16, "linear_num_value_heads": 4 if quick else 32}
    size = 16 if quick else 128
    return {"num_experts": 0, "linear_key_head_dim": size, "linear_value_head_dim": size} | heads


def _deepseek(quick: bool) -> Any:
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    heads = 4 if quick else 16
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 8 if quick else 64}  # of rotary positions
    sizes |= {"first_k_dense_replace": 1 << 20}
    return sizes | (latent if quick else {})


def _deepseek_sparse(quick: bool) -> Any:
    indexer = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 16} if quick else {"index_n_heads": 16, "index_topk": 2048}
    return _deepseek(quick) | indexer


def _gpt_oss(quick: bool) -> Any:
    sizes = {"sliding_window": 16} if quick else {"intermediate_size": 2048}
    return sizes | {"num_local_experts": 4, "num_experts_per_tok": 2}


MODELS: dict[str, tuple[str, Callable[[bool], Any]]] = {
    "llama": ("LlamaConfig", lambda _: {}),
    "qwen3-next": ("Qwen3NextConfig", _qwen3_next),
    "deepseek": ("DeepseekV3Config", _deepseek),
    "deepseek-sparse": ("DeepseekV32Config", _deepseek_sparse),
    "gpt-oss": ("GptOssConfig", _gpt_oss),
}
CHECKED = 8  # tokens


def build(name: str, quick: bool, **sizes: int) -> Any:
    """The model in fp32, attending by "sdpa" if it can, else by "eager". `sizes` of its config come before the usual ones."""
    torch.manual_seed(0)
    config, more = MODELS[name]
    made = getattr(_hf, config)(**_COMMON | (_SMALL | _FEW if quick else _SIZES | _HEADS) | more(quick) | sizes)
    cls = _hf.MODEL_FOR_CAUSAL_LM_MAPPING[type(made)]
    return cls._from_config(made, attn_implementation="sdpa" if cls._supports_sdpa else "eager").eval()


@dataclass
class Side:
    """A model and a kind of cache."""

    name: str
    model: Any
    new_cache: Callable[[int], Any]
    decode: Any = None
    """What runs a step, if that is not the model."""
    cache: Any = None
    token: Any = None
    first: list[float] = field(default_factory=list)
    """Seconds to the first token."""
    peak_bytes: int | None = None

    def prefill(self, tokens: Tensor, room: int, chunk: int | None = None) -> Tensor:
        """A new cache with the prompt in it; the first token."""
        if chunk is None:  # eager attention has the matrix of scores, of all heads
            chunk = 512 if self.model.config._attn_implementation == "eager" else tokens.shape[1]
        self.cache = None
        self.cache = self.new_cache(tokens.shape[1] + room)
        for i in range(0, tokens.shape[1], chunk):
            self._run(self.model, tokens[:, i : i + chunk])
        made: Tensor = self.token
        return made

    def fill(self, shapes: list[tuple[Any, Any] | None], length: int, room: int) -> None:
        """A new cache with the first token of a prompt and random rows for the others."""
        batch = next(rows[0].shape[0] for rows in shapes if rows is not None)
        self.prefill(torch.zeros((batch, 1), dtype=torch.long, device=self.model.device), length + room)
        for i, rows in enumerate(shapes):
            if rows is not None:
                torch.manual_seed(i)
                blocks = (torch.randn(x.shape[0], x.shape[1], 256, x.shape[3], dtype=torch.float32).to(x) for x in rows)
                self.cache.update(*(x.repeat(1, 1, length // 256 + 1, 1)[:, :, : length - 1] for x in blocks), i)

    def step(self) -> Tensor:
        """The next token."""
        return self._run(self.model if self.decode is None else self.decode, self.token)

    def _run(self, model: Any, tokens: Tensor) -> Tensor:
        logits = model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        made: Tensor = logits[:, -1:].argmax(-1)
        self.token = made
        return made

    def cache_bytes(self) -> int:
        held = (getattr(layer, name, None) for layer in self.cache.layers for name in ("keys", "values"))
        return sum(x.nbytes for x in held if x is not None)


def sides_of(model: Any, options: argparse.Namespace) -> list[Side]:
    """Of one model's weights; the first is what the others are compared with."""
    rapt.transformers.register()
    peer, config = model.config._attn_implementation, model.config
    other = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    other.set_attn_implementation("rapt")
    sides = [
        Side(f"{peer}, DynamicCache", model, lambda _: _hf.DynamicCache(config=config)),
        Side(f"{peer}, StaticCache", model, lambda room: _hf.StaticCache(config=config, max_cache_len=room)),
    ]
    if options.compiled:
        for each in (model, other):
            name = each.config._attn_implementation
            sides.append(Side(f"{name}, StaticCache, compiled", each, sides[1].new_cache, torch.compile(each, dynamic=False)))
    sides.append(Side("rapt, Cache", other, lambda _: rapt.transformers.Cache(other.config)))
    for kv_dtype in options.cache:
        cache = lambda _, kv=kv_dtype: rapt.transformers.Cache(other.config, kv_dtype=kv)  # noqa: E731
        sides.append(Side(f"rapt, Cache {kv_dtype}", other, cache))
    return sides


def check(sides: list[Side], options: argparse.Namespace) -> None:
    """Exits unless all sides that do not quantise give the same tokens. Their model is in fp32 here."""
    for batch in options.batch:
        tokens = torch.randint(sides[0].model.config.vocab_size, (batch, min(64, *options.lengths))).to(options.device)
        wanted = None
        for side in sides:
            made = [side.prefill(tokens, CHECKED, options.chunk), *(side.step() for _ in range(CHECKED - 1))]
            got = torch.cat(made, 1).tolist()
            wanted = got if wanted is None else wanted
            if got != wanted and side.name.rpartition(" ")[2] not in options.cache:
                raise SystemExit(f"--generate: {side.name} gives the tokens {got} in fp32, and {sides[0].name} {wanted}: nothing is timed")


@contextmanager
def leaving_out(side: Side, found: dict[str, list[float]]) -> Iterator[None]:
    """Drops a side from `found` if the GPU has no memory for what it does inside."""
    try:
        yield
    except torch.OutOfMemoryError:
        side.cache = None
        del found[side.name]


def run_length(sides: list[Side], batch: int, length: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a token's step, in turn, of each side that does not run out of GPU memory."""
    vocabulary, room, clock = sides[0].model.config.vocab_size, options.tokens + 1, CLOCKS[options.device]
    tokens = torch.randint(vocabulary, (batch, length)).to(options.device)
    if options.fill:
        sides[0].prefill(tokens[:, :1], room)
        held = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in sides[0].cache.layers]
        shapes = [(k[:, :, :0], v[:, :, :0]) if k is not None and v is not None else None for k, v in held]
    found: dict[str, list[float]] = {side.name: [] for side in sides}
    end = time.perf_counter() + options.seconds
    for repeat in range(1 if options.fill else options.samples):
        if repeat and time.perf_counter() > end:
            break
        for side in [side for side in sides if side.name in found]:
            side.cache = None
            gc.collect()
            with leaving_out(side, found), peak_growth(options.device) as peak:
                if options.fill:
                    side.fill(shapes, length, room)
                else:
                    side.first.append(clock(partial(side.prefill, tokens, room, options.chunk)))
                side.step()  # also what is not counted
            side.peak_bytes = peak[0] if repeat == 0 else side.peak_bytes
    end = time.perf_counter() + options.seconds
    for step in range(options.tokens - 1):
        if step >= 3 and time.perf_counter() > end:
            break
        for side in [side for side in sides if side.name in found]:
            with leaving_out(side, found):
                found[side.name].append(clock(side.step))
    return found


def rows_of(sides: list[Side], batch: int, length: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    for side in sides:
        side.first.clear()
    samples = run_length(sides, batch, length, options)
    rows = []
    for side in sides:
        if (own := samples.get(side.name)) is None:
            continue
        row: dict[str, Any] = {"name": f"{batch} x {length} tokens, {side.name}", "model": options.model, "batch": batch}
        row |= {"length": length, "filled": options.fill, "side": side.name, "step": statistics_of(own), "tokens_per_s": batch / min(own)}
        row |= {"first": statistics_of(side.first) if side.first else None}
        row |= {"cache_bytes": side.cache_bytes(), "peak_bytes": side.peak_bytes}
        if sides[0].name in samples:
            add_ratio(row, "speedup", samples[sides[0].name], own)
        rows.append(row)
    for side in sides:
        side.cache = None
    return rows


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with torch.no_grad(), Progress(len(options.threads) * len(options.dtype) * len(options.batch) * len(options.lengths)) as progress:
        model = build(options.model, options.quick).to(options.device)
        sides = sides_of(model, options)
        check(sides, options)
        for dtype in options.dtype:
            for p in model.parameters():  # all sides' weights; buffers of rotary embeddings stay in fp32
                p.data = p.data.to(DTYPES[dtype])
            for threads, batch, length in itertools.product(options.threads, options.batch, options.lengths):
                place = f"{title_of(dtype, threads)}, {batch} x {length} tokens"
                progress.begin(place)
                if threads:
                    torch.set_num_threads(threads)
                made = rows_of(sides, batch, length, options)
                rows += [{"dtype": dtype, "threads": threads} | row for row in made]
                timed = {row["side"] for row in made}
                options.left_out += [f"{place}, {side.name}" for side in sides if side.name not in timed]
    for what in options.left_out:
        print(f"Left out, as the GPU's memory is too small: {what}")
    order = [(threads, dtype) for threads in options.threads for dtype in options.dtype]
    return sorted(rows, key=lambda row: order.index((row["threads"], row["dtype"])))


HEAD = ["batch", "prompt", "attention, cache", "first token ms", "ms a token", "tokens/s", "times as fast, best", "cache MB", "peak MB"]


def cells_of(row: dict[str, Any]) -> list[str]:
    return [
        str(row["batch"]),
        str(row["length"]),
        row["side"],
        time_text(row["first"]) if row["first"] else "-",
        time_text(row["step"]),
        f"{row['tokens_per_s']:.4g}",
        ratio_text(row, "speedup") if "speedup" in row else "-",
        f"{row['cache_bytes'] / 1e6:.1f}",
        "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.1f}",
    ]
