"""Every group gets a node, on as few nodes as were asked for, or nobody does."""

from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.scheduling.placement import GroupedGpus, NodeRoom, plan, story


def rooms(*gpus, cpus=200.0, kinds=()):
    return [
        NodeRoom(id=f"n{i}", address=f"10.0.0.{i}", gpus=free, cpus=cpus, kinds=frozenset(kinds[i : i + 1]))
        for i, free in enumerate(gpus)
    ]


def trainer(*groups, kind=None):
    return GroupedGpus(name="trainer", groups=groups, per_node=max(groups), cpus_per_gpu=3, kind=kind)


def replicas(*groups, per_node):
    return GroupedGpus(name="rollout", groups=groups, per_node=per_node, cpus_per_gpu=2)


def test_eight_train_and_eight_roll_out_on_a_node_each():
    assert plan(rooms(8, 8), [trainer(8), replicas(*[1] * 8, per_node=8)]) == (("n0",), ("n1",) * 8)


def test_sixteen_and_sixteen_in_replicas_of_four():
    placed = plan(rooms(8, 8, 8, 8), [trainer(8, 8), replicas(*[4] * 4, per_node=8)])
    assert placed == (("n0", "n1"), ("n2", "n2", "n3", "n3"))


def test_halves_share_a_node_and_leave_the_other_whole():
    assert plan(rooms(8, 8), [trainer(4), replicas(*[1] * 4, per_node=4)]) == (("n0",), ("n0",) * 4)


def test_a_larger_replica_goes_before_a_smaller_trainer():
    assert plan(rooms(8, 4), [trainer(4), replicas(8, per_node=8)]) == (("n1",), ("n0",))


def test_a_replica_over_two_nodes_gets_two():
    assert plan(rooms(8, 8, 8), [trainer(8), replicas(8, 8, per_node=8)]) == (("n0",), ("n1", "n2"))


def test_what_does_not_fit_as_asked_is_spread():
    """As verl has it: eight GPUs for replicas of one need not be those of one node."""
    placed = plan(rooms(8, 8), [trainer(4, 4), replicas(*[1] * 8, per_node=8)])
    assert placed is not None
    spread = plan(rooms(6, 6), [trainer(4), replicas(*[1] * 8, per_node=8)])
    assert spread is not None
    assert sorted(map(spread[1].count, ("n0", "n1"))) == [2, 6]


def test_cpus_and_kinds_count():
    assert plan(rooms(8, cpus=23), [trainer(8)]) is None
    assert plan(rooms(8, cpus=24), [trainer(8)]) is not None
    assert plan(rooms(8, 8, kinds=("A100", "H100")), [trainer(8, kind="H100")]) == (("n1",),)
    assert plan(rooms(8, 8), [trainer(8, kind="H100")]) is None


def test_the_story_names_what_was_asked_and_what_each_node_has():
    told = story(rooms(8, 3), [trainer(8, kind="H100"), replicas(4, 4, per_node=8)])
    assert told == (
        "asked for trainer: 1 x 8 GPUs on one node each, 3 CPUs per GPU, H100; rollout: 2 x 4 GPUs on one node each, "
        "2 CPUs per GPU. Nodes have free: 10.0.0.0 8 GPUs, 200 CPUs; 10.0.0.1 3 GPUs, 200 CPUs"
    )


sizes = st.lists(st.integers(1, 8), min_size=1, max_size=4)


@given(free=st.lists(st.integers(0, 8), min_size=1, max_size=5), train=sizes, rollout=sizes, per_node=st.integers(1, 8))
def test_no_node_is_promised_twice(free, train, rollout, per_node):
    nodes = rooms(*free, cpus=24.0)
    asked = [trainer(*train), replicas(*rollout, per_node=per_node)]
    placed = plan(nodes, asked)
    if placed is None:
        return
    for room in nodes:
        taken = [
            (size, entry.cpus_per_gpu)
            for entry, chosen in zip(asked, placed, strict=True)
            for size, node in zip(entry.groups, chosen, strict=True)
            if node == room.id
        ]
        assert sum(size for size, _ in taken) <= room.gpus
        assert sum(size * cpus for size, cpus in taken) <= room.cpus
