"""The advice on a run's settings: the change with the largest simulated gain, and its command."""

import random
import re
import shlex
from dataclasses import replace
from itertools import permutations, product

import pytest
from support.runs import tiny

from tahq.config.cluster import ClusterConfig
from tahq.config.file import dump_yaml, load_config
from tahq.coordinator.observer import LinkRecord, StageRecord, StageSplit, StepRecord
from tahq.coordinator.schedule_choice import LEAST_GAIN, ScheduleChoice
from tahq.observe import figures
from tahq.pipeline.checkpoint.resume import compare_configs
from tahq.plan.prediction import predict
from tahq.plan.search.stages import all_divisions
from tahq.plan.search.table import ClusterTable
from tahq.quant import get_codec
from tahq_launch.plan.advice import advice
from tahq_launch.plan.problem import given_plan
from tahq_launch.plan.schedule_search import measured_run, schedule_search
from tahq_launch.start.resolution import resolve_for_run

pytestmark = pytest.mark.ci

SHAPE = (1, 256, 256)
ACTIVATIONS = ("raw:dtype=bf16", "fixed:bits=8", "wf:bits=6", "fixed:bits=6", "wf:bits=5", "tah", "wf:bits=4")
GRADIENTS = ("raw:dtype=bf16", "fixed:bits=8", "fixed:bits=6", "eden:bits=5", "eden:bits=4", "eden:bits=3")
CLOSE = 0.01
"""Differences that count as none, as shares of the step: of about equal plans the least extreme is named."""


class Run:
    """A resolved configuration, a step that it has measured, and the simulation of both, drawn from a seed."""

    def __init__(self, seed):
        draw = random.Random(seed)
        stages, micro_batches = draw.choice([2, 2, 2, 3, 3, 3, 4, 4, 5, 6]), draw.choice([2, 3, 4, 6])
        num_layers = draw.randint(stages, max(stages + 1, 7))
        cuts = sorted(draw.sample(range(1, num_layers), stages - 1))
        pipeline = {
            "stages": stages,
            "schedule": draw.choice(["auto", "1f1b", "gpipe", "zero-bubble"]),
            "layers": [end - begin for begin, end in zip([0, *cuts], [*cuts, num_layers], strict=True)],
        }
        depths = sorted((draw.randint(1, micro_batches) for _ in range(stages)), reverse=True)
        if pipeline["schedule"] != "gpipe" and draw.random() < 0.5:
            pipeline["in_flight"] = depths
        sections = tiny(
            model={"num_layers": num_layers, "hidden_size": 256, "num_heads": 4},
            data={"seq_len": 256},
            training={"global_batch": micro_batches, "micro_batch": 1},
            pipeline=pipeline,
            wire={
                "activations": draw.choice(["raw:dtype=fp32", *ACTIVATIONS]),
                "gradients": draw.choice(["raw:dtype=fp32", *GRADIENTS]),
            },
            emulate=draw.choice([{}, {"rate": "80mbit", "delay": "20ms"}]) if stages <= 4 else {},
        )
        hosts = draw.choice(["local", [{"address": f"h{stage}"} for stage in range(stages)]])
        self.config = resolve_for_run(ClusterConfig.model_validate(sections | {"hosts": hosts}))
        self.is_adapted = pipeline["schedule"] == "auto" and "in_flight" not in pipeline
        self.present = ScheduleChoice(self.config.pipeline.first_schedule, tuple(pipeline.get("in_flight", ())))
        if self.is_adapted:
            self.present = ScheduleChoice(draw.choice(["1f1b", "zero-bubble"]), tuple(depths))
        step = measured_step(self.config, self.present, draw)
        table, plan = measured_run(self.config, step, self.present, [0] * stages)
        self.now = predict(table, plan)
        hosts, stages = list(table.problem.cluster.hosts), list(step.stages)
        if draw.random() < 0.5:
            for stage, nbytes in enumerate(self.now.memory_nbytes):
                limit = int(draw.uniform(1.0, 1.6) * nbytes)
                hosts[stage] = hosts[stage].model_copy(update={"memory": limit})
                stages[stage] = replace(stages[stage], memory_bytes=limit)
        cluster = table.problem.cluster.model_copy(update={"hosts": hosts})
        self.table = ClusterTable(replace(table.problem, cluster=cluster))
        self.step = replace(step, step_time_s=1.1 * self.now.step_s, stages=tuple(stages))

    def step_s(self, config, choice=None):
        """Seconds of a step under another configuration; None: its stages do not fit the memory."""
        schedule, depths = choice or self.present
        plan = replace(given_plan(config, self.table.problem), schedule=schedule)
        depths = list(depths or range(plan.num_stages, 0, -1)) if schedule != "gpipe" else []
        while True:
            predicted = predict(self.table, replace(plan, depths=tuple(depths)))
            memory = zip(predicted.memory_nbytes, self.table.memory[list(plan.hosts)], strict=True)
            full = [stage for stage, (need, has) in enumerate(memory) if need > has]
            if not full:
                return predicted.step_s
            if choice or not self.is_adapted or not depths or depths[full[0]] == 1:
                return None
            least = depths[full[0]] - 1
            depths = [min(depth, least) if stage >= full[0] else depth for stage, depth in enumerate(depths)]

    def changed(self, section, **values):
        return self.config.model_copy(
            update={section: getattr(self.config, section).model_copy(update=values)} if section != "hosts" else values
        )


def measured_step(config, present, draw):
    """What a step shows where hosts and links are unlike."""
    stages, micro_batches = config.pipeline.stages, config.training.num_micro_batches
    records, links = [], []
    for stage, layers in enumerate(config.pipeline.layers):
        forward_s = micro_batches * layers * draw.choice([0.005, 0.01, 0.02, 0.04])
        split = StageSplit(
            forward_s=forward_s, backward_s=draw.uniform(1.5, 2.5) * forward_s, beside_s={"encode": 0.01}
        )
        records.append(StageRecord(stage, {}, 0, split))
    for cut in range(stages - 1):
        round_trip_s = 2 * draw.uniform(0.0, 0.15)
        for sender, receiver, direction in ((cut, cut + 1, "activations"), (cut + 1, cut, "gradients")):
            codec = getattr(config.wire, direction)
            nbytes = micro_batches * get_codec(codec).encoded_nbytes(SHAPE)
            wire_s = 8 * nbytes / 10 ** draw.uniform(7.3, 9.0)
            sizes = micro_batches, nbytes, nbytes, micro_batches * 256 * 256
            times = {"busy_s": wire_s, "sending_s": wire_s, "wire_s": wire_s, "round_trip_s": round_trip_s}
            links.append(LinkRecord(cut, sender, receiver, direction, *sizes, **times, codec=codec))
    schedule, depths = present
    return StepRecord(
        9, 1.0, 256, 1.0, 1.0, 1.0, False, False, tuple(records), tuple(links), schedule=schedule, in_flight=depths
    )


def shorter(present, usual, ladder):
    """A codec, and those of a ladder with shorter frames."""

    def nbytes(spec):
        return get_codec(spec).encoded_nbytes(SHAPE)

    return [present, *(spec for spec in ladder if nbytes(usual) <= nbytes(spec) < nbytes(present))]


def candidates(run, draw):
    """Seconds of a step under every single change that the run may make."""
    wire, stages = run.config.wire, run.config.pipeline.stages
    for layers in all_divisions(run.table.problem.model.num_layers, stages):
        yield run.step_s(run.changed("pipeline", layers=[int(each) for each in layers]))
    codecs = shorter(wire.activations, "wf", ACTIVATIONS), shorter(wire.gradients, "eden", GRADIENTS)
    for activations, gradients in product(*codecs):
        yield run.step_s(run.changed("wire", activations=activations, gradients=gradients))
    if isinstance(run.config.hosts, list):
        every = permutations(run.config.hosts) if run.config.emulate.delay else [run.config.hosts[::-1]]
        for hosts in every:
            yield run.step_s(run.changed("hosts", hosts=list(hosts)))
    if not run.is_adapted:
        yield run.step_s(run.config, ScheduleChoice("gpipe"))
        for _ in range(8):
            depths = sorted((draw.randint(1, 2 * stages) for _ in range(stages)), reverse=True)
            for schedule in ("1f1b", "zero-bubble"):
                yield run.step_s(run.config, ScheduleChoice(schedule, tuple(depths)))


def advised_s(run, sentence, path):
    """Seconds of a step if the advice is followed; None: it names no change."""
    if order := re.match("the hosts in the order (.*) would", sentence):
        by_name = {host.address: host for host in run.config.hosts}
        return run.step_s(run.changed("hosts", hosts=[by_name[name] for name in order[1].split(", ")]))
    if named := re.match("schedule ([a-z0-9-]+), in flight ([0-9 ]+|as usual), would", sentence):
        depths = () if named[2] == "as usual" else tuple(map(int, named[2].split()))
        return run.step_s(run.config, ScheduleChoice(named[1], depths))
    command = assignments(sentence)
    return run.step_s(overridden(run.config, command, path)) if command else None


def assignments(sentence):
    """The keys that a sentence says to set for a resumed run."""
    command = re.search("shorter: `--resume (.*)`$", sentence)
    return [word for word in shlex.split(command[1]) if word != "--set"] if command else []


def overridden(config, changes, path):
    path.write_text(dump_yaml(config))
    return load_config(path, changes)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.acceptance) for n in range(10, 200, 10))])
def test_advice_names_the_change_with_the_largest_gain(first, tmp_path):
    for seed in range(first, first + 10):
        run = Run(seed)
        sentence = advice(run.config, run.step)
        best_s = min(filter(None, candidates(run, random.Random(seed))), default=run.now.step_s)
        found_s = advised_s(run, sentence, tmp_path / "cluster.yaml")
        most, found = ((run.now.step_s - (each or run.now.step_s)) / run.step.step_time_s for each in (best_s, found_s))
        assert found >= most - (CLOSE if found_s else LEAST_GAIN + CLOSE), (
            f"{seed}: {most:.3f}, {found:.3f}: {sentence}"
        )
        assert (found >= LEAST_GAIN) == (found_s is not None) != sentence.startswith("no other setting")
        if found_s:
            assert f"would make steps {figures.share(found)} shorter" in sentence


@pytest.mark.acceptance
def test_resumed_run_takes_the_advice_and_finds_a_schedule_as_good(tmp_path):
    for seed in range(10):
        run = Run(seed)
        sentence = advice(run.config, run.step)
        changes = assignments(sentence)
        resumed = overridden(run.config, changes, tmp_path / "cluster.yaml")
        compare_configs(*(config.model_dump(mode="json") for config in (run.config, resumed))).check()
        if "pipeline.schedule=auto" in changes:
            memory = [stage.memory_bytes for stage in run.step.stages]
            found = schedule_search(resumed)([run.step], ScheduleChoice("1f1b"), memory)
            assert found.step_s <= (1 + CLOSE) * advised_s(run, sentence, None)


def slow_link(**sections):
    """Two stages over 1 Mbit/s, under a schedule and with codecs that could be better."""
    pipeline = {"stages": 2, "schedule": "gpipe", "layers": [1, 3]} | sections.pop("pipeline", {})
    emulate = {"rate": "1mbit", "delay": "100ms"} | sections.pop("emulate", {})
    config = resolve_for_run(ClusterConfig.model_validate(tiny(pipeline=pipeline, emulate=emulate, **sections)))
    return config, measured_step(config, ScheduleChoice(config.pipeline.first_schedule), random.Random(1))


FOLLOWED = {"activations": "wf", "gradients": "eden", "follow": True}
LEFT = {
    "nothing": (
        {"pipeline": {"schedule": "auto"}, "wire": FOLLOWED, "emulate": {"sleep": {"forward": 0.01, "backward": 0.02}}},
        r"no other",
    ),
    "layers": ({"pipeline": {"schedule": "auto"}, "wire": FOLLOWED}, "another division of the layers|no other"),
    "codecs": ({"pipeline": {"schedule": "auto"}}, "fewer bits"),
    "chunks": ({"pipeline": {"schedule": "interleaved", "chunks": 2, "layers": [1, 1, 1, 1]}}, "$"),
    "one stage": (
        {"pipeline": {"stages": 1, "schedule": "auto", "layers": [4]}},
        "no other setting .*hosts twice as fast",
    ),
}


@pytest.mark.parametrize(("sections", "sentence"), LEFT.values(), ids=LEFT.keys())
def test_advice_leaves_out_what_the_run_changes_itself_or_cannot_change(sections, sentence):
    assert re.match(sentence, advice(*slow_link(**sections)))
