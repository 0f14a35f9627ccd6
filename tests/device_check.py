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
import linecache
import os
import sys
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
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
HERE = str(Path(__file__).resolve())
LIBRARIES = (str(Path(torch.__file__).parents[1]), str(Path(os.__file__).parent), "<", HERE)

# Functions that make a tensor from no other one. Ask now: PyTorch remembers the functions of the first call.
FACTORIES = [f.__name__ for f in _device_constructors() if getattr(torch, f.__name__, None) is f]
FACTORIES = [name for name in FACTORIES if name not in ("tensor", "as_tensor", "asarray")]
LIKE = "tensor normal zeros_like ones_like full_like empty_like rand_like randn_like randint_like".split()
NEW = ("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "new_tensor")

COPIES = {aten.copy_, aten._foreach_copy_, aten.fill_}  # these accept any two devices
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
# Which operators accept a CPU tensor without dimensions: most pointwise ones accept one.
ACCEPT_A_NUMBER = {aten.masked_fill, aten.masked_fill_}  # not marked as pointwise
ACCEPT_NUMBERS = {aten.where}  # even several
REFUSE_NUMBERS = {aten.clamp, aten.clamp_, aten.lerp, aten.lerp_}


class DeviceMistake(RuntimeError):
    """What would be an error on a GPU."""


# ---- Tags --------------------------------------------------------------------------------------------------


def storage_of(x):
    """The storage of a tensor. None: it has no data, like those on the device meta."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):  # inside torch.vmap
        x = torch._C._functorch.get_unwrapped(x)
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


def tensors_in(values):
    """All tensors in nested lists, tuples and dicts."""
    for x in values:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from tensors_in(x)
        elif isinstance(x, dict):
            yield from tensors_in(x.values())


def script_line():
    """The innermost line of the call stack that is in no library. -> "FILE:NUMBER: SOURCE" """
    frame = sys._getframe(1)
    while frame is not None:
        path, number = frame.f_code.co_filename, frame.f_lineno
        if not path.startswith(LIBRARIES):
            return f"{Path(path).name}:{number}: {linecache.getline(path, number).strip()}"
        frame = frame.f_back
    return "no line of a script"


# ---- Every operator ----------------------------------------------------------------------------------------


class DeviceCheck(TorchDispatchMode):
    """Checks the devices of each operator's tensors, and tags what it returns."""

    def __init__(self):
        super().__init__()
        self.mistakes = []  # texts, of errors that somebody may have caught
        self.operators = Counter()  # number of calls on each device
        self.asked = threading.local()  # .device is that of the function that is making a tensor
        self.gpu_generators = set()  # their addresses: an operator gets another Python object

    def mistake(self, text):
        """The error to raise. It is also remembered."""
        text = f"{text}, at {script_line()}"
        self.mistakes.append(text)
        return DeviceMistake(text)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs)))
        tags = [tag_of(x) for x in tensors]
        known = set(tags) - {EITHER, None}
        if not tensors:
            tag = getattr(self.asked, "device", EITHER)
        elif len(known) < 2:
            tag = known.pop() if known else EITHER
        else:
            tag = self.common_device(func, args, kwargs, tensors, tags)
        self.check_generator(func, kwargs.get("generator"), tag)
        self.operators[tag] += 1
        for x, x_tag in zip(tensors, tags):
            if x_tag == EITHER:
                set_tag(x, tag)

        result = func(*args, **kwargs)
        # The inside of another library's operator may be Python, which has read the devices of new tensors.
        old = [storage_of(x) for x in tensors] if func.namespace != "aten" else None
        for x in tensors_in((result,)):
            storage = storage_of(x)
            if storage is None:
                continue
            is_new = not hasattr(storage, "pretended") if old is None else all(storage is not s for s in old)
            if is_new:
                storage.pretended = tag
        return result

    def common_device(self, func, args, kwargs, tensors, tags):
        """The device of the result of an operator on tensors of both devices. Raises if that is an error."""
        packet = func.overloadpacket
        if packet in COPIES:
            return tag_of(args[0])
        if packet in INDEXING:
            return self.check_index(func, args)
        cpu_tensors = [x for x, tag in zip(tensors, tags) if tag == CPU]
        changed = self.changed_tensors(func, args, kwargs)
        all_are_numbers = all(x.dim() == 0 and not any(x is y for y in changed) for x in cpu_tensors)
        accepts_one = torch.Tag.pointwise in func.tags or packet in ACCEPT_A_NUMBER
        accepts_one = accepts_one and packet not in REFUSE_NUMBERS
        if all_are_numbers and (packet in ACCEPT_NUMBERS or (accepts_one and len(cpu_tensors) == 1)):
            return GPU
        where = ", ".join(f"{tag} {tuple(x.shape)}" for x, tag in zip(tensors, tags))
        raise self.mistake(f"{func}: tensors on {where}")

    def check_index(self, func, args):
        """self[indices], or self[indices] = values: indices may be on the CPU, values may be a number."""
        x, indices, *rest = args
        tag = tag_of(x)
        for index in tensors_in(indices):
            if tag_of(index) not in (tag, CPU, EITHER):
                raise self.mistake(f"{func}: a tensor on {tag} with indices on {tag_of(index)}")
        for values in tensors_in(rest):
            if values.dim() > 0 and tag_of(values) not in (tag, EITHER):
                raise self.mistake(f"{func}: a tensor on {tag} with new values on {tag_of(values)}")
        return tag

    @staticmethod
    def changed_tensors(func, args, kwargs):
        """The tensors that an operator changes in place, and those of out=."""
        changed = []
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                changed.extend(tensors_in([value]))
        return changed

    def check_generator(self, func, generator, tag):
        """Raise if a generator draws for another device than its own."""
        if generator is None or tag == EITHER:
            return
        own = GPU if generator._cdata in self.gpu_generators else CPU
        if own != tag:
            raise self.mistake(f"{func}: a generator of {own} draws for {tag}")

    def device_name(self, device):
        """What a script passes as device -> CPU or GPU; None: meta, which holds no data."""
        if isinstance(device, int):
            device = f"cuda:{device}"
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
        before = getattr(check.asked, "device", EITHER)
        check.asked.device = tag
        try:
            return set_tag(original(*args, **kwargs), tag)
        finally:
            check.asked.device = before

    return function


def on_the_cpu(args):
    """Without device=, most functions make a tensor on the CPU."""
    return CPU


def on_the_device_of_the_first(args):
    """zeros_like(x), x.new_zeros(2) and tensor(x) make a tensor on the device of x."""
    return tag_of(args[0]) if args and isinstance(args[0], torch.Tensor) else CPU


def on_the_device_in_the_list(args):
    """pad_sequence([x, y]) makes a tensor inside C++."""
    return tag_of(args[0][0])


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
        copied = set_tag(to(x, *args[:3], **(kwargs | {"copy": True})), there)
        if copied.requires_grad:
            copied.register_hook(lambda gradient: gradient.to(here))
        return copied

    return function


def as_tensor(data, dtype=None, device=None, **options):
    """In place of torch.as_tensor and torch.asarray."""
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


def checked_gradient(check):
    """In place of the property Tensor.grad. PyTorch compares the devices already in the backward pass."""
    grad = torch._C.TensorBase.grad

    def checked(x, gradient):
        if gradient is not None and tag_of(gradient) not in (tag_of(x), EITHER, None):
            raise check.mistake(f"a tensor on {tag_of(x)} has a gradient on {tag_of(gradient)}")
        return gradient

    return property(
        lambda x: checked(x, grad.__get__(x)),
        lambda x, gradient: grad.__set__(x, checked(x, gradient)),
        lambda x: grad.__delete__(x),
    )


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
    """A function of autocast, whose first argument may be "cuda"."""

    @functools.wraps(original)
    def function(*args, **kwargs):
        return original(*[CPU if x == "cuda" else x for x in args], **kwargs)

    return function


def autocast_for_cpu(original):
    """autocast.__init__, whose device_type may be "cuda"."""

    @functools.wraps(original)
    def function(self, device_type, *args, **kwargs):
        original(self, CPU if device_type == "cuda" else device_type, *args, **kwargs)

    return function


# ---- The whole check ---------------------------------------------------------------------------------------


def patches(check):
    """All that the check replaces. -> (object, name, new value) each"""
    for name in FACTORIES:
        yield torch, name, makes_tensors(check, getattr(torch, name), on_the_cpu)
    for name in LIKE:
        yield torch, name, makes_tensors(check, getattr(torch, name), on_the_device_of_the_first)
    for name in NEW:
        method = getattr(torch.Tensor, name)
        yield torch.Tensor, name, makes_tensors(check, method, on_the_device_of_the_first)
    yield torch, "as_tensor", as_tensor
    yield torch, "asarray", as_tensor
    yield torch, "Generator", generator_class(check)

    yield torch.Tensor, "device", property(pretended_device)
    yield torch.Tensor, "is_cuda", property(lambda x: x.device.type == "cuda")
    yield torch.Tensor, "is_cpu", property(lambda x: x.device.type == "cpu")
    yield torch.Tensor, "get_device", lambda x: 0 if x.is_cuda else -1
    yield torch.Tensor, "grad", checked_gradient(check)
    yield torch.Tensor, "to", moves(check, torch.Tensor.to)
    yield torch.Tensor, "cpu", lambda x, *args, **kwargs: x.to(CPU)
    yield torch.Tensor, "cuda", lambda x, device=GPU, *args, **kwargs: x.to(device or GPU)
    yield torch.Tensor, "numpy", needs_the_cpu(check, torch.Tensor.numpy)

    pad_sequence = torch._C._nn.pad_sequence
    yield torch._C._nn, "pad_sequence", makes_tensors(check, pad_sequence, on_the_device_in_the_list)
    yield torch, "set_rng_state", needs_the_cpu(check, torch.set_rng_state)
    yield torch._C, "_group_tensors_by_device_and_dtype", group_by_device

    autocast = torch.amp.autocast_mode.autocast
    yield autocast, "__init__", autocast_for_cpu(autocast.__init__)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        yield torch, name, for_cpu(getattr(torch, name))

    answers = dict(is_available=True, device_count=1, is_bf16_supported=True, get_device_capability=(9, 0))
    answers |= dict(get_device_name="pretended", set_device=None, synchronize=None, empty_cache=None)
    answers |= dict(max_memory_allocated=2**20, memory_allocated=0, memory_reserved=0)
    answers |= dict(mem_get_info=(2**34, 2**34))
    answers |= dict(current_device=GPU)  # really a number, but torch.device(0) works with a GPU only
    for name, answer in answers.items():
        yield torch.cuda, name, lambda *args, answer=answer, **kwargs: answer
    yield torch.accelerator, "is_available", lambda: True


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
