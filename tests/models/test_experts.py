"""Experts and their load beside transformers' own functions, and their weights in files."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_slices import EXPERTS
from torch import nn

from tahq.errors import ModelError
from tahq.models.config import ModelConfig
from tahq.models.deferred_gradients import DeferredGradients
from tahq.models.experts.expert_products import expert_outputs
from tahq.models.experts.load_balance import router_loss_of
from tahq.models.export import export_folder
from tahq.models.model_spec import ModelSpec, load_spec

from .conftest import SEQ_LEN, VOCAB_SIZE, build_all, logits_of, parameters_of, whole_model

CUTS = [(0, 4), (0, 2, 4), (0, 1, 2, 3, 4)]
every_family = pytest.mark.parametrize("family", EXPERTS)


def load(folder) -> ModelSpec:
    return load_spec(ModelConfig(path=str(folder)), vocab_size=VOCAB_SIZE, seq_len=SEQ_LEN)


def routed(tokens: int, experts: int, choices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices that leave the last experts without tokens, and their weights."""
    scores = torch.rand(tokens, experts - 2, generator=torch.Generator().manual_seed(1))
    weights, chosen = scores.topk(choices)
    return chosen, weights.requires_grad_()


@every_family
def test_outputs_and_gradients_are_those_of_transformers_loop(family, tiny_spec):
    (part,) = build_all(tiny_spec(family))
    module = next(each for each in part.modules() if type(each).__name__.endswith("Experts"))
    results = []
    for compute in (expert_outputs, type(module).forward):
        module.config._experts_implementation = "eager"
        hidden = torch.randn(9, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
        chosen, weights = routed(9, module.num_experts, 2)
        y = compute(module, hidden, chosen, weights)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)))
        results.append([y, hidden.grad, weights.grad, module.gate_up_proj.grad, module.down_proj.grad])
        module.gate_up_proj.grad = module.down_proj.grad = None
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert not results[0][3][-2:].any()  # no token chose them


def test_deferred_gradients_of_experts_have_the_bits_of_those_computed_at_once(tiny_spec, tokens):
    gradients = []
    for deferred in (None, DeferredGradients()):
        (part,) = build_all(tiny_spec("mixtral"))
        part.deferred = deferred
        nn.functional.cross_entropy(part(tokens).flatten(0, 1), tokens.flatten()).backward()
        if deferred is not None:
            assert part.get_parameter("model.layers.1.mlp.experts.down_proj").grad is None
            deferred.run()
        gradients.append({name: p.grad for name, p in part.canonical_parameters().items()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_equally_probable_experts_are_chosen_alike_whenever_a_block_is_computed(tiny_spec, tokens):
    results = []
    for checkpoint_blocks in (False, True):
        (part,) = build_all(tiny_spec("mixtral"))
        part.checkpoint_blocks = checkpoint_blocks
        for name, parameter in part.canonical_parameters().items():
            if name.endswith("mlp.gate.weight"):
                parameter.data.zero_()
        nn.functional.cross_entropy(part(tokens).flatten(0, 1), tokens.flatten()).backward()
        results.append({name: p.grad for name, p in part.canonical_parameters().items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_bf16_weights_of_routers_and_experts_get_fp32_gradients(tiny_spec, tokens, bf16):
    (part,) = build_all(tiny_spec("qwen3_moe"), matrices=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = part(tokens)
    nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
    for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        parameter = part.get_parameter(f"model.layers.1.mlp.{name}")
        assert (parameter.dtype, parameter.grad.dtype) == (torch.bfloat16, torch.float32)
        assert parameter.grad.any()


# -- the load-balancing loss --


@every_family
@pytest.mark.parametrize("bounds", CUTS, ids=str)
@pytest.mark.parametrize("checkpoint_blocks", [False, True], ids=["kept", "computed again"])
def test_pooled_loss_and_its_gradients_equal_transformers(family, bounds, checkpoint_blocks, tiny_spec, tokens):
    spec = tiny_spec(family, overrides={"router_aux_loss_coef": 0.5})
    slices, loss = build_all(spec, bounds), router_loss_of("pooled", spec)
    x, ends, balances = tokens, [], []
    for part in slices:
        part.checkpoint_blocks = checkpoint_blocks
        part.balance = loss.begin(tokens.numel(), 1.0, torch.device("cpu"))
        if balances:
            part.balance.sums = balances[-1].sums
        x = x.detach().requires_grad_() if x.is_floating_point() else x
        y = part(x)
        balances.append(part.balance)
        ends.append((x, y))
        x = y
    task = nn.functional.cross_entropy(x.flatten(0, 1), tokens.flatten())
    gradient = torch.autograd.grad(task, x, retain_graph=True)[0]
    for part, balance, (x, y) in list(zip(slices, balances, ends, strict=True))[::-1]:
        balance.totals = balances[-1].sums[0].clone()
        part.balance = loss.begin(tokens.numel(), 1.0, torch.device("cpu"))  # of another micro-batch
        y.backward(gradient)
        gradient = x.grad
        assert not part.balance.sums.any()

    model = whole_model(spec)
    model.load_state_dict({name: p.detach() for name, p in parameters_of(slices).items()}, strict=True)
    result = model(tokens, use_cache=False, output_router_logits=True)
    expected = nn.functional.cross_entropy(result.logits.flatten(0, 1), tokens.flatten()) + 0.5 * result.aux_loss
    expected.backward()
    assert float(balances[-1].value()) == pytest.approx(0.5 * float(result.aux_loss.detach()), rel=1e-6)
    gradients = {name: p.grad for name, p in parameters_of(slices).items()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7)


def test_loss_of_each_layer_alone_is_the_mean_of_transformers_losses(tiny_spec, tokens):
    spec = tiny_spec("qwen3_moe", overrides={"router_aux_loss_coef": 0.5})
    (part,) = build_all(spec)
    balance = part.balance = router_loss_of("per_layer", spec).begin(tokens.numel(), 1.0, torch.device("cpu"))
    part(tokens)
    model = whole_model(spec)
    model.load_state_dict({name: p.detach() for name, p in parameters_of([part]).items()}, strict=True)
    result = model(tokens, use_cache=False, output_router_logits=True)
    one = spec.layout.modeling().load_balancing_loss_func
    each = [float(one((logits.detach(),), 8, 3)) for logits in result.router_logits]
    assert len(each) == 3  # one block has no experts
    assert float(balance.value()) == pytest.approx(0.5 * sum(each) / 3, rel=1e-6)
    part.balance = None
    with torch.no_grad():
        part(tokens)


def test_loss_is_transformers_choice_unless_it_is_named(tiny_spec):
    assert router_loss_of("auto", tiny_spec("mixtral")) is None
    loss = router_loss_of("auto", tiny_spec("mixtral", overrides={"output_router_logits": True}))
    assert (loss.is_pooled, loss.num_layers, loss.num_sent) == (True, 4, (8, 4))
    assert router_loss_of("per_layer", tiny_spec("qwen3_moe")).num_sent == (0, 0)
    assert router_loss_of("none", tiny_spec("mixtral", overrides={"output_router_logits": True})) is None
    with pytest.raises(ModelError, match=r"training.router_aux_loss: pooled is for mixtures of experts, and llama"):
        router_loss_of("pooled", tiny_spec("llama"))


# -- files --


@every_family
@pytest.mark.parametrize("in_original_format", [True, False], ids=["of each expert", "stacked"])
def test_both_layouts_of_files_are_read_with_equal_logits(family, in_original_format, tiny_spec, tokens, tmp_path):
    torch.manual_seed(3)
    model = whole_model(tiny_spec(family))
    model.save_pretrained(tmp_path, max_shard_size="20KB", save_original_format=in_original_format)
    slices = build_all(load(tmp_path), (0, 1, 4))
    for name, parameter in parameters_of(slices).items():
        assert torch.equal(parameter, model.state_dict()[name]), name
    assert torch.equal(logits_of(slices, tokens), model.eval()(tokens).logits)


@every_family
def test_an_export_has_the_names_and_tensors_of_save_pretrained(family, tiny_spec, tmp_path):
    spec = tiny_spec(family)
    slices = build_all(spec)
    model = whole_model(spec)
    model.load_state_dict({name: p.detach() for name, p in parameters_of(slices).items()}, strict=True)
    model.save_pretrained(tmp_path / "theirs")
    export_folder(spec, parameters_of(slices).__getitem__, tmp_path / "ours", None)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert any(".experts.3." in name for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_files_without_an_expert_are_refused(tiny_spec, tmp_path):
    whole_model(tiny_spec("mixtral")).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.3.block_sparse_moe.experts.3.w2.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    build_all(load(tmp_path), (0, 3))
    with pytest.raises(ModelError, match=r"has 3 experts for model\.layers\.3\.mlp\.experts\.down_proj, .* expects 4"):
        build_all(load(tmp_path))


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("qwen3_moe", {"num_experts": 1}, "num_experts must be a whole number above 1, got 1"),
        ("mixtral", {"num_local_experts": 2**20}, "num_local_experts must be at most 1024, got 1048576"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok must be 1 to num_experts 8, got 9"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number above 0, got 0"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1 is noise that would depend on where"),
    ],
    ids=str,
)
def test_impossible_experts_are_refused_in_one_line(family, overrides, message, tiny_spec):
    with pytest.raises(ModelError, match=message) as caught:
        tiny_spec(family, overrides=overrides)
    assert "\n" not in str(caught.value)
