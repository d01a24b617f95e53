"""The probe of a small model: exact where nothing is lost, ordered by bits, and without influence on the training."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support.plain_loop import PlainModel, train_plainly
from support.runs import tiny

from tahq.config.cluster import ClusterConfig
from tahq.coordinator.steps import clip_factor, global_norm
from tahq.data.batches import BatchSource
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.errors import NonFiniteError
from tahq.pipeline.cut_model import CutModel, ProbedWire
from tahq.pipeline.gradient_probe import ErrorSums, GradientProbe, StepErrors, WireResult, collect, compare
from tahq.pipeline.update import StageUpdate

CONFIG = ClusterConfig.model_validate(
    tiny(
        model={"num_layers": 2, "hidden_size": 32, "vocab_size": 256, "dropout": 0.1},
        pipeline={"stages": 2},
        training={"steps": 3, "clip_norm": 0.5},
    )
)
RAW = "raw:dtype=fp32"


class Bench:
    """A probe of the small model with everything it needs."""

    def __init__(self, *wires: ProbedWire) -> None:
        training = CONFIG.training
        self.wires = wires
        self.model = CutModel(PlainModel(CONFIG, cut=True).slices, seed=CONFIG.run.seed)
        self.batches = BatchSource(
            load_dataset(CONFIG.data, load_tokenizer(CONFIG.data)),
            seed=CONFIG.run.seed,
            global_batch=training.global_batch,
            micro_batch=training.micro_batch,
        )
        self._update = StageUpdate(training, self.model.parameters, self.model.is_decayed, training.steps)
        self.num_gradients = 0
        self.probe = GradientProbe(self.model, self.batches, wires, self._step, self._count)

    def run(self, steps: int, batches: int) -> list[WireResult]:
        return collect(self.wires, [self.probe.probe(step, batches) for step in range(steps)])

    def _step(self, step: int) -> None:
        norm = global_norm(self._update.squared_norms())
        self._update.apply(step, clip_factor(norm, CONFIG.training.clip_norm))

    def _count(self) -> None:
        self.num_gradients += 1


def test_lossless_codecs_have_no_error_at_all():
    (result,) = Bench(ProbedWire(RAW, RAW)).run(2, 2)
    assert result.step_errors == [0.0] * 4
    assert result.expectation_errors == [0.0, 0.0]
    assert result.noiseless_expectation_error() == 0.0
    assert result.cosines == [1.0] * 4
    assert result.delta == 1.0


@pytest.mark.parametrize("direction", ["activations", "gradients"])
def test_errors_fall_with_the_bits_down_to_almost_nothing(direction):
    wires = [ProbedWire(**{direction: f"fixed:bits={bits}"}) for bits in (2, 3, 4, 6, 8, 16)]
    results = Bench(*wires).run(1, 1)
    errors = [result.step_errors[0] for result in results]
    assert errors == sorted(errors, reverse=True)
    # each further bit halves the step, so quarters the squared error: 2 to 8 bits are 6 of them, 2 to 16 14
    assert errors[4] < errors[0] / 4**4
    assert 0 < errors[5] < errors[0] / 4**10


def test_errors_are_those_of_gradients_compared_by_hand():
    wire, bench = ProbedWire("tah", "fixed:bits=4"), Bench(ProbedWire("tah", "fixed:bits=4"))
    model, g, compressed = Bench().model, {}, {}
    for total, used in ((g, ProbedWire()), (compressed, wire)):
        for step in (0, 1):
            model.compute_gradients(bench.batches.train(step), step, used)
            total[step] = torch.cat([p.grad.flatten().double() for p in model.parameters.values()])
    (result,) = bench.run(1, 2)
    relative = [float((compressed[step] - g[step]).square().sum() / g[step].square().sum()) for step in (0, 1)]
    # the probe subtracts in fp32, where an error of 1e-2 has five digits
    assert result.step_errors == pytest.approx(relative, rel=1e-4)
    g_mean, mean = g[0] + g[1], compressed[0] + compressed[1]
    assert result.expectation_errors == pytest.approx([float((mean - g_mean).square().sum() / g_mean.square().sum())])


@pytest.mark.parametrize("batches", [1, 3])
def test_training_is_what_it_would_be_without_the_probe(batches):
    bench = Bench(ProbedWire("tah", "fixed:bits=4"), ProbedWire("fixed:bits=2", RAW))
    before = train_plainly(CONFIG, cut=False)
    bench.probe.train(0)
    results = [bench.probe.probe(step, batches) for step in (1, 2)]
    assert bench.num_gradients == 1 + 2 * batches * 3
    assert [step.loss for step in results] == pytest.approx(before.losses[1:], rel=1e-12)
    different = [name for name, p in bench.model.parameters.items() if not torch.equal(p, before.weights[name])]
    assert different == []


def test_unbiased_errors_average_out_over_batches():
    """Backward is linear in the gradient that crosses a cut, so a codec that is unbiased there stays so in weights."""
    wire = ProbedWire(gradients="fixed:bits=3,round=stochastic")
    (result,) = Bench(wire).run(2, 8)
    assert max(result.expectation_errors) < min(result.step_errors) / 2
    assert result.noiseless_expectation_error() < max(result.expectation_errors) / 4


def test_only_what_lies_behind_a_cut_is_wrong_if_gradients_are_coded():
    (result,) = Bench(ProbedWire(gradients="fixed:bits=4")).run(1, 1)
    groups = result.by_group()
    assert list(groups) == ["embedding", "stage 0", "stage 1", "head"]
    assert groups["stage 1"].error == groups["head"].error == 0.0
    assert groups["embedding"].error > 0
    assert groups["stage 0"].error > 0


def test_one_batch_gives_no_expectation():
    (result,) = Bench(ProbedWire("tah", RAW)).run(2, 1)
    assert len(result.step_errors) == 2
    assert result.expectation_errors == []
    assert result.keeps_expectation_limit is None
    assert result.noiseless_expectation_error() is None


def test_gradients_that_are_not_finite_without_codecs_end_the_probe():
    bench = Bench(ProbedWire("tah", RAW))
    with torch.no_grad():
        next(iter(bench.model.parameters.values())).fill_(math.inf)
    with pytest.raises(NonFiniteError, match=r"step 0: .*without any codec"):
        bench.run(1, 1)


# -- errors as sums --------------------------------------------------------------------------------

VECTORS = arrays.arrays("float32", st.integers(1, 12), elements=st.floats(-1e3, 1e3, width=32))


def sums(g: list[float], compressed: list[float]) -> ErrorSums:
    reference, other = torch.tensor(g), torch.tensor(compressed)
    return compare({"w": reference}, {"w": other - reference})


@given(VECTORS, st.data())
@settings(deadline=None)
def test_figures_are_those_of_the_vectors(g, data):
    other = data.draw(arrays.arrays("float32", g.shape, elements=st.floats(-1e3, 1e3, width=32)))
    measured = compare({"w": torch.from_numpy(g)}, {"w": torch.from_numpy(other - g)})
    g64, other64 = g.astype("float64"), g.astype("float64") + (other - g).astype("float64")
    lengths = math.sqrt(g64 @ g64) * math.sqrt(other64 @ other64)
    if (other - g).any() and g.any():
        assert measured.relative == pytest.approx(((other64 - g64) @ (other64 - g64)) / (g64 @ g64), rel=1e-12)
    if lengths > 1e-3:
        # |ĝ|² comes from three sums of up to 1e7, each rounded at 1e-16 of it
        assert measured.cosine == pytest.approx(g64 @ other64 / lengths, abs=1e-6)


@pytest.mark.parametrize(
    ("g", "compressed", "relative", "cosine"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 1.0),
        ([3.0, 4.0], [3.0, 5.0], 0.04, 29 / (5 * math.sqrt(34))),
        ([1.0, 0.0], [0.0, 0.0], 1.0, 0.0),
        ([1.0, 2.0], [-1.0, -2.0], 4.0, -1.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0, 1.0),
        ([0.0, 0.0], [1.0, 0.0], math.inf, 0.0),
        ([1.0, 2.0], [math.inf, 2.0], math.inf, math.nan),
        ([1.0, 2.0], [math.nan, 2.0], math.inf, math.nan),
    ],
)
def test_extremes(g, compressed, relative, cosine):
    measured = sums(g, compressed)
    assert measured.relative == relative
    assert measured.cosine == pytest.approx(cosine, nan_ok=True)


# -- what follows from measurements ---------------------------------------------------------------


def measured(errors: list[float], mean: float | None = None, signal: float = 1.0) -> StepErrors:
    """A step whose batches have these relative errors, and their sum that one."""
    count = len(errors)
    batches = tuple({"all": ErrorSums(signal, error * signal, 0.0)} for error in errors)
    total = None if mean is None else {"all": ErrorSums(count**2 * signal, mean * count**2 * signal, 0.0)}
    return StepErrors(0, batches, total)


def test_limits_are_the_papers():
    result = WireResult(ProbedWire(), (measured([0.39, 0.2], 0.09),))
    assert result.keeps_step_limit
    assert result.keeps_expectation_limit
    assert result.delta == pytest.approx(0.61)
    worse = WireResult(ProbedWire(), (measured([0.39, 0.41], 0.11),))
    assert not worse.keeps_step_limit
    assert worse.keeps_expectation_limit is False


def test_what_is_not_finite_keeps_no_limit():
    result = WireResult(ProbedWire(), (measured([0.1, math.nan], math.nan),))
    assert not result.keeps_step_limit
    assert result.keeps_expectation_limit is False
    assert result.delta == -math.inf
    assert result.noiseless_expectation_error() is None


def test_noise_is_taken_out_of_the_expectation():
    """Vectors v_b = c + n_b with independent n_b: ‖Σ v‖² has M²‖c‖² + M·E‖n‖², and the estimate ‖c‖²."""
    draws, size, batches = 40, 500, 4
    generator = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(draws):
        e = 0.1 + torch.randn(batches, size, generator=generator)
        g = torch.ones(batches, size)
        sums = [ErrorSums(float(a.dot(a)), float(b.dot(b)), float(a.dot(b))) for a, b in zip(g, e, strict=True)]
        a, b = g.sum(0), e.sum(0)
        mean = ErrorSums(float(a.dot(a)), float(b.dot(b)), float(a.dot(b)))
        steps.append(StepErrors(0, tuple({"all": s} for s in sums), {"all": mean}))
    result = WireResult(ProbedWire(), tuple(steps))
    # 240 pairs of vectors of 500: the estimate's spread is about √(2·500)/√240/500 < 0.005 around 0.1² = 0.01
    assert result.noiseless_expectation_error() == pytest.approx(0.01, abs=0.01)
    assert max(result.expectation_errors) > 0.2
