"""Memory and time of well-known networks under tfckpt's plans.

For each network and plan (`none`, `sqrt`, `min_memory`, budgets of activation
memory such as `budget.55`, and the peers `chen` and `recompute_grad`):

- prediction: what `tfckpt`'s planner expects of the plan.
- process: how far the process rises in a warm graph step without XLA, which
  applies its gradients by SGD with momentum, less the same of the plain step
  at batch size 1. The ratio to the plain step's is what the bars are about.
  As one example's activations are taken off with the rest, "peak" adds them
  again, by a line through the plain step's two figures: that is predicted.
  TensorFlow's pool is off, as it would keep and fragment what was freed.
  "with graph" is the ratio of peaks above inputs and weights, tracing and
  graph included, and
- pool: the same with TensorFlow's pool, as users have it.
- cpu, v5e, a100-40gb: temporaries of the step as compiled for them, which
  returns its gradients, at smaller images; for XLA:CPU everything less twice
  the weights.
- time: seconds of plain steps and ours by turns in one process.
- gradients: largest difference from the plain model's in one graph step, in
  eps of float32 times the largest gradient; with oneDNN and Grappler off, which
  fuse ops of the two graphs differently.

    python benchmarks/networks.py --network=u_net --plan=sqrt
    nice python benchmarks/networks.py --measure=prediction,process
    python benchmarks/networks.py --table --markdown

Each figure comes from a fresh process and is appended to --results at once.
What is there already is not measured again: stop it and go on as you like.
Time wants a machine with nothing else to do.
"""

import dataclasses
import os
import pathlib
import platform
import sys
import time

import keras
import network_results as results_lib
import network_steps as steps
import network_tables as tables
import network_zoo as zoo
import rich.console
import rich.markup
import rich.progress
import tensorflow as tf
from absl import app, flags

import tfckpt
from tfckpt import memory


def define_flags(values=flags.FLAGS):
    options = {"flag_values": values}
    folder = pathlib.Path(__file__).parent
    for name, known, default, what in (
        ("network", zoo.NETWORKS, zoo.NETWORKS, "What is trained."),
        (
            "plan",
            None,
            ("none", *zoo.OURS, *zoo.PEERS),
            "How; also budget.30, keep.Conv2D+Dense and the like.",
        ),
        (
            "measure",
            results_lib.MEASURES,
            results_lib.MEASURES,
            "What is measured.",
        ),
    ):
        flags.DEFINE_list(name, list(default), what, **options)
        flags.register_validator(
            name,
            lambda names, known=known: (
                names and all(known is None or each in known for each in names)
            ),
            f"must be some of {', '.join(known or default)}",
            flag_values=values,
        )
    flags.register_validator(
        "plan",
        lambda names: all(map(zoo.is_plan, names)),
        "must be names of plans",
        flag_values=values,
    )
    flags.DEFINE_string(
        "results",
        str(folder / "results" / "networks.jsonl"),
        "Figures are appended to this file; plans lie in a folder beside it.",
        **options,
    )
    flags.DEFINE_enum(
        "size", None, ["full", "compile", "tiny"], "One for all.", **options
    )
    for name, default, what in (
        ("repeats", 1, "Processes for each figure of process memory."),
        ("rounds", 5, "Rounds of timing, in one process."),
        ("timeout", 7200, "Seconds after which a measurement is given up."),
    ):
        flags.DEFINE_integer(name, default, what, lower_bound=1, **options)
    for name, what in (
        ("again", "Measure also what is there already."),
        ("table", "Measure nothing, only print what is there."),
        ("markdown", "Print tables for a README."),
    ):
        flags.DEFINE_boolean(name, False, what, **options)


# Fusing changes the rounding of the plain step and ours in different places.
_UNFUSED = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_NUM_INTEROP_THREADS": "1"}
# With oneDNN, TensorFlow's tensors come from a pool that gives nothing back
# and has gaps. This makes each a block of its own.
_NO_POOL = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}


def _fresh(function, *args, timeout, environment=None):
    return memory.measure_in_process(
        f"{steps.__file__}:{function}",
        *args,
        timeout=timeout,
        environment=environment,
    )


def measure(job, path, *, repeats, rounds, timeout):
    """Does a job and returns its value."""
    run = {"timeout": timeout}
    subject = job.network, job.sizes
    if job.measure == "prediction":
        return _fresh("make_plan", *subject, job.plan, path, **run)
    if job.measure in ("process", "pool"):
        if job.measure == "process":
            run["environment"] = _NO_POOL
        found = [
            _fresh("process_peak", *subject, path, **run)
            for _ in range(repeats)
        ]
        return {name: [each[name] for each in found] for name in found[0]}
    if job.measure == "time":
        return _fresh("step_seconds", *subject, path, rounds, **run)
    if job.measure == "gradients":
        run["environment"] = _UNFUSED
        return _fresh("unfused_difference", *subject, path, **run)
    return _fresh("compiled", *subject, path, job.measure, **run)


def run(jobs, results, console, *, again, **options):
    """Does what is missing, one job after another."""
    versions = {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tfckpt": tfckpt.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }
    asked = set(again)
    columns = (
        rich.progress.TextColumn("{task.completed:.0f} of {task.total:.0f}"),
        rich.progress.BarColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.description}"),
    )
    with rich.progress.Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(task, description=str(job))
            # Figures may have come without the files of their plans.
            lost = (
                job.measure == "prediction"
                and not pathlib.Path(results.plan_path(job)).exists()
            )
            if job in asked or lost or results.value(job) is None:
                outcome = _done(job, results, versions, options)
                progress.console.print(
                    f"{job}: {rich.markup.escape(outcome)}", highlight=False
                )
            progress.advance(task)


def _done(job, results, versions, options):
    """Does a job, keeps its record and returns how it went."""
    if job.source and not results.digest(job):
        return "skipped, as its plan could not be made"
    record = _record(job, results, versions, options)
    results.add(record)
    outcome = "done"
    if "error" in record:
        outcome = f"failed: {record['error'].strip()[-500:]}"
    return f"{record['seconds']:.0f} s, {outcome}"


def _record(job, results, versions, options):
    record = {
        "job": dataclasses.asdict(job),
        "sizes": job.sizes,
        "digest": results.digest(job),
        "versions": versions,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    start = time.perf_counter()
    try:
        path = results.plan_path(job)
        record["value"] = measure(job, path, **options)
    except (memory.MeasurementError, NotImplementedError) as error:
        record["error"] = str(error)
    return record | {"seconds": round(time.perf_counter() - start, 1)}


def main(options):
    console = rich.console.Console()
    results = results_lib.Results(options.results)
    chosen = options.network, options.plan
    interrupted = False
    if not options.table:
        jobs = results_lib.jobs_of(*chosen, options.measure, options.size)
        again = [job for job in jobs if job.measure in options.measure]
        try:
            run(
                jobs,
                results,
                console,
                again=again if options.again else (),
                repeats=options.repeats,
                rounds=options.rounds,
                timeout=options.timeout,
            )
        except KeyboardInterrupt:
            interrupted = True
            console.print(f"Stopped. What is done is in {results.path}.")
    tables.show(
        results,
        *chosen,
        console,
        markdown=options.markdown,
        size=options.size,
    )
    if interrupted:
        sys.exit(130)


if __name__ == "__main__":
    define_flags()
    app.run(lambda argv: main(flags.FLAGS))
