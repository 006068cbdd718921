"""A decoder layer with multi-head latent attention over many ranks: which collectives a rank issues, in which order and
of which shapes. The process group decides where it runs: NCCL on GPUs, Gloo on CPUs; this code is the same.

    tensor parallel   every rank has all tokens and H / ranks heads; outputs are summed after attention and after the MLP
    data parallel     every rank has its own requests and all heads; the hidden states are gathered before the MLP, of
                      which each rank has a part of the columns, and each rank takes its own rows afterwards
      max_len         every rank's rows are padded to the largest batch: all_gather, reduce_scatter
      sum_len         the rows stand behind one another: all_reduce of each rank's rows in a buffer of zeros, all_reduce

Layouts as in reference/attention/data_parallel_attention.hpp. An idle rank has no rows and issues all collectives.
"""

import torch
import torch.distributed as dist


def padding_of(tokens, extend):
    """`tokens`: each rank's number of rows; `extend`: some rank has new tokens of a prompt."""
    return "max_len" if not extend and 2 * sum(tokens) >= len(tokens) * max(tokens) else "sum_len"


def layout(tokens, padding):
    """The first row of each rank in the gathered buffer, and the buffer's number of rows."""
    widths = [max(tokens)] * len(tokens) if padding == "max_len" else tokens
    return [sum(widths[:rank]) for rank in range(len(tokens))], sum(widths)


class Ranks:
    """The collectives of one rank. note(line) is told each one before it is issued; a replayed graph tells those that it
    captured."""

    def __init__(self, note=lambda line: None, group=None):
        self.note, self.group = note, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def _tell(self, kind, whole):
        self.note(f"{kind} {list(whole.shape)} {whole.dtype} root=none")

    def all_reduce(self, whole):
        self._tell("all_reduce", whole)
        dist.all_reduce(whole, group=self.group)
        return whole

    def gather(self, own, tokens, padding):
        """Rows [tokens[rank], hidden] of this rank to the rows [rows, hidden] of all."""
        begin, rows = layout(tokens, padding)
        if padding == "sum_len":
            whole = own.new_zeros(rows, own.shape[1])
            whole[begin[self.rank] : begin[self.rank] + len(own)] = own
            return self.all_reduce(whole)
        whole, padded = own.new_empty(rows, own.shape[1]), own.new_zeros(rows // self.size, own.shape[1])
        padded[: len(own)] = own
        self._tell("all_gather", whole)
        dist.all_gather_into_tensor(whole, padded, group=self.group)
        return whole

    def scatter(self, partial, tokens, padding):
        """This rank's rows of the sum of all ranks' `partial` [rows, hidden]."""
        begin, rows = layout(tokens, padding)
        if padding == "sum_len":
            return self.all_reduce(partial)[begin[self.rank] : begin[self.rank] + tokens[self.rank]]
        own = partial.new_empty(rows // self.size, partial.shape[1])
        self._tell("reduce_scatter", partial)
        dist.reduce_scatter_tensor(own, partial, group=self.group)
        return own[: tokens[self.rank]]


def data_parallel(ranks, attention, mlp, hidden, tokens, padding):
    attended = attention(hidden) if len(hidden) else hidden
    return ranks.scatter(mlp(ranks.gather(attended, tokens, padding)), tokens, padding)


def tensor_parallel(ranks, attention, mlp, hidden):
    return ranks.all_reduce(mlp(ranks.all_reduce(attention(hidden))))


class Buckets:
    """One CUDA graph for each bucket of rows a rank; on a CPU the call itself stands for the graph.

    capture(bucket, run) calls run(hidden [bucket, width]) with a buffer that stays; run issues all collectives for
    `bucket` rows on each rank. A graph keeps `run`, and so the tensors that run holds, whose addresses it replays.
    step(tokens, hidden) replays the smallest bucket that holds the largest batch."""

    def __init__(self, ranks, like):
        self.ranks, self.like, self.graphs = ranks, like, {}

    def capture(self, bucket, run):
        hidden, told, note = self.like.new_zeros(bucket, self.like.shape[1]), [], self.ranks.note
        self.ranks.note = told.append
        try:
            if not hidden.is_cuda:
                self.graphs[bucket] = (hidden, told, None, None, run)
                return
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                run(hidden)
            stream.synchronize()
            told.clear()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's own threads go on meanwhile
                out = run(hidden)
            self.graphs[bucket] = (hidden, told, graph, out, run)
        finally:
            self.ranks.note = note

    def step(self, tokens, hidden):
        buffer, told, graph, out, run = self.graphs[min(bucket for bucket in self.graphs if bucket >= max(tokens))]
        buffer.zero_()
        buffer[: len(hidden)] = hidden
        if graph is None:
            return run(buffer)[: len(hidden)].clone()
        for line in told:
            self.ranks.note(line)
        graph.replay()
        return out[: len(hidden)].clone()
