"""Serve queries from an associative memory whose patterns are spread over ranks, each in a file of its own.

    torchrun --nproc-per-node 2 examples/sharded_memory.py

Rank 0 asks; all ranks search their own patterns. Only the scores that can matter and the states travel.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import fenchel
from fenchel.distributed import ShardedMemory

COUNT, WIDTH = 20_000, 64  # patterns per rank


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"patterns-{rank}.bin"
        patterns = torch.nn.functional.normalize(
            torch.randn(COUNT, WIDTH, generator=torch.Generator().manual_seed(rank))
        )
        patterns.numpy().tofile(path)
        held = np.memmap(path, dtype=np.float32, mode="r", shape=(COUNT, WIDTH))  # read in chunks, never written to
        memory = ShardedMemory(held, fenchel.Tsallis(1.5), beta=20.0)

        # Each rank names one of its patterns; all ranks must get the same queries.
        query = torch.zeros(ranks, WIDTH)
        noise = 0.05 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(100 + rank))
        query[rank] = patterns[7 * rank + 3] + noise
        dist.all_reduce(query)

        found = memory.retrieve(query)
        if rank == 0:
            print(f"{sum(COUNT for _ in range(ranks)):,} patterns on {ranks} ranks", flush=True)
            for i in range(ranks):
                n = int((found.weights[i] > 0).sum())
                where = [f"rank {r} place {p}" for r, p in zip(found.ranks[i, :n], found.places[i, :n], strict=True)]
                print(f"query {i}: {', '.join(where)} after {int(found.steps[i])} steps", flush=True)
        energy = memory.energy(query)
        if rank == 0:
            print("energy of the queries:", [f"{e:.4f}" for e in energy.tolist()], flush=True)
        dist.barrier()  # files are removed once nobody reads them
        del memory, held
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
