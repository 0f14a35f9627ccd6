"""CUDA graphs on a CPU, for tests: what a GPU would record and replay, with the same mistakes.

A recording runs the operators, and notes each with the very tensors that it read and wrote. Then it undoes
all changes to tensors from outside, and fills those from inside with garbage, because a GPU computes nothing
while it records. A replay runs the same operators on the same tensors, with the same numbers. So it is wrong
exactly where a CUDA graph would be: if a number or an address should have changed, or if a line uses what was
"computed" while recording. Operators that ask for a value are refused, as CUDA refuses them.
"""

from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

ASK_FOR_VALUES = {
    *("_local_scalar_dense", "item", "is_nonzero", "nonzero", "nonzero_static", "masked_select", "equal"),
    *("allclose", "_unique2", "unique_dim", "bincount", "repeat_interleave"),
    "_grouped_mm",  # of experts: in fp32, CUDA copies the numbers of tokens per expert to the CPU
}
COPY_FROM_THE_CPU = {"lift_fresh", "lift_fresh_copy"}  # torch.tensor(...): its memory may be gone at a replay


def tensors(tree):
    """All tensors in nested lists, tuples and dicts."""
    return [x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor)]


def address(x):
    """Where the memory of a tensor begins. Views of one tensor have the same."""
    return x.untyped_storage().data_ptr()


class CUDAGraph:
    """In place of torch.cuda.CUDAGraph."""

    def __init__(self):
        self.calls = []  # (operator, args, kwargs, outputs)

    def replay(self):
        """Run the recorded operators. They are those below autocast, so it must not act again."""
        assert self.calls, "nothing was recorded"
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            for operator, args, kwargs, outputs in self.calls:
                inputs = {address(x) for x in tensors((args, kwargs))}
                for old, new in zip(outputs, tensors(operator(*args, **kwargs)), strict=True):
                    if address(old) not in inputs:  # neither a view nor a change in place
                        old.copy_(new)


class Graph(TorchDispatchMode):
    """In place of torch.cuda.graph, the context manager that records."""

    lengths = []  # number of operators of each recording, views left out
    is_recording = False

    def __init__(self, cuda_graph, capture_error_mode="global"):
        super().__init__()
        self.cuda_graph = cuda_graph
        self.inside = set()  # addresses of tensors that were made while recording
        self.kept = []  # these tensors themselves, so that no address is used twice
        self.saved = {}  # address -> bytes of a tensor from outside that was changed, and their copy

    def __enter__(self):
        Graph.is_recording = True
        return super().__enter__()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operator.overloadpacket.__name__
        inputs = tensors((args, kwargs))
        assert name not in ASK_FOR_VALUES, f"{name} asks for a value while recording"
        assert name not in COPY_FROM_THE_CPU, "torch.tensor(...) while recording"
        if name.startswith("index"):
            assert not any(x.dtype == torch.bool for x in tensors(args[1])), (
                f"{name} with a bool asks for values"
            )
        devices = {x.device.type for x in inputs if x.ndim}  # tests/device_check.py lets tensors pretend one
        assert len(devices) <= 1, f"{name}: a copy between devices while recording"
        if operator._schema.is_mutable:
            for x in inputs:
                if address(x) not in self.inside and address(x) not in self.saved:
                    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                    self.saved[address(x)] = whole, whole.clone()
        result = operator(*args, **kwargs)
        outputs = tensors(result)
        new = {address(x) for x in outputs} - {address(x) for x in inputs}
        self.inside |= new
        self.kept.append(outputs)
        if new or operator._schema.is_mutable:
            self.cuda_graph.calls.append((operator, args, kwargs, outputs))
        return result

    def __exit__(self, *error):
        super().__exit__(*error)
        Graph.is_recording = False
        for whole, copy in self.saved.values():
            whole.copy_(copy)
        for x in tensors(self.kept):
            if address(x) in self.inside and x.numel():
                x.fill_(float("nan") if x.is_floating_point() else 1 if x.dtype == torch.bool else 10**6)
        Graph.lengths.append(len(self.cuda_graph.calls))


def install(stack):
    """Replace torch's own until an ExitStack is left."""
    stack.enter_context(patch.object(torch.cuda, "CUDAGraph", CUDAGraph))
    stack.enter_context(patch.object(torch.cuda, "graph", Graph))
    stack.enter_context(patch.object(torch.cuda, "synchronize", lambda *args: None))
    stack.enter_context(patch.object(torch.cuda, "is_current_stream_capturing", lambda: Graph.is_recording))
