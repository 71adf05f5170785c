"""Logprobs in chunks against the plain way: peak memory and CPU time, forward alone and with backward.

    python benchmarks/logprob_memory.py [--tokens 2048] [--hidden 256] [--vocab 32000] [--chunk 256]

`plain` makes all logits, takes their log-softmax and picks the targets. `chunked` is the learner's
`logprob_and_entropy`, which gives entropies as well; with as many tokens in a chunk as there are (its default is 2048)
it makes all logits at once too. The goal is a quarter of the plain peak with backward.

Each figure comes from fresh processes: the peak of the resident memory (VmHWM, reset after a small warm-up) above what
the process held before, so it counts everything: logits, gradients, buffers. Blocks of a MiB or more are mapped by
themselves, so that freed memory does not count; with --keep-freed glibc decides, and keeps a good part of blocks below
32 MiB. Linux only. One thread.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor

from agentrl.learner.logits import logprob_and_entropy
from benchmarks.timing import cpu_s

Way = Literal["plain", "chunked"]
Pass = Literal["forward", "head frozen", "head trained"]
PASSES: tuple[Pass, ...] = ("forward", "head frozen", "head trained")


@dataclass(frozen=True)
class Options:
    """Sizes."""

    tokens: int = 2048
    """Tokens that are scored at once."""
    hidden: int = 256
    """Width of the hidden states."""
    vocab: int = 32_000
    """Entries of the vocabulary."""
    chunk: int = 256
    """Tokens whose logits exist at once."""
    repeats: int = 5
    """Rounds of fresh processes."""
    keep_freed: bool = False
    """Leave the allocator's threshold as it is."""
    child: str | None = None
    """Used by the script itself: which way and pass this process measures."""


def resident(field: Literal["VmRSS", "VmHWM"]) -> float:
    """Resident memory of this process, or its peak, MiB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark needs Linux.")


def plain(hidden_NH: Tensor, target_N: Tensor, head: torch.nn.Linear) -> Tensor:
    """Logprobs of the targets, all logits at once."""
    return head(hidden_NH).log_softmax(-1).gather(-1, target_N[:, None]).squeeze(-1)  # type: ignore[no-any-return]


def make_work(way: Way, what: Pass, options: Options, tokens: int) -> Callable[[], None]:
    """The work on so many tokens; what it reads exists already."""
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(tokens, options.hidden, generator=generator, requires_grad=what != "forward")
    target_N = torch.randint(options.vocab, (tokens,), generator=generator)
    head = torch.nn.Linear(options.hidden, options.vocab, bias=False)
    head.requires_grad_(what == "head trained")

    def score() -> Tensor:
        if way == "plain":
            return plain(hidden_NH, target_N, head)
        return logprob_and_entropy(hidden_NH, target_N, head, temperature=1.0, chunk=options.chunk)[0]

    def work() -> None:
        with torch.set_grad_enabled(what != "forward"):
            logprob_N = score()
        if what != "forward":
            logprob_N.mean().backward()  # type: ignore[no-untyped-call]

    return work


def measure(way: Way, what: Pass, options: Options) -> dict[str, float]:
    """In this process: MiB at the peak above what was there before, and CPU seconds."""
    torch.set_num_threads(1)
    make_work(way, what, options, 8)()  # Libraries make their buffers.
    work = make_work(way, what, options, options.tokens)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    took_s = cpu_s(work)
    return {"mib": resident("VmHWM") - before, "cpu_s": took_s}


def in_child(way: Way, what: Pass, options: Options) -> dict[str, float]:
    """The same in a fresh process."""
    sizes = [f"--{name}={getattr(options, name)}" for name in ("tokens", "hidden", "vocab", "chunk")]
    command = [sys.executable, __file__, *sizes, f"--child={way}:{what}"]
    env = os.environ | ({} if options.keep_freed else {"MALLOC_MMAP_THRESHOLD_": str(2**20)})
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=env)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(options: Options) -> dict[str, float]:
    """Measures and prints; gives the chunked way's share of the plain peak by pass."""
    found: dict[tuple[Way, Pass], list[dict[str, float]]] = {}
    for _ in range(options.repeats):
        for what in PASSES:
            for way in ("plain", "chunked"):
                found.setdefault((way, what), []).append(in_child(way, what, options))
    logits = options.tokens * options.vocab * 4 / 2**20
    print(f"{options.tokens} tokens, width {options.hidden}, {options.vocab} entries: all logits are {logits:.0f} MiB")
    shares: dict[str, float] = {}
    for what in PASSES:
        mib, took_s = (
            {way: statistics.median(one[figure] for one in found[way, what]) for way in ("plain", "chunked")}
            for figure in ("mib", "cpu_s")
        )
        shares[what] = mib["chunked"] / mib["plain"]
        print(
            f"{what:12} peak {mib['plain']:6.0f} MiB plain, {mib['chunked']:6.0f} chunked by {options.chunk}:"
            f" {shares[what]:.3f} of it; {took_s['chunked'] / took_s['plain']:.2f} times the CPU time"
        )
    return shares


def run(options: Options) -> None:
    """The whole, or one measurement where a child is asked for."""
    if options.child is None:
        main(options)
        return
    way, what = options.child.split(":")
    print(json.dumps(measure(way, what, options)))  # type: ignore[arg-type]


if __name__ == "__main__":
    run(tyro.cli(Options, description=__doc__))
