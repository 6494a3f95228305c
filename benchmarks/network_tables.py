"""The tables of `networks.py`, and its bars held against the figures."""

import dataclasses
import itertools
import math
import re
import statistics
from typing import Any

import network_results as results_lib
import network_zoo as zoo
import numpy as np
import rich.console
import rich.table

_MIB = 2**20
_EPS = float(np.finfo(np.float32).eps)
_GRADIENT_BAR = 32
# Of the predicted peak: median, worst.
_ERROR_BARS = (0.10, 0.25)


@dataclasses.dataclass(frozen=True)
class Row:
    """What is known of a network under a plan; None where it is not.

    Attributes:
        network: Its name.
        plan: Name of the plan.
        memory: Process memory in bytes, less a plain step's on one example.
        ratio: The same relative to the plain step.
        cold_ratio: The ratio with the memory of the graph.
        pool_ratio: The ratio with the graph, in TensorFlow's pool.
        peak: Process memory in bytes, less a plain step's on no example.
        predicted: What the planner expects of `peak`.
        predicted_ratio: The same relative to the plain step.
        time: Median, lowest and highest time relative to plain steps.
        predicted_time: What the planner expects of it.
        flops: Operations relative to a plain step.
        gradients: Largest difference in eps of the largest gradient.
        compiled: Bytes and ratio by compiler.
    """

    network: str
    plan: str
    memory: float | None = None
    ratio: float | None = None
    cold_ratio: float | None = None
    pool_ratio: float | None = None
    peak: float | None = None
    predicted: float | None = None
    predicted_ratio: float | None = None
    time: tuple[float, float, float] | None = None
    predicted_time: float | None = None
    flops: float | None = None
    gradients: float | None = None
    compiled: dict[str, tuple[float, float]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def error(self):
        """Error of the predicted peak, relative to the measured one."""
        if not self.peak or not self.predicted:
            return None
        return self.predicted / self.peak - 1


class _Cells:
    """The results of one network under one plan."""

    def __init__(self, results, network, plan, size):
        self._results = results
        self._network = network
        self._plan = plan
        self._size = size

    def job(self, measure, plan=None, batch_size=None):
        size = self._size or results_lib.size_of(measure)
        return results_lib.Job(
            self._network, plan or self._plan, measure, size, batch_size
        )

    def value(self, measure, plan=None, batch_size=None):
        return self._results.value(self.job(measure, plan, batch_size))

    def memory(self, measure, figure):
        """Bytes less those of one example, their ratio, less those of none."""
        found = (
            self.value(measure),
            self.value(measure, "none"),
            self.value(measure, "none", 1),
        )
        if not all(found):
            return None, None, None
        ours, plain, floor = (statistics.median(f[figure]) for f in found)
        others = self.job(measure).sizes["batch_size"] - 1
        return (
            ours - floor,
            _ratio(ours - floor, plain - floor),
            ours - floor + (plain - floor) / max(1, others),
        )


def row_of(results, network, plan, size=None):
    """Returns what the results say of a network under a plan."""
    cells = _Cells(results, network, plan, size)
    found: dict[str, Any] = {}
    found["memory"], found["ratio"], found["peak"] = cells.memory(
        "process", "warm"
    )
    found["cold_ratio"] = cells.memory("process", "cold")[1]
    found["pool_ratio"] = cells.memory("pool", "cold")[1]
    if seconds := cells.value("time"):
        pairs = zip(seconds["ours"], seconds["plain"], strict=True)
        ratios = [ours / plain for ours, plain in pairs]
        found["time"] = statistics.median(ratios), min(ratios), max(ratios)
    if gradients := cells.value("gradients"):
        scale = _EPS * gradients["largest"]
        found["gradients"] = gradients["difference"] / (scale or _EPS)
    compiled = {
        target: (cells.value(target), cells.value(target, "none"))
        for target in results_lib.TARGETS
    }
    found["compiled"] = {
        target: (ours["bytes"], _ratio(ours["bytes"], plain["bytes"]))
        for target, (ours, plain) in compiled.items()
        if ours and plain
    }
    return Row(network, plan, **found, **_expected(cells, plan))


def _expected(cells, plan):
    """What was predicted, as fields of a row."""
    if plan == "none":
        # Any plan's prediction says what no plan takes.
        others = (cells.value("prediction", each) for each in zoo.OURS)
        expected = next(filter(None, others), None)
        if not expected:
            return {}
        return {
            "predicted": expected["plain_above_gradients"],
            "predicted_ratio": 1.0,
        }
    expected = cells.value("prediction")
    if not expected:
        return {}
    extra = _ratio(expected["extra_flops"], expected["step_flops"])
    return {
        "predicted": expected["peak_above_gradients"],
        "predicted_ratio": _ratio(
            expected["peak_bytes"], expected["plain_bytes"]
        ),
        "predicted_time": 1 + expected["extra_time"],
        "flops": None if extra is None else 1 + extra,
    }


def _ratio(a, b):
    return a / b if b else None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A bar, and the plan that was held against it.

    Attributes:
        network: Name of the network.
        figure: "process", a budget's plan, or a compiler.
        row: The plan's row.
        ratio: The ratio that it reached.
        bar: The ratio at most.
        time_bar: The time at most; None if there is no such bar.
        text: "met", "MISSED", or what is missing.
    """

    network: str
    figure: str
    row: Row
    ratio: float
    bar: float
    time_bar: float | None
    text: str


def verdicts_of(rows):
    """Holds each network's bars against its rows; yields `Verdict`s.

    A bar of memory and time has to be met by one plan: the quickest of those
    that meet the bar of memory stands for them, or else the smallest one. A
    budget's bar is its own plan's. Of the compiled steps the smallest counts.
    """
    for name in dict.fromkeys(row.network for row in rows):
        network = zoo.NETWORKS[name]
        ours = [
            row
            for row in rows
            if row.network == name and row.plan not in ("none", *zoo.PEERS)
        ]
        wanted = [("process", network.ratio, network.time, ours)]
        wanted += [
            (plan, *bars, [row for row in ours if row.plan == plan])
            for plan, bars in network.budgets.items()
        ]
        for figure, bar, time_bar, chosen in wanted:
            chosen = [row for row in chosen if row.ratio is not None]
            if bar is None or not chosen:
                continue
            best = _best(chosen, bar)
            text = "met" if best.ratio <= bar else "MISSED"
            if text == "met" and time_bar is not None:
                if best.time is None:
                    text = "met; time not measured"
                elif best.time[0] > time_bar:
                    text = "MISSED by time"
            yield Verdict(name, figure, best, best.ratio, bar, time_bar, text)
        for target, bar in network.compiled.items():
            chosen = [row for row in ours if target in row.compiled]
            if chosen:
                best = min(chosen, key=lambda row: row.compiled[target][1])
                ratio = best.compiled[target][1]
                # Where the bar is 1, anything less will do.
                met = ratio <= bar if bar < 1 else ratio < 1
                text = "met" if met else "MISSED"
                yield Verdict(name, target, best, ratio, bar, None, text)


def _best(rows, bar):
    def rank(row):
        if row.ratio > bar:
            return 1, row.ratio
        seconds = row.time[0] if row.time else row.predicted_time
        return 0, math.inf if seconds is None else seconds

    return min(rows, key=rank)


def _figure(value, form=".3f"):
    return "" if value is None else f"{value:{form}}"


def _mib(value):
    return "" if value is None else f"{value / _MIB:,.0f}"


def memory_table(rows, size=None):
    """Process memory as title, columns and rows."""
    columns = (
        "network",
        "batch x size",
        "plan",
        "MiB",
        "ratio",
        "with graph",
        "in pool",
        "peak MiB",
        "predicted",
        "error",
    )
    lines = [
        (
            row.network,
            _described(row, size or "full"),
            row.plan,
            _mib(row.memory),
            _figure(row.ratio),
            _figure(row.cold_ratio),
            _figure(row.pool_ratio),
            _mib(row.peak),
            _mib(row.predicted),
            _figure(row.error, "+.0%"),
        )
        for row in rows
        if row.memory is not None or row.predicted is not None
    ]
    return "Process memory of a graph step", columns, lines


def time_table(rows, size=None):
    """Time and gradients as title, columns and rows."""
    columns = (
        "network",
        "batch x size",
        "plan",
        "time",
        "lowest to highest",
        "predicted",
        "FLOPs",
        "gradients, eps",
    )
    lines = []
    for row in rows:
        if row.time is None and row.gradients is None:
            continue
        median, *spread = row.time or (None,)
        too_far = row.gradients is not None and row.gradients > _GRADIENT_BAR
        lines.append(
            (
                row.network,
                _described(row, size or "full"),
                row.plan,
                _figure(median, ".2f"),
                "{:.2f} to {:.2f}".format(*spread) if spread else "",
                _figure(row.predicted_time, ".2f"),
                _figure(row.flops, ".2f"),
                _figure(row.gradients, ".1f") + (" MISSED" if too_far else ""),
            )
        )
    return "Time and gradients of a graph step", columns, lines


def _described(row, size):
    sizes = getattr(zoo.NETWORKS[row.network], size)
    return zoo.describe(row.network, sizes)


def compiled_table(rows, size=None):
    """Compiled memory as title, columns and rows."""
    columns = ["network", "batch x size", "plan"]
    for target in results_lib.TARGETS:
        columns += [f"{target} MiB", "ratio"]
    lines = []
    for row in rows:
        if not row.compiled:
            continue
        cells = [row.network, _described(row, size or "compile"), row.plan]
        for target in results_lib.TARGETS:
            needed, ratio = row.compiled.get(target, (None, None))
            cells += [_mib(needed), _figure(ratio)]
        lines.append(tuple(cells))
    return "As compiled", tuple(columns), lines


def bars_table(rows):
    """The bars as title, columns and rows."""
    columns = (
        "network",
        "figure",
        "plan",
        "ratio",
        "bar",
        "time",
        "bar of time",
        "verdict",
    )
    lines = [
        (
            each.network,
            each.figure,
            each.row.plan,
            _figure(each.ratio),
            _figure(each.bar, ".2f"),
            _figure(
                each.row.time[0] if each.time_bar and each.row.time else None,
                ".2f",
            ),
            _figure(each.time_bar, ".2f"),
            each.text,
        )
        for each in verdicts_of(rows)
    ]
    return "Bars", columns, lines


def prediction_summary(rows):
    """Returns a sentence on the errors of the predicted peaks, or None."""
    errors = {
        f"{row.network}, {row.plan}": abs(row.error)
        for row in rows
        if row.error is not None
    }
    if not errors:
        return None
    found = statistics.median(errors.values()), max(errors.values())
    median, worst = (
        f"{error:.1%} (bar {bar:.0%}: {'met' if error <= bar else 'MISSED'})"
        for error, bar in zip(found, _ERROR_BARS, strict=True)
    )
    return (
        f"Predicted against measured peak of {len(errors)} steps: median "
        f"error {median}, worst {worst}, of {max(errors, key=errors.get)}."
    )


def _print_whole(table, console):
    """Prints a table at its own width, however narrow the terminal is."""
    wide = console.options.update(width=500)
    width = console.measure(table, options=wide).maximum
    rich.console.Console(
        file=console.file, width=max(width, console.width)
    ).print(table)


def _reason(error):
    """The line of a log that names the exception, or else the last one."""
    named = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", error, re.MULTILINE)
    return [*error.strip().splitlines()[-1:], *named][-1][:300]


def show(results, networks, plans, console, *, markdown=False, size=None):
    """Prints the tables of what the results say."""
    rows = [
        row_of(results, network, plan, size)
        for network in dict.fromkeys(networks)
        for plan in dict.fromkeys(["none", *plans])
    ]
    for title, columns, lines in (
        memory_table(rows, size),
        time_table(rows, size),
        compiled_table(rows, size),
        # They are about the full sizes, and those for compilers.
        *([bars_table(rows)] if size is None else []),
    ):
        if not lines:
            continue
        if markdown:
            print(f"\n{title}:\n")
            for line in (columns, ["---"] * len(columns), *lines):
                print(f"| {' | '.join(line)} |")
            continue
        table = rich.table.Table(title=title)
        for column in columns:
            table.add_column(column, no_wrap=True)
        for line, following in itertools.zip_longest(lines, lines[1:]):
            last = not following or following[0] != line[0]
            table.add_row(*line, end_section=last)
        _print_whole(table, console)
    for job, error in results.failures():
        if job.network in networks:
            print(f"\nFailed: {job}: {_reason(error)}", file=console.file)
    if summary := prediction_summary(rows):
        console.print(f"\n{summary}", highlight=False, soft_wrap=True)
