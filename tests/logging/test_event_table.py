"""Table of events and the values of each event."""

from avalanche_amnesia.audit.record import UnlearningPlan, UnlearningRecord
from avalanche_amnesia.logging.event_table import EventTable


def by_column(table: EventTable) -> list[dict]:
    made = table.table()
    return [dict(zip(made.columns, row, strict=True)) for row in made.rows]


def test_a_value_belongs_to_the_event_before_it_and_the_last_value_counts():
    table = EventTable()
    table.take("Capacity", 1.0, "event")
    assert not table.changed
    assert table.table().rows == ()
    table.trained(1, 3, (3,))
    table.take("Capacity", 0.9, "event")
    table.take("Capacity", 0.8, "event")
    table.trained(2, 0, (3, 0))
    table.take("JSD_own/eval_phase/test_stream", 0.1, "event")
    first, second = by_column(table)
    assert (first["Capacity"], first["JSD_own"]) == (0.8, None)
    assert (second["Capacity"], second["JSD_own"]) == (None, 0.1)


def test_accuracy_is_the_mean_over_the_remaining_tasks():
    table = EventTable()
    table.unlearned(1, 2, None)
    table.trained(2, 2, (0, 2))
    name = "Top1_Acc_Exp/eval_phase/test_stream/Task{0:03d}/Exp{0:03d}"
    for task, accuracy in ((0, 0.8), (1, 0.1), (2, 0.6), (0, 0.9)):
        table.take(name.format(task), accuracy, "task")
    table.take("Top1_Acc_Exp/eval_phase/train_stream/Task002/Exp002", 1.0, "task")
    assert [row["accuracy"] for row in by_column(table)] == [None, 0.75]


def test_values_of_one_task_of_one_layer_or_of_another_axis_have_no_column():
    table = EventTable()
    table.trained(1, 0, None)
    for name, axis in (("JSD_own/eval_phase/test_stream/Task000", "event"), ("MaskUse/l.1", "event"), ("Loss", "task")):
        table.take(name, 0.5, axis)
    empty = dict.fromkeys(("unlearned", "remaining", "affected", "claim", "accuracy"))
    assert by_column(table) == [empty | {"event": 1, "what": "trained", "task": 0}]
    assert not table.changed


def test_unlearned_samples_are_described_in_words():
    nothing = dict.fromkeys(("removed", "affected", "compensated", "purges", "unpurged"), ())
    request = {"tasks": (), "event": "after task 3", "task": 1, "samples": ("a", "b"), "classes": (0,)}
    plan = UnlearningPlan(**request, **nothing, entries={}, shared={}, claim="exact", trajectory_bytes=0)
    table = EventTable()
    table.unlearned(4, 3, UnlearningRecord(plan, (), (), (0, 1, 2, 3), 4, 80, 0.1))
    (row,) = by_column(table)
    assert (row["unlearned"], row["remaining"]) == ("2 samples of task 1 (all of classes 0)", "0, 1, 2, 3")
