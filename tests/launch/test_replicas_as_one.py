"""A run with replicas, as the planner sees it: one replica on the slowest hosts of each stage."""

from support.runs import tiny

from tahq.config.cluster import ClusterConfig
from tahq.plan.cluster_numbers import ClusterNumbers
from tahq_launch.plan.replicas import for_all_replicas, one_replica, slowest_replica


def host(name, seconds, memory, up):
    compute = [{"micro_batch": 2, "block_forward": seconds, "block_backward": 2 * seconds}]
    return {"name": name, "memory": memory, "up": up, "compute": compute}


def replicated():
    config = tiny(pipeline={"stages": 2, "replicas": 2}, model={"vocab_size": 256})
    hosts = [{"address": f"10.0.0.{n}"} for n in range(4)]
    return ClusterConfig.model_validate({**config, "hosts": hosts})


def test_slowest_figures_of_each_stage_count_whatever_the_order_of_the_file():
    numbers = ClusterNumbers.model_validate(
        {
            "hosts": [
                host("10.0.0.3", 0.4, 8, 1e6),
                host("10.0.0.0", 0.1, 9, 2e6),
                host("10.0.0.1", 0.3, 7, 4e6),
                host("10.0.0.2", 0.2, 6, 3e6),
            ],
            "paths": [
                {"source": "10.0.0.0", "target": "10.0.0.1", "rate": 5e6, "round_trip": 0.02},
                {"source": "10.0.0.2", "target": "10.0.0.3", "rate": 6e6, "round_trip": 0.05},
                {"source": "10.0.0.0", "target": "10.0.0.2", "rate": 1e3},
            ],
        }
    )
    one = slowest_replica(replicated(), numbers)
    assert [each.name for each in one.hosts] == ["10.0.0.0", "10.0.0.1"]
    assert [each.compute[0].block_forward for each in one.hosts] == [0.2, 0.4]
    assert [(each.memory, each.up) for each in one.hosts] == [(6, 2e6), (7, 1e6)]
    (path,) = one.paths
    assert (path.source, path.target, path.rate, path.round_trip) == ("10.0.0.0", "10.0.0.1", 5e6, 0.05)


def test_a_plan_of_one_replica_is_given_to_all():
    whole = replicated()
    alone = one_replica(whole)
    assert (alone.pipeline.replicas, alone.training.global_batch, len(alone.hosts)) == (1, 4, 2)
    planned = alone.model_copy(update={"training": alone.training.model_copy(update={"micro_batch": 1})})
    found = for_all_replicas(planned, whole)
    assert (found.pipeline.replicas, found.training.global_batch, found.training.micro_batch) == (2, 8, 1)
    assert found.hosts == whole.hosts
