"""What Megatron's weights are saved to and restored from; Megatron itself is not installed where these tests run.

verl's own two functions are taken from its source and run on stand-ins with Megatron's attributes.
"""

import ast
import gc
import importlib.util
import types
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from seamless_verl.verl_adapter.weights import saved_weights

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

NAMES = ("copy_megatron_model_to_cpu", "restore_megatron_model_from_cpu")


class Wrapped:
    """As Megatron's DDP: flat buffers of parameters, those of experts apart."""

    def __init__(self, *sizes):
        self.buffers = [self._buffer(size) for size in sizes[:-1]]
        self.expert_parallel_buffers = [self._buffer(sizes[-1])]

    @staticmethod
    def _buffer(size):
        return types.SimpleNamespace(param_data=torch.arange(size, dtype=torch.bfloat16))

    def all(self):
        return [buffer.param_data for buffer in (*self.buffers, *self.expert_parallel_buffers)]


@pytest.fixture(scope="module")
def verls():
    source = Path(importlib.util.find_spec("verl").origin).parent / "utils" / "megatron_utils.py"
    gc.disable()  # a collection in the midst lets another thread parse, which this one takes for its own (gh-106905)
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    finally:
        gc.enable()  # remove both with Python < 3.12
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in NAMES]
    module = types.ModuleType("megatron_utils")
    module.__dict__.update(torch=torch, DDP=Wrapped)
    exec(compile(ast.Module(wanted, []), "megatron_utils", "exec"), module.__dict__)
    return module


@pytest.fixture
def ours(verls):
    module = types.ModuleType("megatron_utils")
    module.__dict__.update(vars(verls))
    saved_weights.copy_megatron_weights_once(module)
    return module


def offload(data):
    """As verl's ``offload_megatron_model_to_cpu``."""
    data.cpu_data = data.clone()
    data.untyped_storage().resize_(0)


class Copies(TorchDispatchMode):
    """Counts the copies of at least so many numbers."""

    def __init__(self, least):
        super().__init__()
        self.least, self.made = least, 0

    def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
        name = function.overloadpacket.__name__
        if name in ("copy_", "clone", "_to_copy", "_pin_memory") and arguments[0].numel() >= self.least:
            self.made += 1
        return function(*arguments, **(options or {}))


def test_what_is_saved_comes_back_and_is_no_alias(ours):
    models = [Wrapped(5, 3, 4), torch.nn.Linear(2, 2)]
    published = [data.clone() for data in models[0].all()]
    weight = models[1].weight.detach().clone()
    state = ours.copy_megatron_model_to_cpu(models)
    with torch.no_grad():
        for tensor in (*models[0].all(), models[1].weight):
            tensor.add_(100)
    ours.restore_megatron_model_from_cpu(models, state)
    assert all(torch.equal(now, before) for now, before in zip(models[0].all(), published, strict=True))
    assert torch.equal(models[1].weight, weight)


@pytest.mark.parametrize("offloaded_then", [False, True])
@pytest.mark.parametrize("offloaded_now", [False, True])
def test_offloaded_weights_are_saved_and_restored_where_they_are(ours, offloaded_then, offloaded_now):
    model = Wrapped(6, 2)
    (data, _) = model.all()
    if offloaded_then:
        offload(data)
    state = ours.copy_megatron_model_to_cpu([model])
    if offloaded_then and not offloaded_now:
        data.untyped_storage().resize_(data.cpu_data.untyped_storage().size())
    elif offloaded_now and not offloaded_then:
        offload(data)
    where = data.cpu_data if offloaded_now else data
    where.fill_(7)
    ours.restore_megatron_model_from_cpu([model], state)
    assert torch.equal(where, torch.arange(6, dtype=torch.bfloat16))


def test_verl_restores_what_we_saved(ours, verls):
    model = Wrapped(5, 3, 4)
    before = [data.clone() for data in model.all()]
    state = ours.copy_megatron_model_to_cpu([model])
    for data in model.all():
        data.zero_()
    verls.restore_megatron_model_from_cpu([model], state)
    assert all(torch.equal(now, then) for now, then in zip(model.all(), before, strict=True))


def test_each_buffer_is_copied_once_where_verl_copies_three_times(ours, verls, monkeypatch):
    """On a GPU verl's first copy is the one from the device; here the weights are on the host, where it is none."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())  # without a device there is no pinning
    counts = {}
    for name, functions in (("ours", ours), ("verl's", verls)):
        model = Wrapped(1000, 10)
        with Copies(least=1000) as copies:
            functions.copy_megatron_model_to_cpu([model])
        counts[name] = copies.made
    assert counts == {"ours": 1, "verl's": 2}


def test_a_model_that_was_wrapped_meanwhile_is_refused(ours):
    state = ours.copy_megatron_model_to_cpu([torch.nn.Linear(2, 2)])
    with pytest.raises(TypeError, match="chunk 0 was saved unwrapped"):
        ours.restore_megatron_model_from_cpu([Wrapped(3, 1)], state)


def test_verls_worker_takes_the_two_functions_by_name():
    """They are replaced in their module, which works as long as the worker imports them when it needs them."""
    import inspect

    from verl.experimental.separation.engine_workers import DetachActorWorker

    source = inspect.getsource(DetachActorWorker._get_strategy_handlers)
    assert "from verl.utils.megatron_utils import" in source
    assert all(name in source for name in NAMES)
