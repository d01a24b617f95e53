"""Products in fp16: losses and skipped steps beside torch's GradScaler; the loss scale through faults and a resume."""

import pytest
import torch
from support.runs import Run, assert_same_run, launch, overrides, tiny, train
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from tahq import fault_points
from tahq.config.cluster import ClusterConfig
from tahq.data.batches import BatchSource
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.ci

STEPS = 10
SCALING = {"initial": 2.0**20, "growth_steps": 2}
"""Too high at first, and again every few steps."""
SIZES = {"n_layer": 4, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 256}


def config(**sections) -> dict:
    """Two stages that train the model in `hf` in fp16."""
    training = {"steps": STEPS, "precision": "fp16", "loss_scale": SCALING, **sections.pop("training", {})}
    run = {"checkpoint_every": 4, **sections.pop("run", {})}
    made = tiny(
        model={"path": "../hf"},
        data={"tokenizer": "bytes"},
        pipeline={"stages": 2, **sections.pop("pipeline", {})},
        training=training,
        run=run,
        **sections,
    )
    for key in ("family", "num_layers", "hidden_size", "num_heads"):
        del made["model"][key]
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model, and folders of runs beside it."""
    folder = tmp_path_factory.mktemp("fp16")
    torch.manual_seed(3)
    dropout = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    GPT2LMHeadModel(GPT2Config(**SIZES, **dropout, tie_word_embeddings=False)).save_pretrained(folder / "hf")
    return folder


@pytest.fixture(scope="module")
def calm(folder) -> Run:
    return train(folder / "calm", config())


def steps_of_grad_scaler(folder, config: ClusterConfig) -> list[tuple[float, float, bool]]:
    """Loss, scale, and whether the step was skipped, of a loop over transformers' model with torch's own scaler."""
    training, found = config.training, []
    batches = BatchSource(
        load_dataset(config.data, load_tokenizer(config.data)),
        seed=config.run.seed,
        global_batch=training.global_batch,
        micro_batch=training.micro_batch,
    )
    model = GPT2LMHeadModel.from_pretrained(folder / "hf", attn_implementation="sdpa").train()
    groups = [[p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]]
    decays = zip(groups, (training.weight_decay, 0.0), strict=True)
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in decays],
        *(training.lr, training.betas, training.epsilon),
    )
    scaling = training.loss_scale
    scaler = torch.amp.GradScaler("cpu", init_scale=scaling.initial, growth_interval=scaling.growth_steps)
    for step in range(STEPS):
        batch, loss, scale = batches.train(step), 0.0, scaler.get_scale()
        for number in range(training.num_micro_batches):
            tokens, labels = batch.micro_batch(number)
            with torch.autocast("cpu", torch.float16):
                logits = model(tokens, use_cache=False).logits
            flat = logits.float().flatten(0, 1)
            part = functional.cross_entropy(flat, labels.flatten(), reduction="sum") / batch.num_tokens
            loss += float(part.detach())
            scaler.scale(part).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((loss, scale, scaler.get_scale() < scale))
    return found


def scales(run: Run) -> list[tuple[float, bool]]:
    return [(row["loss_scale"], row["skipped"]) for row in run.metrics]


@pytest.mark.parametrize("initial", [pytest.param(2.0**40, marks=pytest.mark.acceptance), SCALING["initial"]])
def test_losses_scales_and_skipped_steps_are_those_of_grad_scaler(folder, initial, monkeypatch):
    made = config(training={"loss_scale": SCALING | {"initial": initial}, "steps": STEPS})
    run = train(folder / f"beside_{initial:g}", made)
    monkeypatch.chdir(run.folder.parents[1])
    expected = steps_of_grad_scaler(folder, ClusterConfig.model_validate(made))
    assert scales(run) == [(scale, skipped) for _, scale, skipped in expected]
    assert run.losses == pytest.approx([loss for loss, *_ in expected], abs=2e-3)


def test_overflow_is_no_alarm(calm):
    skipped = [row["step"] for row in calm.metrics if row["skipped"]]
    assert len(skipped) > 2
    assert f"step {skipped[0]}/{STEPS}" in calm.stdout
    assert "skipped: overflow in fp16  loss scale 1,048,576" in calm.stdout
    assert not (calm.folder / "non_finite").exists()
    assert all(torch.isfinite(tensor).all() for tensor in calm.snapshot().values())


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.acceptance), 4])
def test_bits_do_not_depend_on_the_cut(folder, calm, stages):
    run = train(folder / f"stages_{stages}", config(pipeline={"stages": stages, "schedule": "gpipe"}))
    assert (run.losses, scales(run)) == (calm.losses, scales(calm))
    assert [name for name, each in run.weights.items() if not torch.equal(each, calm.weights[name])] == []


@pytest.mark.acceptance
@pytest.mark.parametrize("fault", ["kill@backward:stage=1:step=5", "kill@prepared:stage=0:step=6"])
def test_killed_stage_goes_on_with_the_scale_of_its_step(folder, calm, monkeypatch, fault):
    place = folder / fault.replace(":", "_")
    (place / "faults").mkdir(parents=True)
    monkeypatch.setenv(fault_points.FAULTS, fault)
    monkeypatch.setenv(fault_points.FOLDER, str(place / "faults"))
    run = train(place, config())
    assert len(list((place / "faults").iterdir())) == 1
    assert_same_run(run, calm)
    assert scales(run) == scales(calm)


@pytest.mark.acceptance
def test_resumed_run_goes_on_with_the_scale_of_its_checkpoint(folder, calm):
    train(folder / "resumed", config(training={"steps": 6}))
    run = train(folder / "resumed", config(), "--resume", *overrides(f"training.steps={STEPS}"))
    assert_same_run(run, calm)
    assert scales(run) == scales(calm)


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"wire": {"activations": "wf:bits=4", "gradients": "eden:bits=3"}}, id="codecs"),
        *(
            pytest.param(sections, id=name, marks=pytest.mark.acceptance)
            for name, sections in {
                "replicas": {"pipeline": {"replicas": 2}},
                "agoq": {"memory": {"activations": "agoq", "gradients": "fp8"}},
                "offload": {"memory": {"offload": ["weights", "master", "gradients"], "recompute": "block"}},
                "adapter": {"adapter": {"rank": 4}, "training": {"lr": 1e-2}},
            }.items()
        ),
    ],
)
def test_overflow_is_skipped_under_other_options(folder, calm, sections):
    run = train(folder / f"option_{next(iter(sections))}_{len(str(sections))}", config(**sections))
    assert sum(row["skipped"] for row in run.metrics) >= 2
    assert sum(not row["skipped"] for row in run.metrics) > 2
    assert run.losses[0] == pytest.approx(calm.losses[0], abs=0.05)
    assert run.losses[-1] < run.losses[0]


def test_gradients_that_overflow_at_the_lowest_scale_end_the_run(folder):
    (folder / "diverged").mkdir()
    training = {"lr": 1e6, "clip_norm": None, "loss_scale": {"initial": 2.0}, "max_skipped_in_a_row": 1}
    run = launch(folder / "diverged", config(training=training))
    assert run.returncode == 5
    assert "at the lowest loss scale, 1" in run.stderr + run.stdout
