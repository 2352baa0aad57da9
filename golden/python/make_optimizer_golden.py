#!/usr/bin/env python3
"""Writes golden/optimizer.safetensors: what Python's torch.optim and clip_grad_norm_ do, to the bit.

  python golden/python/make_optimizer_golden.py golden/optimizer.safetensors

Needs torch 2.11 and safetensors. //golden:optimizer_test compares src/optim with the file. What it holds (float32;
I counts the parameters, K the steps, N names a configuration):
  start/I, grad/K/I      values before the first step and the gradient of step K; lr is 0.01 / (1 + K)
  N/I                    the value after the last step. N: adamw_IMPL, sgd_IMPL, sgd_wd_IMPL, sgd_momentum_IMPL,
                         sgd_dampening_IMPL, sgd_nesterov_IMPL with IMPL single, foreach or
                         fused; options as in SGD below
  clip_grad/I            gradients of small integers, so that sums of powers are exact in any order
  clip/P/M/IMPL/I, clip/P/M/IMPL/norm   after clipping by order P (1, 2, inf) to M (1, 0.3, 5), and the norm
"""
import sys

import torch
from safetensors.torch import save_file

STEPS = 5
SIZES = [(5, 7), (19,), (1, 3, 2), (33,)]
IMPLEMENTATIONS = {"single": dict(foreach=False), "foreach": dict(foreach=True), "fused": dict(fused=True)}
SGD = {
    "sgd": dict(),
    "sgd_wd": dict(weight_decay=0.1),
    "sgd_momentum": dict(momentum=0.9),
    "sgd_dampening": dict(momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd_nesterov": dict(momentum=0.9, nesterov=True, weight_decay=0.1),
}


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    start = [torch.randn(s) for s in SIZES]
    grads = [[torch.randn(s) for s in SIZES] for _ in range(STEPS)]
    out = {f"start/{i}": t for i, t in enumerate(start)}
    out |= {f"grad/{k}/{i}": t for k, step in enumerate(grads) for i, t in enumerate(step)}

    def train(name, make):
        params = [t.clone().requires_grad_() for t in start]
        opt = make(params)
        for k, step in enumerate(grads):
            opt.param_groups[0]["lr"] = 0.01 / (1 + k)
            for p, g in zip(params, step):
                p.grad = g.clone()
            opt.step()
        out.update({f"{name}/{i}": p.detach() for i, p in enumerate(params)})

    for impl, flags in IMPLEMENTATIONS.items():
        train(f"adamw_{impl}", lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1, **flags))
        for name, options in SGD.items():
            train(f"{name}_{impl}", lambda ps: torch.optim.SGD(ps, lr=0.01, **options, **flags))

    whole = [torch.randint(-8, 9, s).float() for s in SIZES]
    out |= {f"clip_grad/{i}": g for i, g in enumerate(whole)}
    for order in ("1", "2", "inf"):
        for limit in ("1", "0.3", "5"):
            for impl in ("single", "foreach"):
                params = [torch.zeros_like(g).requires_grad_() for g in whole]
                for p, g in zip(params, whole):
                    p.grad = g.clone()
                norm = torch.nn.utils.clip_grad_norm_(params, float(limit), norm_type=float(order), foreach=impl == "foreach")
                name = f"clip/{order}/{limit}/{impl}"
                out[f"{name}/norm"] = norm
                out |= {f"{name}/{i}": p.grad for i, p in enumerate(params)}
    save_file({k: v.contiguous().clone() for k, v in out.items()}, sys.argv[1], metadata={"torch": torch.__version__})


if __name__ == "__main__":
    main()
