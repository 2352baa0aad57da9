#!/usr/bin/env python3
"""Times a training step of a Llama under Python's FSDP2, as //backends/nccl/gpu:step times ours.

The same model to the operation (the one of src/nn/llama.h), sizes, dtypes, fully_shard calls, clipping
and AdamW, and the same options and the same line of JSON as that program:

  python3 python_step.py --layers 8                                  one GPU
  torchrun --nproc-per-node 8 python_step.py --layers 8              several
  python3 python_step.py --device cpu --dim 64 --layers 2 --seq 32   to see that it works, on Gloo

Needs torch 2.11.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default, meaning in (
        ("dim", 2048, "width of the residual stream"),
        ("layers", 8, "blocks"),
        ("heads", 16, "query heads"),
        ("kv-heads", 16, "key and value heads"),
        ("hidden", 5632, "width of the feed-forward network"),
        ("vocab", 32000, "tokens in the vocabulary"),
        ("batch", 4, "sequences a GPU and step"),
        ("seq", 2048, "tokens of a sequence"),
        ("steps", 20, "steps that are timed"),
        ("warmup", 5, "steps before them"),
    ):
        parser.add_argument("--" + name, type=int, default=default, help=meaning)
    parser.add_argument("--param-dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--reduce-dtype", default="float32", choices=("bfloat16", "float32"))
    parser.add_argument("--optimizer", default="fused", choices=("fused", "foreach"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    return parser.parse_args()


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype) * self.weight


def rotary_table(head_dim, length):
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def turn(x, table):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:3], -1, 2))
    return torch.view_as_real(pairs * table[None, :, None]).flatten(3).to(x.dtype)


class Block(nn.Module):
    def __init__(self, options):
        super().__init__()
        dim, hidden = options.dim, options.hidden
        self.heads, self.kv_heads = options.heads, options.kv_heads
        self.head_dim = dim // self.heads
        kv_dim = self.kv_heads * self.head_dim
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_dim, bias=False)
        self.wv = nn.Linear(dim, kv_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)

    def attention(self, x, table):
        b, t, _ = x.shape
        q = turn(self.wq(x).view(b, t, self.heads, self.head_dim), table)
        k = turn(self.wk(x).view(b, t, self.kv_heads, self.head_dim), table)
        v = self.wv(x).view(b, t, self.kv_heads, self.head_dim)
        if self.kv_heads != self.heads:
            times = self.heads // self.kv_heads
            k, v = k.repeat_interleave(times, dim=2), v.repeat_interleave(times, dim=2)
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.wo(o.transpose(1, 2).reshape(b, t, -1))

    def forward(self, x, table):
        h = x + self.attention(self.attention_norm(x), table)
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.tok_embeddings = nn.Embedding(options.vocab, options.dim)
        self.layers = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = RMSNorm(options.dim)
        self.output = nn.Linear(options.dim, options.vocab, bias=False)
        table = rotary_table(options.dim // options.heads, options.seq)
        self.register_buffer("table", table, persistent=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.table)
        return self.output(self.norm(x))


def sharded(options, mesh):
    torch.manual_seed(0)
    model = Llama(options).to(options.device)
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, options.param_dtype),
        reduce_dtype=getattr(torch, options.reduce_dtype),
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def timed(step, options):
    """Milliseconds of each timed step."""
    if options.device == "cpu":
        times = []
        for _ in range(options.warmup + options.steps):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
        return times[options.warmup :]
    for _ in range(options.warmup):
        step()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(options.steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in zip(marks, marks[1:])]


def main():
    options = arguments()
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    world = dist.get_world_size()
    model = sharded(options, dist.init_device_mesh(options.device, (world,)))
    parameters = list(model.parameters())
    how = {options.optimizer: True}
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, **how)
    sizes = (options.batch, options.seq)
    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(options.vocab, sizes, device=options.device)
    labels = torch.randint(options.vocab, sizes, device=options.device)

    def step():
        optimizer.zero_grad()
        logits = model(tokens)
        F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()

    times = timed(step, options)
    median = statistics.median(times)
    on_gpu = options.device == "cuda"
    result = {
        "program": "Python FSDP2, torch " + torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "world": world,
        "parameters": sum(p.numel() for p in parameters),
        "median_ms": median,
        "min_ms": min(times),
        "tokens_per_s": 1e3 * world * options.batch * options.seq / median,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
