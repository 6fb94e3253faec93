"""Title and explanation of every section, for readers who never saw the project."""

TITLES = {
    "timeline": "What was learned, and what was asked to be forgotten?",
    "accuracy": "How well is every task read?",
    "old-head": "Can the old classifier still read what was forgotten?",
    "jsd": "How far is it from a model that never saw the tasks?",
    "relapse": "Does what was forgotten come back?",
    "few_shot": "How much of it do a few samples bring back?",
    "membership": "Can one guess which samples were trained on?",
    "difference": "What did it cost the other tasks?",
    "transfer": "What else was forgotten, unasked?",
    "capacity": "Does the room come back?",
    "owners": "Who owns what?",
    "overlap": "Who shares with whom?",
    "distances": "Other distances",
    "cost": "How long does a request take, and how long retraining?",
    "settings": "Settings and versions",
}
"""Section → title."""

LEADS = {
    "timeline": "The network learned these tasks one after another. A request asks it to unlearn tasks: ✕.",
    "accuracy": """\
A row per moment, a column per task, dark where the task is read well. Framed cells are unlearned tasks, read
through the classifier they had: near the retrained model's reading (retr.) and chance is good.""",
    "old-head": """\
An unlearned task's own classifier, kept by the evaluation alone, reads its test data at the end of the stream. What
it reads beyond the retrained model is a trace of the task, where tasks and seeds agree. Means that differ by up to 5
points count as the same.""",
    "jsd": """\
JSD, the Jensen–Shannon divergence, compares the features of the forgotten tasks' data in this model and in the
retrained one: 0 bit is equal, 1 bit is the most there can be. Two retrained models differ too: that is the floor,
for another data order and for another seed. Read JSD in units of the order floor: 1 × is as far as retraining in
another order. The seed's floor is wider, and flatters.

A known limitation: small residues are invisible to JSD. In a test on permuted images (five seeds) a fifth of a
forgotten update, put back, left JSD at its order floor (1.00 ×), and the old head near the retrained model's (0.9
points above), while a head fitted to five samples per class read 34 points more than there. Features of two networks
have two scales: compare a strategy with its floors, not with another strategy.""",
    "relapse": """\
A new linear classifier is trained on the model's features of the forgotten tasks' data, after every later task.
Features are useful in general, so that the retrained model's are read as well: what counts is the difference.""",
    "few_shot": """\
The same with a few samples of every class, the same for this model and for the retrained one. Many samples make up
for features that never saw a task; a few do not.""",
    "membership": """\
Membership inference by the loss of the old head: the area under the curve (AUC) is 0.5 for guessing. Where it is
near 0.5 for models that did learn the task, this attack is no evidence of forgetting.""",
    "difference": """\
AD, the accuracy difference: accuracy on the remaining tasks minus that of the same method where it ignored every
request. Below 0 is a loss, above 0 a gain. The control is what the model that ignored every request gains when its
heads are fitted anew and nothing is unlearned: only what AD has beyond it is due to the unlearning.""",
    "transfer": """\
Accuracy that remaining tasks lost since their best moment (average forgetting, 0 is none), and what they gained
since they were learned (backward transfer), at the end of the stream.""",
    "capacity": """\
Network capacity: how free the network's parameters are for the next task. Learning takes some of it, a request
gives back what the forgotten tasks alone had used. Only methods with masks have it.""",
    "owners": """\
Share of each layer that one remaining task alone uses, that several share, and that are free; before and after a
request, in the run of the first seed.""",
    "overlap": """\
What two remaining tasks both use, as a share of what either uses (intersection over union of their masks), in the
run of the first seed. The more is shared, the more an unlearning moves.""",
    "distances": "Distances between the same features as JSD, each with its own floors where they were measured.",
    "cost": "Wall-clock time on the machine of the run; each step to the right is ten times as long.",
    "settings": "",
}
"""Section → how to read it; an empty line begins a paragraph."""
