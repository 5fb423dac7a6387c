"""One of two trainers that sample neighbours in a graph that is split between them, with PyTorch Geometric.

    python graphs.py RANK WORKERS PORT

Each trainer has half of the nodes of a ring and a loader with so many worker processes (0: it samples
itself). Whoever samples joins RPC and asks the others for what they hold: neighbours and
features. Nobody leaves RPC but by `atexit`, as the package arranges it.

The package's compiled part (pyg-lib) is not on PyPI; the three operators of it that sampling needs are
written in Python here.
"""

import atexit
import logging
import multiprocessing
import multiprocessing.util
import sys

import torch
from torch_geometric.distributed import (
    DistContext,
    DistNeighborLoader,
    LocalFeatureStore,
    LocalGraphStore,
)

NODES = 40
TRAINERS = 2
HOPS = [2, 2]


def dist_neighbor_sample(colptr, row, seed, count, *_options):
    """All neighbours (there are two of each): seeds and neighbours, edges, and where each one's end."""
    found, edges, ends = [seed], [], [len(seed)]
    for node in seed.tolist():
        span = slice(int(colptr[node]), int(colptr[node + 1]))
        found.append(row[span][:count])
        edges.append(torch.arange(span.start, span.stop)[:count])
        ends.append(ends[-1] + len(found[-1]))
    return torch.cat(found), torch.cat(edges), ends


def merge_sampler_outputs(nodes, edges, ends, parts, orders, *_options):
    """What the parts found, in the order of the seeds."""
    found, found_edges, counts = [], [], []
    for part, order in zip(parts, orders, strict=True):
        span = slice(ends[part][order], ends[part][order + 1])
        found.append(nodes[part][span])
        found_edges.append(edges[part][span.start - ends[part][0] : span.stop - ends[part][0]])
        counts.append(len(found[-1]))
    return torch.cat(found), torch.cat(found_edges), None, counts


def relabel_neighborhood(seed, nodes, counts, *_options):
    """The edges between places in the batch: seeds first, then each new node as it comes."""
    places = {node: place for place, node in enumerate(seed.tolist())}
    rows = [places.setdefault(node, len(places)) for node in nodes.tolist()]
    cols = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return torch.tensor(rows), cols


for operator in (dist_neighbor_sample, merge_sampler_outputs, relabel_neighborhood):
    setattr(torch.ops.pyg, operator.__name__, operator)


def share(rank):
    """The stores of a trainer: its nodes, and the edges that lead to them."""
    nodes = torch.arange(NODES)
    parts = nodes % TRAINERS
    mine = nodes[parts == rank]
    edge_index = torch.stack([torch.cat([mine + 1, mine - 1]) % NODES, mine.repeat(2)])
    edge_ids = torch.cat([2 * mine, 2 * mine + 1])
    features = LocalFeatureStore.from_data(mine, x=torch.stack([mine, mine**2], dim=1).float(), y=mine)
    graph = LocalGraphStore.from_data(edge_ids, edge_index, NODES)
    features.labels = nodes
    features.node_feat_pb = graph.node_pb = parts
    for store in (features, graph):
        store.num_partitions, store.partition_idx = TRAINERS, rank
        store.meta = {"is_hetero": False, "num_parts": TRAINERS}
    return mine, (features, graph)


def check(batch):
    """A batch has the features and labels of its nodes, wherever they are, and edges of the ring."""
    nodes = batch.n_id
    assert torch.equal(batch.x, torch.stack([nodes, nodes**2], dim=1).float())
    assert torch.equal(batch.y, nodes)
    steps = (nodes[batch.edge_index[0]] - nodes[batch.edge_index[1]]) % NODES
    assert set(steps.tolist()) == {1, NODES - 1}, steps


class Loader(DistNeighborLoader):
    """The package's, with worker processes that run `atexit` functions, as all do from Python 3.13 on."""

    def worker_init_fn(self, worker_id):
        if self.num_workers and sys.version_info < (3, 13):
            atexit._clear()
            multiprocessing.util.Finalize(None, atexit._run_exitfuncs, exitpriority=0)
        super().worker_init_fn(worker_id)


def train(rank, workers, port):
    """Goes through the trainer's own nodes once."""
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=TRAINERS
    )
    mine, stores = share(rank)
    loader = Loader(
        stores,
        num_neighbors=HOPS,
        batch_size=5,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        input_nodes=mine,
        master_addr="127.0.0.1",
        master_port=port + 1,
        current_ctx=DistContext(rank, rank, TRAINERS, TRAINERS, "trainers"),
        concurrency=2,
        num_rpc_threads=4,
    )
    batches = remote = 0
    for batch in loader:
        check(batch)
        batches += 1
        remote += int((batch.n_id % TRAINERS != rank).sum())
    assert batches == len(mine) // 5
    assert remote > 0
    torch.distributed.barrier()
    print(f"{batches} batches by {torch.distributed.rpc.rpc_sync.__module__}", flush=True)


if __name__ == "__main__":
    train(*map(int, sys.argv[1:]))
