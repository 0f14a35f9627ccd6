"""A check of PyTorch's device rules that needs no GPU: the CPU computes, every storage pretends a device.

    with pretended_gpu() as check:
        script.train(args)
    assert not check.mistakes

Inside, torch.cuda.is_available() is true, and accelerate chooses the device "cuda", as on a machine with one
GPU. The real numbers are computed on the CPU. Each storage is tagged with the device it would be on: "cpu" or
"cuda:0". Two layers work together.

- Patches of PyTorch's Python functions replace device="cuda" by "cpu", and tag what they return. They also
  make Tensor.device tell the tag, so `device=x.device` in a script stays right.
- A TorchDispatchMode sees every operator below autograd, those of the backward pass included. It raises
  DeviceMistake if the operator would not accept these devices. Otherwise it tags new storages with the
  device of the inputs. Views share their storage, and so their tag.

All tensors of an operator must be on one device, with PyTorch's exceptions: copies, one CPU tensor without
dimensions in a pointwise operator, indices on the CPU. Generators, numpy, optimizers and autocast know the
pretended device too. It cannot see kernels, other threads, other processes, a second GPU, torch.compile, and
the inside of operators of other libraries. Tensors that C++ makes inside another operator take the device of
the first tensor that they meet.
"""

import functools
from collections import Counter
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import accelerate
import cuda_graphs
import torch
import transformers
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
CPU, GPU = "cpu", "cuda:0"
EITHER = "either"  # made inside C++: it takes the device of the first tensor it meets

REAL_DEVICE = torch._C.TensorBase.device  # the property, before the check replaces it
# Functions that make a tensor from no other one. Ask now: PyTorch remembers the functions of the first call.
FACTORIES = [f.__name__ for f in _device_constructors() if getattr(torch, f.__name__, None) is f]
FACTORIES = [name for name in FACTORIES if name not in ("tensor", "as_tensor", "asarray")]
LIKE = "tensor normal zeros_like ones_like full_like empty_like rand_like randn_like randint_like".split()

COPIES = {aten.copy_, aten._foreach_copy_, aten.fill_}  # these accept any two devices
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


class DeviceMistake(RuntimeError):
    """What would be an error on a GPU."""


# ---- Tags --------------------------------------------------------------------------------------------------


def storage_of(x):
    """The storage of a tensor. None: it has no data, like those on the device meta."""
    return None if REAL_DEVICE.__get__(x).type == "meta" else x.untyped_storage()


def tag_of(x):
    """The pretended device of a tensor: CPU, GPU or EITHER. None: it has no data.

    A storage that is seen for the first time was not made under the check, so it is on the CPU.
    """
    storage = storage_of(x)
    if storage is None:
        return None
    if not hasattr(storage, "pretended"):
        storage.pretended = CPU
    return storage.pretended


def set_tag(x, tag):
    """Put the storage of a tensor on a pretended device. -> the tensor"""
    storage = storage_of(x)
    if storage is not None:
        storage.pretended = tag
    return x


def pretended_device(x):
    """In place of the property Tensor.device."""
    tag = tag_of(x)
    if tag is None:
        return REAL_DEVICE.__get__(x)
    return torch.device(GPU if tag == GPU else CPU)


# ---- Every operator ----------------------------------------------------------------------------------------


class DeviceCheck(TorchDispatchMode):
    """Checks the devices of each operator's tensors, and tags what it returns."""

    def __init__(self):
        super().__init__()
        self.mistakes = []  # texts, of errors that somebody may have caught
        self.operators = Counter()  # number of calls on each device
        self.gpu_generators = set()  # their addresses: an operator gets another Python object

    def mistake(self, text):
        """The error to raise. It is also remembered."""
        self.mistakes.append(text)
        return DeviceMistake(text)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = cuda_graphs.tensors((args, kwargs))
        tags = [tag_of(x) for x in tensors]
        known = set(tags) - {EITHER, None}
        if len(known) < 2:
            tag = known.pop() if known else EITHER
        else:
            tag = self.common_device(func, args, tensors, tags)
        self.check_generator(func, kwargs.get("generator"), tag)
        self.operators[tag] += 1
        for x, x_tag in zip(tensors, tags):
            if x_tag == EITHER:
                set_tag(x, tag)

        result = func(*args, **kwargs)
        # The inside of another library's operator may be Python, which has read the devices of new tensors.
        old = [storage_of(x) for x in tensors] if func.namespace != "aten" else None
        for x in cuda_graphs.tensors(result):
            storage = storage_of(x)
            if storage is None:
                continue
            is_new = not hasattr(storage, "pretended") if old is None else all(storage is not s for s in old)
            if is_new:
                storage.pretended = tag
        return result

    def common_device(self, func, args, tensors, tags):
        """The device of the result of an operator on tensors of both devices. Raises if that is an error."""
        packet = func.overloadpacket
        if packet in COPIES:
            return tag_of(args[0])
        if packet in INDEXING:
            return self.check_index(func, args)
        cpu_tensors = [x for x, tag in zip(tensors, tags) if tag == CPU]
        changes_cpu = func._schema.is_mutable and tags[0] == CPU
        all_are_numbers = all(x.dim() == 0 for x in cpu_tensors) and not changes_cpu
        if torch.Tag.pointwise in func.tags and len(cpu_tensors) == 1 and all_are_numbers:
            return GPU
        where = ", ".join(f"{tag} {tuple(x.shape)}" for x, tag in zip(tensors, tags))
        raise self.mistake(f"{func}: tensors on {where}")

    def check_index(self, func, args):
        """self[indices], or self[indices] = values: indices may be on the CPU, values may be a number."""
        x, indices, *rest = args
        tag = tag_of(x)
        for index in cuda_graphs.tensors(indices):
            if tag_of(index) not in (tag, CPU, EITHER):
                raise self.mistake(f"{func}: a tensor on {tag} with indices on {tag_of(index)}")
        for values in cuda_graphs.tensors(rest):
            if values.dim() > 0 and tag_of(values) not in (tag, EITHER):
                raise self.mistake(f"{func}: a tensor on {tag} with new values on {tag_of(values)}")
        return tag

    def check_generator(self, func, generator, tag):
        """Raise if a generator draws for another device than its own."""
        if generator is None or tag == EITHER:
            return
        own = GPU if generator._cdata in self.gpu_generators else CPU
        if own != tag:
            raise self.mistake(f"{func}: a generator of {own} draws for {tag}")

    def device_name(self, device):
        """What a script passes as device -> CPU or GPU; None: meta, which holds no data."""
        device = torch.device(device)
        if device.type == "meta":
            return None
        if device.type not in ("cpu", "cuda") or device.index not in (None, 0):
            raise self.mistake(f"there is no device {device}")
        return GPU if device.type == "cuda" else CPU


# ---- Functions that name a device --------------------------------------------------------------------------


def makes_tensors(check, original, default):
    """original, a function that makes a tensor, for a pretended device=. default(args) -> its usual device"""

    @functools.wraps(original)
    def function(*args, **kwargs):
        device = kwargs.get("device")
        tag = default(args) if device is None else check.device_name(device)
        if tag is None or kwargs.get("out") is not None:
            return original(*args, **kwargs)
        if device is not None:
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)  # a CPU pins nothing
        check.check_generator(original.__name__, kwargs.get("generator"), tag)
        return set_tag(original(*args, **kwargs), tag)

    return function


def on_the_cpu(args):
    """Without device=, most functions make a tensor on the CPU."""
    return CPU


def on_the_device_of_the_first(args):
    """zeros_like(x) and tensor(x) make a tensor on the device of x."""
    return tag_of(args[0]) if args and isinstance(args[0], torch.Tensor) else CPU


def moves(check, to):
    """Tensor.to for pretended devices."""

    @functools.wraps(to)
    def function(x, *args, **kwargs):
        args = list(args)
        device = kwargs.get("device")
        if args and isinstance(args[0], (str, int, torch.device)):
            device, args[0] = args[0], CPU
        elif device is not None:
            kwargs["device"] = CPU
        here = tag_of(x)
        there = here if device is None else check.device_name(device)
        if there is None:
            return torch.empty_like(x, device="meta")
        if here is None or here == there:
            return to(x, *args, **kwargs)
        return set_tag(to(x, *args[:3], **(kwargs | {"copy": True})), there)

    return function


def as_tensor(data, dtype=None, device=None, **options):
    """In place of torch.as_tensor."""
    if isinstance(data, torch.Tensor):
        return data.to(data.device if device is None else device, dtype or data.dtype)
    x = torch.from_numpy(data) if type(data).__module__ == "numpy" else torch.tensor(data, dtype=dtype)
    return x.to(CPU if device is None else device, dtype or x.dtype)


def generator_class(check):
    """In place of torch.Generator, which has a device."""

    class Generator(torch._C.Generator):
        def __new__(cls, device=CPU):
            generator = super().__new__(cls, CPU)
            generator.tag = check.device_name(device)
            if generator.tag == GPU:
                check.gpu_generators.add(generator._cdata)
            return generator

        def __init__(self, device=CPU):
            """The C++ class has no parameters here."""

        device = property(lambda self: torch.device(self.tag))

    return Generator


def needs_the_cpu(check, original):
    """Tensor.numpy and set_rng_state, which take no GPU tensors."""

    @functools.wraps(original)
    def function(x, *args, **kwargs):
        if tag_of(x) == GPU:
            raise check.mistake(f"{original.__name__} of a tensor on {GPU}")
        return original(x, *args, **kwargs)

    return function


def group_by_device(lists, with_indices=False):
    """In place of a C++ function of optimizers, which would group by the real device."""
    groups = {}
    for i, first in enumerate(lists[0]):
        key = first.device, first.dtype
        tensors, indices = groups.setdefault(key, ([[] for _ in lists], []))
        for group, values in zip(tensors, lists):
            if values:
                group.append(values[i])
        if with_indices:
            indices.append(i)
    return groups


def for_cpu(original):
    """A function of autocast, which may get the word "cuda"."""

    @functools.wraps(original)
    def function(*args, **kwargs):
        args = [CPU if x == "cuda" else x for x in args]
        kwargs = {name: CPU if x == "cuda" else x for name, x in kwargs.items()}
        return original(*args, **kwargs)

    return function


# ---- The whole check ---------------------------------------------------------------------------------------


def patches(check):
    """All that the check replaces. -> (object, name, new value) each"""
    for name in FACTORIES:
        yield torch, name, makes_tensors(check, getattr(torch, name), on_the_cpu)
    for name in LIKE:
        yield torch, name, makes_tensors(check, getattr(torch, name), on_the_device_of_the_first)
    yield torch, "as_tensor", as_tensor
    yield torch, "Generator", generator_class(check)

    yield torch.Tensor, "device", property(pretended_device)
    yield torch.Tensor, "to", moves(check, torch.Tensor.to)
    yield torch.Tensor, "cpu", lambda x, *args, **kwargs: x.to(CPU)
    yield torch.Tensor, "numpy", needs_the_cpu(check, torch.Tensor.numpy)

    yield torch, "set_rng_state", needs_the_cpu(check, torch.set_rng_state)
    yield torch._C, "_group_tensors_by_device_and_dtype", group_by_device

    autocast = torch.amp.autocast_mode.autocast
    yield autocast, "__init__", for_cpu(autocast.__init__)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        yield torch, name, for_cpu(getattr(torch, name))

    answers = dict(
        is_available=True,
        device_count=1,
        current_device=GPU,  # really a number, but torch.device(0) works with a GPU only
        set_device=None,
        is_bf16_supported=True,
        synchronize=None,
        empty_cache=None,
        max_memory_allocated=2**20,
        mem_get_info=(2**34, 2**34),
    )
    for name, answer in answers.items():
        yield torch.cuda, name, lambda *args, answer=answer, **kwargs: answer


@contextmanager
def new_accelerate_state():
    """accelerate chooses its device again, and forgets its choice afterwards."""
    classes = (accelerate.PartialState, accelerate.state.AcceleratorState, accelerate.state.GradientState)
    before = [dict(c._shared_state) for c in classes]
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        for c, state in zip(classes, before):
            c._shared_state.clear()
            c._shared_state.update(state)


@contextmanager
def forgotten_answers():
    """transformers and accelerate ask once whether there is a GPU. Here they ask again, before and after."""
    modules = (transformers.utils.import_utils, accelerate.utils.imports)
    remembered = [x for module in modules for x in vars(module).values() if hasattr(x, "cache_clear")]
    for function in remembered:
        function.cache_clear()
    try:
        yield
    finally:
        for function in remembered:
            function.cache_clear()


@contextmanager
def pretended_gpu():
    """Run the code inside as on a machine with a GPU. -> DeviceCheck"""
    check = DeviceCheck()
    with ExitStack() as stack:
        stack.enter_context(forgotten_answers())
        for place, name, value in list(patches(check)):
            stack.enter_context(patch.object(place, name, value))
        cuda_graphs.install(stack)
        stack.enter_context(new_accelerate_state())
        stack.enter_context(check)
        yield check
