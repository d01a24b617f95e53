"""The product, its ids, and which points share a session or a network."""

from support.sweeps import small

from tahq_netem.sweep.points import by_network_kind, by_session, sweep_points


def ids(config):
    return [point.id for point in sweep_points(config)]


def test_every_combination_is_there_once():
    config = small(micro_batches=[1, 2], stages=[2, 4], compute=["real", "calibrated"], round_trips=[0.0, 0.05])
    points = sweep_points(config)
    assert len(points) == len({point.id for point in points}) == 2**6
    assert len({(point.session, point.network) for point in points}) == len(points)


def test_ids_depend_on_the_measurement_alone():
    # A change here makes users measure everything again: is it meant?
    assert ids(small())[:2] == ["70d09eee647d62e1", "59ffaac2d80d944b"]
    assert set(ids(small(rates=[20e6]))) < set(ids(small(rates=[100e6, 20e6, None], name="other", timeout=5.0)))
    base = set(ids(small()))
    for changes in (
        {"seq_len": 64},
        {"micro_batches": [1, 2]},  # durations are those of the first size
        {"global_batch": 16},
        {"compute": [{"forward": 0.01, "backward": 0.03}]},
        {"congestion_control": "bbr"},
        {"backend": "tun"},
        {"steps": {"at_least": 3, "at_most": 3}},
        {"faults": [{"step": 1, "link": "host0", "what": "rate", "to": "1mbit"}]},
        {"model": {"family": "gpt2", "num_layers": 4, "hidden_size": 128, "num_heads": 2}},
    ):
        assert not base & set(ids(small(**changes)))


def test_ids_change_with_the_profile_behind_a_name(tmp_path):
    path = tmp_path / "line.yaml"
    path.write_text("title: ours\nsource: [us]\nhost: {up: 20mbit, down: 100mbit}\n")
    config = small(profiles=[str(path)])
    before = ids(config)
    path.write_text("title: ours\nsource: [us]\nhost: {up: 20mbit, down: 50mbit}\n")
    after = ids(config)
    assert len(before) == len(after)
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 2


def test_sleep_is_scaled_to_micro_batch_and_share_of_the_model():
    config = small(micro_batches=[2, 4], stages=[2, 4])
    naps = {(p.session.stages, p.session.micro_batch): p.session.forward_s for p in sweep_points(config)}
    assert naps[2, 2] == (0.01, 0.01)
    assert naps[2, 4] == (0.02, 0.02)
    assert naps[4, 2] == (0.005,) * 4
    assert naps[4, 4] == (0.01,) * 4


def test_points_of_a_session_differ_in_the_network_alone():
    sessions = by_session(sweep_points(small(round_trips=[0.0, 0.05])))
    assert [len(points) for points in sessions.values()] == [4, 4]
    assert {key.wire for key in sessions} == {"raw:dtype=fp32", "tah / fixed:bits=6"}


def test_networks_are_shared_by_points_that_need_the_same():
    points = sweep_points(small(round_trips=[0.0, 0.05], stages=[2, 4]))
    kinds = by_network_kind(points)
    assert len(kinds) == 4
    for kind in kinds:
        assert len({(point.session.stages, point.network.round_trip_s) for point in kind}) == 1


def test_round_trip_is_halved_and_profiles_are_networks():
    points = sweep_points(small(rates=[1e8], round_trips=[0.05], profiles=["cable"]))
    plain, cable = points[0].network, points[1].network
    plan = plain.plan(2)
    assert plan.round_trip_s("host0", "host1") == 0.05
    assert plan.rate_bits_per_s("host0", "host1") == 1e8
    assert plain.label == "100 Mbit/s, 50ms"
    assert cable.label == "cable"
    assert cable.plan(2).rate_bits_per_s("host0", "host1") is not None
