"""What `networks.py` has to measure, and the file of what it has measured."""

import dataclasses
import json
import pathlib

import network_zoo as zoo

TARGETS = ("cpu", "v5e", "a100-40gb")
# Time comes last: it wants the machine for itself.
MEASURES = ("prediction", "process", "pool", *TARGETS, "gradients", "time")
# These need a plan.
_AGAINST_PLAIN = ("prediction", "time", "gradients")


@dataclasses.dataclass(frozen=True)
class Job:
    """One cell: a network under a plan, measured one way.

    Attributes:
        network: Its name in the zoo.
        plan: Name of the plan; "none" for the plain step.
        measure: What is measured.
        size: Name of its sizes in the zoo.
        batch_size: Other than that of the sizes; None for theirs.
    """

    network: str
    plan: str
    measure: str
    size: str
    batch_size: int | None = None

    @property
    def sizes(self):
        """What the zoo makes the network from."""
        sizes = dict(getattr(zoo.NETWORKS[self.network], self.size))
        if self.batch_size is not None:
            sizes["batch_size"] = self.batch_size
        return sizes

    @property
    def source(self):
        """The job that makes this one's plan, or None."""
        if self.plan == "none" or self.measure == "prediction":
            return None
        plan = "sqrt" if self.plan == "recompute_grad" else self.plan
        return Job(self.network, plan, "prediction", self.size)

    def __str__(self):
        batch = f", batch size {self.batch_size}" if self.batch_size else ""
        return f"{self.network}, {self.plan}, {self.measure}{batch}"


def size_of(measure):
    """Name of the sizes at which something is measured."""
    return "compile" if measure in TARGETS else "full"


def jobs_of(networks, plans, measures, size=None):
    """Returns the jobs to be done, in their order, each after its source."""
    found = {}

    def add(job):
        if job.source:
            found[job.source] = None
        found[job] = None

    ordered = [
        (network, measure)
        for network in dict.fromkeys(networks)
        for measure in MEASURES[:-1]
        if measure in measures
    ]
    ordered += [(network, "time") for network in networks if "time" in measures]
    for network, measure in ordered:
        for plan in dict.fromkeys(["none", *plans]):
            if plan == "recompute_grad" and (
                measure == "prediction" or not zoo.NETWORKS[network].chain
            ):
                continue
            if plan == "none" and measure in _AGAINST_PLAIN:
                continue
            if plan == "none" and measure in ("process", "pool"):
                add(Job(network, plan, measure, size or size_of(measure), 1))
            add(Job(network, plan, measure, size or size_of(measure)))
    return list(found)


class Results:
    """Records of finished jobs, in a file with one JSON object a line."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self._records = {}
        if self.path.exists():
            text = self.path.read_text(encoding="utf-8")
            for record in map(json.loads, text.splitlines()):
                self._keep(record)

    def _keep(self, record):
        job = Job(**record["job"])
        # A failure leaves what was measured before.
        if "error" not in record or not self._of(job):
            self._records[job] = record

    def _of(self, job):
        record = self._records.get(job)
        return record if record and "error" not in record else None

    def add(self, record):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self._keep(record)

    def value(self, job):
        """What the job found under today's plan and sizes, or None."""
        record = self._of(job)
        if not record or record["sizes"] != job.sizes:
            return None
        if job.source and record["digest"] != self.digest(job):
            return None
        return record["value"]

    def digest(self, job):
        """Identifies the plan of a job; None if it has none yet."""
        source = job.source and self.value(job.source)
        return source and source["digest"]

    def failures(self):
        """Jobs of which there is only an error, with that."""
        return [
            (job, record["error"])
            for job, record in self._records.items()
            if "error" in record
        ]

    def plan_path(self, job):
        """Where a job finds its plan, as `_follow` takes it."""
        if job.measure == "prediction":
            return str(self._plan_file(job))
        if not job.source:
            return None
        return f"{job.plan}={self._plan_file(job.source)}"

    def _plan_file(self, job):
        name = f"{job.network}-{job.size}-{job.plan}.json"
        return self.path.parent / f"{self.path.stem}-plans" / name
