import pytest
import torch
from torch.nn import Parameter

from tahq.errors import SnapshotError
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.optimizer import OPTIMIZERS, build_optimizer, load_optimizer_tensors, optimizer_tensors
from tahq.pipeline.update import StageUpdate

SHAPES = {
    "h.0.attn.weight": (7, 5),
    "h.0.ln.weight": (5,),
    "h.0.attn.bias": (5,),
    "h.1.mlp.weight": (3, 33),
    "wte": (11, 1),
}


def decayed(name, parameter):
    return parameter.ndim >= 2


def config(optimizer, **keys):
    return TrainingConfig(**{"steps": 10, "optimizer": optimizer, "lr": 0.05, "weight_decay": 0.1} | keys)


def make_parameters(names=SHAPES):
    generator = {name: torch.Generator().manual_seed(index) for index, name in enumerate(SHAPES)}
    return {name: Parameter(torch.randn(SHAPES[name], generator=generator[name])) for name in names}


def take_steps(optimizer, parameters, steps):
    for step in steps:
        for name, parameter in parameters.items():
            generator = torch.Generator().manual_seed(1000 * step + list(SHAPES).index(name))
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def trained(optimizer, steps, names=SHAPES, **keys):
    parameters = make_parameters(names)
    built = build_optimizer(config(optimizer, **keys), parameters, decayed)
    take_steps(built, parameters, steps)
    return built, parameters


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_result_does_not_depend_on_the_other_parameters_of_the_stage(optimizer):
    names = list(SHAPES)
    whole_optimizer, whole = trained(optimizer, range(4))
    for part in (names[:2], names[2:], names[1:2]):
        part_optimizer, parameters = trained(optimizer, range(4), part)
        assert_equal(parameters, {name: whole[name] for name in part})
        assert_equal(
            optimizer_tensors(part_optimizer, parameters),
            optimizer_tensors(whole_optimizer, {name: whole[name] for name in part}),
        )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_go_out_and_in_to_the_bit_on_another_division(optimizer):
    expected_optimizer, expected = trained(optimizer, range(6))
    before_optimizer, before = trained(optimizer, range(3))
    states = {name: tensor.clone() for name, tensor in optimizer_tensors(before_optimizer, before).items()}
    for names in (list(SHAPES)[:3], list(SHAPES)[3:]):
        parameters = make_parameters(names)
        for name, parameter in parameters.items():
            parameter.data.copy_(before[name].data)
        resumed = build_optimizer(config(optimizer), parameters, decayed)
        load_optimizer_tensors(config(optimizer), resumed, parameters, states)
        take_steps(resumed, parameters, range(3, 6))
        assert_equal(parameters, {name: expected[name] for name in names})
        expected_states = optimizer_tensors(expected_optimizer, {name: expected[name] for name in names})
        assert_equal(optimizer_tensors(resumed, parameters), expected_states)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_that_never_stepped_has_no_states_and_loads_none(optimizer):
    built, parameters = trained(optimizer, range(0))
    assert optimizer_tensors(built, parameters) == {}
    stepped, parameters = trained(optimizer, range(2))
    load_optimizer_tensors(config(optimizer), stepped, parameters, {})
    assert optimizer_tensors(stepped, parameters) == {}


@pytest.mark.parametrize(
    ("absent", "changed", "message"),
    [
        ("/wte", {}, "states for 4 of 5 parameters of this stage; wte has none"),
        ("exp_avg_sq/wte", {}, "has exp_avg, step of wte but not exp_avg_sq"),
        ("-", {"exp_avg/wte": torch.zeros(2, 2)}, r"exp_avg of wte has shape \[2, 2\] in .*, expected \[11, 1\]"),
        (
            "-",
            {"exp_avg/wte": torch.zeros(11, 1).byte()},
            "exp_avg of wte is torch.uint8 in .*, expected torch.float32",
        ),
    ],
)
def test_load_refuses_states_that_do_not_fit(absent, changed, message):
    optimizer, parameters = trained("adamw", range(1))
    states = {name: t for name, t in optimizer_tensors(optimizer, parameters).items() if not name.endswith(absent)}
    with pytest.raises(SnapshotError, match=message):
        load_optimizer_tensors(config("adamw"), optimizer, parameters, states | changed)


def test_states_that_only_other_replicas_files_have_are_not_left_out_silently():
    updates = [StageUpdate(config("adamw"), make_parameters(), decayed, 9, owned={name}) for name in list(SHAPES)[:2]]
    for parameter in updates[0].optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    updates[0].apply(0, 1.0)
    tensors = updates[0].tensors()
    with pytest.raises(SnapshotError, match="in files of other replicas"):
        updates[1].load(tensors.__getitem__, set(tensors))


def test_adamw_is_torchs():
    _, found = trained("adamw", range(5), epsilon=1e-6, betas=(0.8, 0.99))
    expected = make_parameters()
    groups = [
        {"params": [p for name, p in expected.items() if decayed(name, p)], "weight_decay": 0.1},
        {"params": [p for name, p in expected.items() if not decayed(name, p)], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.99), eps=1e-6, foreach=False)
    take_steps(reference, expected, range(5))
    assert_equal(found, expected)


def small_steps(optimizer, **keys):
    """Two steps on x = 2 with gradients 1 and 3, rate 1/2, momentum 3/4: exact in binary."""
    parameter = Parameter(torch.tensor([[2.0]]))
    built = build_optimizer(config(optimizer, lr=0.5, momentum=0.75, **keys), {"x": parameter}, decayed)
    found = []
    for gradient in (1.0, 3.0):
        parameter.grad = torch.tensor([[gradient]])
        built.step()
        found.append(parameter.item())
    return found


def test_sgd_by_hand():
    # b: 1, then 0.75 + 3 = 3.75; x: 2 − 0.5 = 1.5, then 1.5 − 1.875
    assert small_steps("sgd", weight_decay=0.0) == [1.5, -0.375]
    # decay 0.25: x is first multiplied by 1 − 0.5·0.25 = 0.875: 1.75 − 0.5 = 1.25, 1.09375 − 1.875; b as before
    assert small_steps("sgd", weight_decay=0.25) == [1.25, -0.78125]


def test_ema_sgd_is_equation_six_by_hand():
    # β₁ = 1/4; m: 0.25, then 0.1875 + 0.75 = 0.9375; x: 2 − 0.125 = 1.875, then 1.875 − 0.46875
    assert small_steps("ema_sgd", weight_decay=0.0) == [1.875, 1.40625]
    # decay 0.25: 1.75 − 0.125 = 1.625; 1.421875 − 0.46875
    assert small_steps("ema_sgd", weight_decay=0.25) == [1.625, 0.953125]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_decay_spares_norms_and_biases(optimizer):
    parameters = make_parameters()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    built = build_optimizer(config(optimizer), parameters, decayed)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    built.step()
    for name, parameter in parameters.items():
        # the decay alone, as torch computes it: a double, rounded once into the product
        expected = before[name] * (1 - 0.05 * 0.1) if decayed(name, parameter) else before[name]
        assert torch.equal(parameter, expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rate_is_that_of_the_groups(optimizer):
    """Which `StageUpdate` sets in each step; at a rate of 0 nothing moves."""
    parameters = make_parameters()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    built = build_optimizer(config(optimizer), parameters, decayed)
    for group in built.param_groups:
        group["lr"] = 0.0
    take_steps(built, parameters, range(2))
    assert_equal(parameters, before)
