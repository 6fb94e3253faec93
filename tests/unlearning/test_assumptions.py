"""Claims name the parts of a training that are outside of closed packages, and run none of them."""

import datetime
import itertools
import logging
import random
import re
import signal
import sys
import threading
import warnings
from collections import defaultdict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial, wraps
from operator import methodcaller
from types import FunctionType, ModuleType, SimpleNamespace
from weakref import proxy

import numpy as np
import pytest
import torch
import wandb
from avalanche.benchmarks import nc_benchmark
from avalanche.evaluation.metrics import Mean, loss_metrics
from avalanche.logging import TensorboardLogger, TextLogger
from avalanche.training.plugins import EvaluationPlugin
from support import tiny
from support.isolated_pools import pools
from support.strategies import DIGITS, Hears, NoMetric, amnesiac, learn, make
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, RandomCrop, RandomHorizontalFlip
from tqdm import tqdm

from avalanche_amnesia import DisjointModel, DisjointSubnets, task_benchmark
from avalanche_amnesia.audit import UnlearningRecord
from avalanche_amnesia.contrib.baselines import Independent, NetworkPerTask
from avalanche_amnesia.training import EVEN_BUDGET
from avalanche_amnesia.unlearning.assumptions import open_parts
from avalanche_amnesia.unlearning.texts import as_text, attributes_of, is_closed, is_closed_module

X, Y = DIGITS.train_stream[0].tensors
CLASSES = [[0, 1], [0, 1]]


class Drawn:
    """Noise from a generator of its own."""

    def __init__(self, generator):
        self.generator = generator

    def __call__(self, x):
        return x + torch.rand(x.shape, generator=self.generator)


def of_tensors(change):
    return task_benchmark((X, Y), (X, Y), CLASSES, transforms=[change, change])


def hook(*given):
    return None


def loss(logits, y):
    return nn.functional.cross_entropy(logits, y)


def weight(strategy):
    return next(strategy.model.backbone.parameters())


class Holder:
    def __init__(self, held=None):
        self.held = held

    def __call__(self, *given):
        return self.held(*given)


class CountsItsLosses(DisjointSubnets):
    """A user's strategy whose loss depends on how often it was asked for."""

    calls = 0

    def criterion(self):
        self.calls += 1
        return super().criterion() * self.calls


class Lion(torch.optim.SGD):
    """A user's optimizer."""


def replace_methods(made):
    """Replace methods on the object, one of them by itself."""
    made.make_train_dataloader = partial(type(made).make_train_dataloader, made)
    made.training_epoch = lambda **given: type(made).training_epoch(made, **given)
    made.backward = Holder(made.backward)


def on_data(benchmark):
    """Weight pools that have learned two tasks of a benchmark."""
    return lambda: learn(pools(train_epochs=1), benchmark())


def changed(change, maker=pools, **options):
    """A strategy that learns two tasks after a change."""

    def made():
        strategy = maker(train_epochs=1, **options)
        change(strategy)
        return learn(strategy, DIGITS, 2)

    return made


def with_parts():
    options = {"plugins": [Hears()], "evaluator": EvaluationPlugin(NoMetric())}
    return learn(pools(train_epochs=1, optimizer=lambda p: Lion(p, lr=0.1), **options), DIGITS, 2)


ITEMS = [tiny.Items(zip(X, Y.tolist(), strict=True), Y.tolist()) for _ in ("train", "test")]
OF_AVALANCHE = {"task_labels": True, "seed": 0, "class_ids_from_zero_in_each_exp": True}
COMPOSED = Compose([partial(Compose([lambda x: x + GLOBAL[0]]).__call__)])
MASKS = replace(EVEN_BUDGET, embedding_optimizer=lambda p: torch.optim.Adam(p, lr=0.05))
GLOBAL, KEPT = [0], Drawn(torch.Generator())
LAMBDA = r"lambda at test_assumptions.py:\d+"
of_units = partial(changed, maker=amnesiac)
# name → (maker of a trained strategy, patterns of the parts on which a claim rests)
NAMED = {
    "data set": (on_data(lambda: task_benchmark(*ITEMS, CLASSES)), ["support.tiny.Items in the data"]),
    "host's data": (on_data(lambda: nc_benchmark(*ITEMS, 2, **OF_AVALANCHE)), ["support.tiny.Items in the data"]),
    "transform": (on_data(lambda: of_tensors(Drawn(torch.Generator()))), [f"{__name__}.Drawn in the data"]),
    "weak proxy": (on_data(lambda: of_tensors(proxy(KEPT))), [r"weakref\.CallableProxyType in the data"]),
    "lambda in a transform": (on_data(lambda: of_tensors(COMPOSED)), [f"{LAMBDA} in the data"]),
    "optimizer's hook": (
        of_units(lambda made: made.optimizer.register_step_post_hook(hook)),
        [r"optimizer._optimizer_step_post_hooks \(hook at .*"],
    ),
    "weight's hook": (of_units(lambda made: weight(made).register_hook(hook)), [r"model.backbone\..*"]),
    "gradient's hook": (
        of_units(lambda made: weight(made).register_post_accumulate_grad_hook(hook)),
        [r".*_post_accumulate_grad_hooks \(hook at .*"],
    ),
    "model's hook": (
        of_units(lambda made: made.model.register_forward_hook(hook)),
        [r"model._forward_hooks \(hook at .*"],
    ),
    "step": (
        of_units(lambda made: setattr(made.optimizer, "step", lambda of=made.optimizer.step: of())),
        [rf"optimizer.step \({LAMBDA}.*"],
    ),
    "loss": (of_units(lambda made: setattr(made, "_criterion", loss)), [r"the loss loss at test_assumptions.py:\d+"]),
    "settings": (of_units(lambda made: None, masks=MASKS), [f"{LAMBDA} in HATPlugin"]),
    "strategy": (
        changed(lambda made: setattr(made, "__class__", CountsItsLosses)),
        ["calls of CountsItsLosses", "criterion of CountsItsLosses"],
    ),
    "method of an object": (
        changed(replace_methods),
        [rf"training_epoch of DisjointSubnets \({LAMBDA}.*", r"backward of DisjointSubnets \(.*Holder\)"],
    ),
    "plugin, metric and optimizer": (
        with_parts,
        ["support.strategies.Hears", "support.strategies.NoMetric", f"the optimizer {__name__}.Lion"],
    ),
}


def assert_rests_on(strategy, patterns):
    plan = strategy.plan_unlearning([1])
    assert (plan.claim, plan.reasons) == ("conditional", ())
    assert_match(plan.rests_on, patterns)


def assert_match(parts, patterns):
    assert len(parts) == len(patterns), parts
    for part, pattern in zip(parts, patterns, strict=True):
        assert re.fullmatch(pattern, part), part


@pytest.mark.parametrize("name", NAMED)
def test_parts_of_the_user_are_named(name):
    make_learned, patterns = NAMED[name]
    assert_rests_on(make_learned(), patterns)


def test_patches_of_closed_code_modes_and_hooks_on_all_modules_are_named(monkeypatch, tmp_path):
    step = torch.optim.Adam.step

    def doubled(self, closure=None):
        return step(self)

    metrics = loss_metrics(epoch=True)
    metrics[0]._metric._mean_loss.reset = lambda: None
    loggers = [TextLogger(Holder()), TextLogger(sys.stdout), TensorboardLogger(tmp_path)]
    strategy = pools(evaluator=EvaluationPlugin(metrics, loggers=loggers))
    weight(strategy).__class__ = type("Weights", (nn.Parameter,), {})
    functions = type("Functions", (BaseTorchFunctionMode,), {})
    operations = type("Operations", (TorchDispatchMode,), {"__torch_dispatch__": lambda *given: given[1](*given[3])})
    monkeypatch.setattr(nn.Module, "added", doubled, raising=False)  # as transformers does: no method is replaced
    monkeypatch.setattr(nn.functional, "linear", wraps(linear := nn.functional.linear)(lambda *x: linear(*x)))
    monkeypatch.setattr(torch.Tensor, "mul_", doubled, raising=False)
    monkeypatch.setattr(Mean, "update", doubled)
    monkeypatch.setattr(RandomSampler, "__iter__", property(doubled))
    monkeypatch.setattr(nn.init, "zeros_", partial(doubled))
    closed = "math.sqrt random.seed torch.autograd.backward torch.optim.Adam.step avalanche_amnesia.seeding.rng_state"
    for name in ("warnings.showwarning", *closed.split()):
        monkeypatch.setattr(name, doubled)
    library = torch.library.Library("aten", "IMPL")
    library.impl("hardtanh", doubled, "CPU")
    handle = nn.modules.module.register_module_forward_hook(hook)
    monkeypatch.setattr(sys, "getprofile", lambda: hook)
    try:
        with functions(), operations(), torch.device("cpu"), saved_tensors_hooks(lambda x: x, abs):
            parts = open_parts(strategy, {})
    finally:
        handle.remove()
        library._destroy()
    patterns = [f"{__name__}.Weights in the model or optimizer"]
    around = (f"{__name__}.Functions", f"{__name__}.Operations", "hook at .*", LAMBDA)
    patterns += [rf"{name} around the training" for name in around]
    patterns += [r"_global_forward_hooks \(hook at .*", f"{__name__}.Holder", LAMBDA, rf"reset of Mean \({LAMBDA}\)"]
    patterns += [r"the kernel hardtanh \(CPU\)", r"linear of torch.nn.functional \(linear at test_ass.*"]
    replaced = ["mul_ of Tensor", "rng_state of avalanche_amnesia.seeding", "sqrt of math", "seed of random"]
    replaced += ["backward of torch.autograd", "zeros_ of torch.nn.init", "showwarning of warnings"]
    replaced += ["__iter__ of RandomSampler", "step of Adam", "update of Mean"]
    patterns += [rf"{name} \(doubled at .*" for name in replaced]
    assert_match(parts, patterns)
    monkeypatch.undo()
    assert "hook at test_assumptions.py:" in open_parts(pools(), {"collate_fn": hook})[0]


def test_callbacks_that_may_run_beside_a_training_and_code_replaced_later_are_named(monkeypatch):
    handler, timer, ended = logging.StreamHandler(Holder()), threading.Timer(99, hook), threading.Event()
    handler.addFilter(loss)
    assert open_parts(pools(), {}) == ()
    monkeypatch.setattr(nn.functional.relu6, "__code__", hook.__code__)
    monkeypatch.setattr(logging.getLogger(__name__), "handlers", [handler])
    monkeypatch.setattr(sys, "meta_path", [Drawn(None)])
    monkeypatch.setattr(warnings, "filters", [("ignore", Rows(), Warning, None, 0)])
    monkeypatch.setattr(signal, "getsignal", {signal.SIGALRM: partial(flat)}.get)
    with ThreadPoolExecutor() as pool:
        pool.submit(lambda: ended.wait(60))
        timer.start()
        parts = open_parts(pools(), {})
        timer.cancel()
        ended.set()
    names = {"Holder", "loss", "Rows", "Drawn", "flat", "hook", "lambda", "relu6 of torch.nn.functional (relu6"}
    assert {re.sub(f"^{__name__}.| around .*| at .*", "", part) for part in parts} == names


def test_threads_and_handlers_of_installed_packages_leave_a_claim_exact(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    run = wandb.init(mode="offline", dir=tmp_path)
    _loading = iter(DataLoader(TensorDataset(X), num_workers=1))
    with tqdm(total=1):
        record = learn(pools(train_epochs=1), DIGITS, 2).unlearn([0])
        assert threading.active_count() > 2
    run.finish()
    assert (record.claim, record.rests_on) == ("exact", ())


def test_equal_values_have_equal_texts_in_every_process():
    first, second = {0, 8}, {8, 0}
    assert [*first] != [*second]  # as the sets of text in two processes
    for within in (set, lambda given: {frozenset(given): 1}, lambda given: np.array([given, 0], dtype=object)):
        assert as_text(within(first)) == as_text(within(second)) != as_text(within({0}))


COUNTER, NUMBERS = {"calls": 0}, itertools.count()
HIDDEN, SHOWN = {"calls": 0}, nn.Parameter(torch.ones(1))
SHOWN.calls = nn.functional.relu.calls = 0
FOLDER = ModuleType("folder")
FOLDER.LAZY, FOLDER.__builtins__ = [0], {"SEEN": [0]}
exec("def __getattr__(name):\n    LAZY[0] += name == 'lazy'\n    SEEN[0] += 1", vars(FOLDER))
FOLDER.settings = ModuleType("settings")
vars(FOLDER.settings).update(scale=1, shift=1)
second = nn.Linear(1, 1)  # its name is that of an attribute
Built = type("Built", (), {"__init__": lambda self: COUNTER.update(calls=COUNTER["calls"] + 1)})


def flat(x, axis=1):
    return x.flatten(len(COUNTER) * axis)


class Counted(type):
    @property
    def of_class(cls):
        eval("HIDDEN")["calls"] += 1
        SHOWN.calls = nn.functional.relu.calls = HIDDEN["calls"]


class Remembers(nn.Module, metaclass=Counted):
    """Two layers, and attributes."""

    __slots__ = ("gain",)
    calls = 0

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(64, 16), nn.Dropout(0.1), nn.Linear(16, 16)
        self.scale, self.seen, self.array = 1.0, torch.ones(2), np.ones(())

    def forward(self, x):
        return self.second(self.drop(self.first(flat(x)).relu())) * self.scale


@lru_cache
def remembered():
    return torch.rand(1).item()


def counting(count=0, settings=FOLDER.settings):
    class Counts(Remembers):
        """Counts its calls in each place outside of its objects."""

        def forward(self, x, seen=[]):  # noqa: B006
            nonlocal count
            count += 1
            type(self).calls += 1
            seen.append(1)
            return super().forward(x) * self.factor if FOLDER.lazy is type(self).of_class else x

        @property
        def factor(self):
            COUNTER["calls"] += 1
            settings.scale += getattr(settings, "".join(["sh", "ift"])) + len(FOLDER.LAZY) + bool(Built())
            now, drawn, more = datetime.datetime.now(), np.random.default_rng(), (sys.getrecursionlimit, id, np.load)
            return bool(open(__file__).close() or next(NUMBERS) or remembered() or now or drawn or more)

    return Counts()


def remembering(net=Remembers, **options):
    return make(DisjointSubnets, model=DisjointModel(net(), n_features=16), train_epochs=1, **options)


def test_what_the_code_of_a_network_keeps_outside_of_it_is_compared_or_named():
    strategy = remembering(counting)
    before = attributes_of(strategy)["code of Counts"]
    (reason, *_) = learn(strategy, DIGITS, 2).plan_unlearning([0]).reasons
    assert "changed code of Counts.<lambda>.<global>.COUNTER, code of Counts.Counted.of_class.<global>.HIDDEN" in reason
    after = attributes_of(strategy)["code of Counts"]
    changed = {name for name in before if before[name] != after[name]}
    counters = {"forward.<closure>.count", "forward.default[0]", "factor.<global>.COUNTER"}
    counters |= {"factor.<closure>.settings.scale", "factor.<global>.FOLDER.LAZY"}
    shown = {f"Counted.of_class.<global>.{name}" for name in ("HIDDEN", "SHOWN.calls", "nn.functional.relu.calls")}
    shown |= {"calls", "flat.<global>.COUNTER", "Counted.of_class.<global>.SHOWN", "<lambda>.<global>.COUNTER"}
    shown |= {"__getattr__.<global>.LAZY", "__getattr__.<global>.SEEN"}
    assert changed == shown | {f"Counts.{name}" for name in counters}
    assert "Counts.factor.<closure>.settings.shift" in after
    named = {part.rpartition("<global>.")[2] for part in open_parts(strategy, {}) if part.startswith("Count")}
    unknown = ["open", "NUMBERS", "remembered", "datetime.datetime", "np.random.default_rng", "np.random.random"]
    unknown += ["sys.getrecursionlimit", "id", "np.load", "eval"]
    assert named == {f"{name} of Counts" for name in unknown}
    kind = type(strategy.model.backbone)
    kind.forward = FunctionType(hook.__code__, globals())
    kind.forward.__qualname__ = "Counts.forward"
    assert attributes_of(strategy)["code of Counts"]["Counts.forward"] != after["Counts.forward"]


CHANGES = {
    "number": lambda module: setattr(module, "scale", module.scale + 1),
    "dropout": lambda module: setattr(module.drop, "p", 0.3),
    "tensor": lambda module: setattr(module, "seen", 2 * torch.ones(2)),
    "new": lambda module: vars(module).update(memory=1.0),
    "array in its place": lambda module: module.array.fill(2),
    "no gradients": lambda module: module.first.requires_grad_(False),
    "slot": lambda module: object.__setattr__(module, "gain", 2.0),
    "class": lambda module: setattr(module, "drop", nn.AlphaDropout(0.1)),
    "module": lambda module: setattr(module, "further", nn.ReLU()),
}


def remembering_module(strategy):
    return next(module for module in strategy.model.modules() if isinstance(module, Remembers))


# A tensor that a training changes is refused at its end, because the task keeps a copy of it.
@pytest.mark.parametrize(("change", "between"), [*((c, True) for c in CHANGES), ("number", False), ("new", False)])
def test_an_attribute_that_changes_is_a_reason(change, between):
    strategy = remembering()
    module = remembering_module(strategy)
    strategy.train(DIGITS.train_stream[0])
    if between:
        CHANGES[change](module)
    else:
        module.register_forward_hook(lambda *given: CHANGES[change](module))
    strategy.train(DIGITS.train_stream[1])
    plan = strategy.plan_unlearning([0])
    assert plan.claim == "approximate"
    says = "differed from the first task's when task 1 began" if between else "training task 1 changed"
    assert any(says in reason for reason in plan.reasons), plan.reasons


OPEN = [
    *([torch.ones(2)], torch.Generator(), np.random.default_rng(0), random.Random(0).random, [0].append),
    *(methodcaller("apply_", hook), np.frompyfunc(hook, 1, 1), partial(torch.rand, generator=torch.Generator())),
    *(Compose([Drawn(torch.Generator())]), Compose([RandomHorizontalFlip()]), torch.distributions.Normal(0.0, 1.0)),
    *(np.array([[[]]] * 2, dtype=object), SimpleNamespace(real=1), np.seterr, torch.set_num_threads),
]
CLOSED = [torch.channels_last, namedtuple("Shape", "width")(1), nn.functional.relu]


@pytest.mark.parametrize(("value", "named"), [*((each, True) for each in OPEN), *((each, False) for each in CLOSED)])
def test_generators_and_open_objects_in_modules_are_named(value, named):
    strategy = remembering()
    remembering_module(strategy).extra = value
    assert ("extra of Remembers" in open_parts(strategy, {})) is named


def test_functions_and_operators_in_layers_of_torch_are_named():
    strategy, graph = remembering(), torch.fx.Graph()
    module = remembering_module(strategy)
    torch.library.custom_op("script::kept", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor")
    graph.call_function(torch.ops.script.kept, (graph.call_function(flat, (graph.placeholder("x"),)),))
    module.drop.extra, module.graph = loss, torch.fx.GraphModule(nn.Module(), graph)
    assert sorted(open_parts(strategy, {})) == ["_graph of GraphModule", "extra of Dropout"]
    strategy._criterion = module.graph
    parts = [part for part in open_parts(strategy, {}) if part.startswith("the loss")]
    assert_match(parts, ["the loss the operator script.kept", r"the loss flat at test_assumptions.py:\d+"])


def test_arguments_of_train_and_settings_of_torch_are_compared(monkeypatch):
    strategy = pools(train_epochs=1)
    strategy.train(DIGITS.train_stream[0])
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.backends.mkldnn.set_flags(False)
    strategy.train(DIGITS.train_stream[1], drop_last=True)
    torch.backends.mkldnn.set_flags(True)
    reason, other = strategy.plan_unlearning([0]).reasons
    assert "trained with other settings or plugins than the first task" in reason
    names = "torch._C._get_mkldnn_enabled, torch.backends.cudnn.deterministic"
    assert other == f"{names} differed from the first task's when task 1 began"
    plan = strategy.plan_unlearning([1])  # the code that changed them may have counted task 1
    assert (plan.claim, plan.rests_on[1]) == ("conditional", f"the code around train: {other}")


def test_a_parameter_in_another_group_is_a_reason():
    def groups(parameters):
        first, *others = parameters
        return torch.optim.SGD([{"params": [first]}, {"params": others, "lr": 0.01}], lr=0.1)

    strategy = learn(pools(train_epochs=1, optimizer=groups), DIGITS, 1)
    first, second = (group["params"] for group in strategy.optimizer.param_groups)
    second.append(first.pop(0))
    (reason,) = learn(strategy, DIGITS, [1]).plan_unlearning([0]).reasons
    assert "trained with other settings or plugins than the first task" in reason


def test_tensors_torchvision_s_transforms_and_a_network_of_the_user_s_are_exact():
    pictures = torch.rand(40, 1, 8, 8), torch.arange(40) % 2
    crops = Compose([RandomCrop(8, padding=1), RandomHorizontalFlip()])
    benchmark = task_benchmark(pictures, pictures, CLASSES, transforms=[crops, crops])
    strategy = make(Independent, model=NetworkPerTask(Remembers(), n_features=16), train_epochs=1)
    assert learn(strategy, benchmark).unlearn([0]).claim == "exact"


def test_data_and_transforms_that_change_between_tasks_are_named(tmp_path):
    x, crops = torch.rand(40, 3, 8, 8), Compose([RandomCrop(8, padding=1), RandomHorizontalFlip(0.1)])
    data, file = tiny.with_targets(x, torch.arange(40) % 4), tmp_path / "class" / "0.png"
    file.parent.mkdir()
    file.touch()
    data.pictures = ImageFolder(tmp_path)
    strategy = pools()
    for strategy.experience in nc_benchmark(data, data, 2, True, seed=0, train_transform=crops).train_stream:
        assert open_parts(strategy, {}) == ()
    x.numpy()[0, 0, 0, 1] += 1  # one entry, in its place
    file.write_text("changed")
    crops.transforms[1].p = 0.9
    crops.transforms.append(crops.transforms[0])
    data.tensors = data.tensors[::-1]
    parts = {part.rpartition(".")[2] for part in open_parts(strategy, {})}
    named = ("Tensor", "Compose", "RandomHorizontalFlip", "TensorDataset", "ImageFolder")
    assert parts == {f"{name} in the data, changed" for name in named}


def of_subset(rows, **attributes):
    """Weight pools before a task of a subset of rows."""
    subset, strategy = Subset(rows, range(len(rows))), pools()
    vars(subset).update(targets=[at % 4 for at in range(len(rows))], **attributes)
    strategy.experience = nc_benchmark(subset, subset, 2, True, seed=0).train_stream[0]
    return strategy


@pytest.mark.parametrize("kind", [np.zeros, bytearray, lambda n: [0] * n, torch.zeros])
def test_rows_of_data_that_change_are_named(kind):
    strategy = of_subset([((row := kind(1)), 0)] * 2000)
    assert open_parts(strategy, {}) == ()
    row[0] += 1
    assert "torch.utils.data.dataset.Subset in the data, changed" in open_parts(strategy, {})


def test_a_record_names_the_parts_and_keeps_them_in_json():
    record = learn(pools(train_epochs=1, plugins=[Hears()]), DIGITS.train_stream[:2]).unlearn([1])
    assert (record.claim, record.rests_on) == ("conditional", ("support.strategies.Hears",))
    assert UnlearningRecord.from_json(record.to_json()) == record
    assert "exact if stateless" in str(record)
    assert "- support.strategies.Hears" in str(record)


Rows, Marked = type("Rows", (list,), {}), type("Marked", (torch.Tensor,), {})  # the script's


@pytest.mark.parametrize(
    ("held", "named"),
    [
        (Rows([0]), "Rows"),
        (torch.zeros(1).as_subclass(Marked), "Marked"),
        (defaultdict(Holder), "Holder"),
        ([np.zeros(1), Rows()], "Rows"),
        ([1] * 5000 + [Holder()], "Holder"),
    ],
)
def test_objects_and_subclasses_of_containers_and_tensors_in_data_are_named(held, named):
    strategy = of_subset(TensorDataset(X, Y), extra=held)
    assert any(named in part for part in open_parts(strategy, {}))


def test_code_of_the_script_with_the_name_of_a_closed_module_is_open(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "trace", SimpleNamespace(__file__=str(tmp_path / "trace.py")))
    is_closed_module.cache_clear()
    assert not is_closed_module("trace")
    monkeypatch.undo()
    is_closed_module.cache_clear()
    forged = FunctionType(loss.__code__, {"__name__": "torch.nn"})
    forged.__module__ = "torch.nn"
    assert not is_closed(forged)
    exec(compile("def forged():\n    pass", torch.__file__, "exec"), inside := {"__name__": "torch"})
    assert is_closed(torch.compile) > is_closed(inside["forged"])


@pytest.mark.parametrize("other", [F.multi_margin_loss, partial(F.cross_entropy, label_smoothing=0.1)])
def test_another_loss_function_between_two_tasks_is_a_reason(other):
    strategy = learn(make(DisjointSubnets, criterion=nn.functional.cross_entropy), DIGITS, 1)
    strategy._criterion = other
    record = learn(strategy, DIGITS, [1]).unlearn([0])
    assert record.claim == "approximate"
    assert "criterion" in " ".join(record.reasons)
