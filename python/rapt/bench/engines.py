"""Engines that serve models of transformers with random weights: requests or texts per second, with PyTorch's attention and with
rapt's, switched from run to run in one process."""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
import transformers
from torch import Tensor

import rapt.transformers
from rapt import _model_flash
from rapt._chart import title_of
from rapt.bench import generate
from rapt.bench.report import Progress, ratio_text
from rapt.bench.sets import DTYPES
from rapt.bench.timing import add_ratio, statistics_of

RATIOS: dict[str, str] = {}  # a mean over engines says nothing
SIDES = ("sdpa", "rapt_flash")  # the first is what the other is compared with
PAGE = 32
_hf: Any = transformers  # much of it is untyped


class Load(NamedTuple):
    """What an engine does in one run."""

    name: str
    items: int
    """Requests, or texts."""
    tokens: int
    """Those that are made, or read where none is made."""
    run: Callable[[], Any]


class Engine(Protocol):
    """An engine with its model. Both sides run on it in turn."""

    name: str
    unit: str
    needs: str
    """The module without which it is left out."""
    pip: str

    def __init__(self, options: argparse.Namespace) -> None: ...

    @property
    def model(self) -> torch.nn.Module: ...

    def choose(self, attention: str) -> None: ...

    def check(self) -> str:
        """What differs between the sides in fp32; "" if nothing does."""

    def loads(self) -> list[Load]: ...


def _not_of_psutil(record: logging.LogRecord) -> bool:
    return "psutil" not in record.getMessage()


class ContinuousBatching:
    name, unit = "continuous batching", "requests"
    needs, pip = "transformers", "'transformers>=5.23'"

    def __init__(self, options: argparse.Namespace) -> None:
        # Where psutil is missing, each run logs an error: how much memory there is remains unknown. Here caches have a given size.
        logging.getLogger("ContinuousBatchingLogger").addFilter(_not_of_psutil)
        self.options = options
        sizes = {} if options.quick else {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}
        self.model = generate.build("llama", options.quick, **sizes)
        self.vocabulary = self.model.config.vocab_size

    def choose(self, attention: str) -> None:
        self.model.set_attn_implementation(attention)

    def check(self) -> str:
        made = []
        for attention in SIDES:
            self.choose(attention)
            made.append(self._run(self._prompts(min(self.options.batch), min(64, *self.options.lengths)), min(generate.CHECKED, self.options.tokens)))
        return "" if made[0] == made[1] else f"{SIDES[1]} gives the tokens {made[1]} in fp32, and {SIDES[0]} {made[0]}"

    def loads(self) -> list[Load]:
        tokens = self.options.tokens
        return [
            Load(f"{batch} of {n} tokens, {tokens} more", batch, batch * tokens, lambda p=self._prompts(batch, n): self._run(p, tokens))  # type: ignore[misc]
            for batch, n in itertools.product(self.options.batch, self.options.lengths)
        ]

    def _prompts(self, batch: int, length: int) -> list[list[int]]:
        numbers = random.Random(0)
        return [[numbers.randrange(self.vocabulary) for _ in range(length)] for _ in range(batch)]

    def _run(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        blocks = sum((len(prompt) + tokens) // PAGE + 2 for prompt in prompts)
        sizes = {"num_blocks": blocks, "max_batch_tokens": 1024, "page_size": PAGE}
        # By default transformers wants graphs where it sees a GPU, also of a model on the CPU.
        config = _hf.ContinuousBatchingConfig(**sizes, auto_switch_to_flash=False, use_cuda_graph=False)
        greedy = _hf.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        found = self.model.generate_batch(prompts, generation_config=greedy, continuous_batching_config=config, progress_bar=False)
        by_prompt = {tuple(result.prompt_ids): result.generated_tokens for result in found.values()}
        made = [by_prompt.get(tuple(prompt), []) for prompt in prompts]
        if any(len(each) != tokens for each in made):
            errors = {str(result.error) for result in found.values()}
            raise SystemExit(f"--engines: {self.name} made {[len(each) for each in made]} tokens of {tokens}: {', '.join(errors)}")
        return made


class SentenceTransformers:
    name, unit = "sentence-transformers", "texts"
    needs, pip = "sentence_transformers", "'sentence-transformers>=6'"

    def __init__(self, options: argparse.Namespace) -> None:
        engine, parts = import_module("sentence_transformers"), import_module("sentence_transformers.sentence_transformer.modules")
        words = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(998))]
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        if not options.quick:  # MiniLM's
            sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
        torch.manual_seed(0)
        model = _hf.BertModel(_hf.BertConfig(vocab_size=len(words), **sizes))
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            _tokenizer(words).save_pretrained(folder)
            self.transformer: Any = parts.Transformer(folder, max_seq_length=512)
        self.engine: Any = engine.SentenceTransformer(modules=[self.transformer, parts.Pooling(sizes["hidden_size"])], device="cpu")
        numbers = random.Random(0)
        # Most texts are short: half have 25 words or less, one in twenty more than 100.
        lengths = [min(500, max(3, int(numbers.lognormvariate(3.2, 0.9)))) for _ in range(options.texts)]
        self.texts = [" ".join(numbers.choices(words[2:], k=length)) for length in lengths]
        self.tokens = sum(lengths)

    @property
    def model(self) -> torch.nn.Module:
        made: torch.nn.Module = self.transformer.model
        return made

    def choose(self, attention: str) -> None:
        self.transformer.model.set_attn_implementation(attention)
        self.transformer.unpad_inputs = None  # it asks again whether inputs can do without padding

    def check(self) -> str:
        made = []
        for attention in SIDES:
            self.choose(attention)
            made.append(self._run(self.texts[:64]).float())
        difference, largest = float((made[1] - made[0]).abs().max()), float(made[0].abs().max())
        return "" if difference <= 1e-4 * largest else f"embeddings differ by {difference:.1e} of {largest:.1e} in fp32"

    def loads(self) -> list[Load]:
        return [Load(f"{len(self.texts)} of 3 to 500 tokens", len(self.texts), self.tokens, lambda: self._run(self.texts))]

    def _run(self, texts: list[str]) -> Tensor:
        made: Tensor = self.engine.encode(texts, batch_size=32, convert_to_tensor=True, show_progress_bar=False)
        return made


def _tokenizer(words: list[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made: Any = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return _hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


ENGINES: list[type[Engine]] = [ContinuousBatching, SentenceTransformers]


def check(engine: Engine) -> None:
    """Exits unless both sides give the same, and the second one by rapt's kernels."""
    before = _model_flash.calls
    different = engine.check()
    if different:
        raise SystemExit(f"--engines: {engine.name}: {different}: nothing is timed")
    if _model_flash.calls == before:
        raise SystemExit(f"--engines: {engine.name} did not call rapt: nothing is timed")


def samples_of(engine: Engine, load: Load, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of runs of both sides, in turn."""
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    end = time.perf_counter() + options.seconds
    for repeat in range(options.samples + 1):  # the first is not counted
        if repeat > 3 and time.perf_counter() > end:
            break
        for side in SIDES:
            engine.choose(side)
            start = time.perf_counter()
            load.run()
            if repeat:
                found[side].append(time.perf_counter() - start)
    return found


def rows_of(engine: Engine, load: Load, options: argparse.Namespace) -> list[dict[str, Any]]:
    samples, rows = samples_of(engine, load, options), []
    for side, own in samples.items():
        times = statistics_of(own)
        row: dict[str, Any] = {"name": f"{engine.name}, {load.name}, {side}", "engine": engine.name, "unit": engine.unit, "load": load.name}
        row |= {"side": side, "run": times, "per_s": 1e3 * load.items / times["median_ms"], "tokens_per_s": 1e3 * load.tokens / times["median_ms"]}
        add_ratio(row, "speedup", samples[SIDES[0]], own)
        rows.append(row)
    return rows


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rapt.transformers.register()
    chosen = []
    for kind in ENGINES:
        if find_spec(kind.needs):
            chosen.append(kind)
        else:
            print(f"Left out: {kind.name} is not installed: pip install {kind.pip}")
    rows = []
    with Progress(len(chosen) * len(options.threads) * len(options.dtype)) as progress:
        for kind in chosen:
            engine = kind(options)
            check(engine)
            loads = engine.loads()
            for dtype in options.dtype:
                for p in engine.model.parameters():  # buffers of rotary embeddings stay in fp32
                    p.data = p.data.to(DTYPES[dtype])
                for threads in options.threads:
                    progress.begin(f"{engine.name}, {title_of(dtype, threads)}")
                    torch.set_num_threads(threads)
                    found = itertools.chain.from_iterable(rows_of(engine, load, options) for load in loads)
                    rows += [{"dtype": dtype, "threads": threads} | row for row in found]
    order = [(threads, dtype) for threads in options.threads for dtype in options.dtype]
    return sorted(rows, key=lambda row: order.index((row["threads"], row["dtype"])))


HEAD = ["engine", "load", "attention", "seconds", "requests, texts/s", "tokens/s", "times as fast, best"]


def cells_of(row: dict[str, Any]) -> list[str]:
    return [
        row["engine"],
        row["load"],
        row["side"],
        f"{row['run']['median_ms'] / 1e3:.3g} ±{row['run']['spread'] * 50:.0f}%",
        f"{row['per_s']:.4g}",
        f"{row['tokens_per_s']:.4g}",
        ratio_text(row, "speedup"),
    ]
