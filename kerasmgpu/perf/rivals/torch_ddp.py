"""A rival: PyTorch's DistributedDataParallel over Gloo, on CPU ranks.

    python torch_ddp.py --model resnet20 --folder DIR --rank 0 --count 2 --cores 0 ...

It needs PyTorch and nothing of this project, for it runs under another Python
(`kerasmgpu bench --beside torch --beside-python PYTHON`). The models are those of
`perf/workloads.py` with the same optimizers, in channels-last layout; inputs lie in
memory, and loss and accuracy are kept as Keras does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

BATCHES_PER_EPOCH = 50


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("mnist_cnn", "resnet20"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--warmup-steps", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--count", type=int, required=True, help="ranks")
    parser.add_argument("--cores", required=True, help="keep to these, such as 0,1")
    args = parser.parse_args()
    cores = [int(core) for core in args.cores.split(",")]
    os.sched_setaffinity(0, cores)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine

    import torch
    import torch.distributed as dist

    torch.set_num_threads(len(cores))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{(args.folder / 'rendezvous').absolute()}",
        rank=args.rank,
        world_size=args.count,
        timeout=timedelta(seconds=120),
    )
    step_seconds, batch_size = train(args)
    dist.destroy_process_group()
    result = {
        "steps": len(step_seconds),
        "samples_per_second": len(step_seconds) * batch_size / sum(step_seconds),
        "median_step_seconds": statistics.median(step_seconds),
        "version": f"torch {torch.__version__}",
    }
    path = args.folder / f"result.{args.rank}.json"
    path.write_text(json.dumps(result), encoding="utf-8")


def train(args: argparse.Namespace) -> tuple[list[float], int]:
    """Epochs until the time is over on any rank; seconds of each step that counts."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.manual_seed(0)
    build = {"mnist_cnn": mnist_cnn, "resnet20": resnet20}[args.model]
    plain, shape, batch_size = build()
    plain = plain.to(memory_format=torch.channels_last)
    if args.model == "mnist_cnn":
        optimizer: Any = torch.optim.Adam(plain.parameters(), 1e-3)
    else:
        optimizer = torch.optim.SGD(plain.parameters(), 0.05, momentum=0.9)
    model = nn.parallel.DistributedDataParallel(plain)
    criterion = nn.CrossEntropyLoss()
    torch.manual_seed(args.rank)
    rows = BATCHES_PER_EPOCH * batch_size
    x = torch.rand(rows, *shape).to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (rows,))
    step_seconds: list[float] = []
    seen = 0
    while True:
        order = torch.randperm(rows)
        last = None
        losses, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for batch in order.split(batch_size):
            logits = model(x[batch])
            loss = criterion(logits, y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += loss.detach()
            correct += (logits.detach().argmax(1) == y[batch]).sum()
            now = time.perf_counter()
            if last is not None and seen > args.warmup_steps:
                step_seconds.append(now - last)
            last = now
            seen += 1
        over = torch.tensor(float(sum(step_seconds) >= args.seconds))
        dist.all_reduce(over)
        if over > 0:
            return step_seconds, batch_size


def mnist_cnn() -> tuple[Any, tuple[int, ...], int]:
    from torch import nn

    net = nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 12 * 12, 128), nn.ReLU()),
        *(nn.Dropout(0.5), nn.Linear(128, 10)),
    )
    return net, (1, 28, 28), 64


def resnet20() -> tuple[Any, tuple[int, ...], int]:
    import torch
    from torch import nn

    def convolve(channels: int, filters: int, size: int, strides: int) -> list[Any]:
        padding = size // 2
        convolution = nn.Conv2d(channels, filters, size, strides, padding, bias=False)
        return [convolution, nn.BatchNorm2d(filters)]

    class Block(nn.Module):
        def __init__(self, channels: int, filters: int) -> None:
            super().__init__()
            strides = 2 if filters > channels else 1
            self.inner = nn.Sequential(
                *(*convolve(channels, filters, 3, strides), nn.ReLU()),
                *convolve(filters, filters, 3, 1),
            )
            self.shortcut = nn.Sequential(
                *(convolve(channels, filters, 1, 2) if strides == 2 else [])
            )

        def forward(self, x: Any) -> Any:
            return torch.relu(self.inner(x) + self.shortcut(x))

    blocks, channels = [], 16
    for filters in (16, 32, 64):
        for _ in range(3):
            blocks.append(Block(channels, filters))
            channels = filters
    net = nn.Sequential(
        *(*convolve(3, 16, 3, 1), nn.ReLU(), *blocks),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )
    return net, (3, 32, 32), 32


if __name__ == "__main__":
    main()
