"""The command `targets`: the devices whose compilers can be asked."""

from collections.abc import Sequence

from absl import flags

from tfckpt import devices, tables, units
from tfckpt.cli import options, settings


def run(
    values: flags.FlagValues, arguments: Sequence[str], output: settings.Output
) -> None:
    """Prints the known targets, their memory and where that is from."""
    del values
    if arguments:
        raise options.UsageError(
            f"`targets` takes no arguments. Received: {arguments[0]!r}."
        )
    table = tables.new_table(
        "Targets", "target", "runs on", "memory", "usable", "source"
    )
    for column in table.columns[:2]:
        column.justify = "left"
    table.columns[-1].justify = "left"
    table.add_row("cpu", "this machine", "", "", "needs no extra")
    for device in devices.known():
        table.add_row(
            device.name,
            device.part,
            units.format_size(device.memory_bytes),
            units.format_size(device.usable_bytes),
            device.source,
        )
    output.results.print(table)
    output.results.print(
        "\nAnother GPU is the path of its description, a .txtpb file. All but "
        'cpu need pip install "tfckpt[compile]".',
        markup=False,
        highlight=False,
    )
